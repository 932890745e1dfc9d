"""The API's description is the API: every route, every field that an endpoint reads, every body in full; and its page needs nobody else."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from llmd.config.server_args import HttpArgs
from llmd.errors import RequestError
from llmd.frontend.access import Access
from llmd.frontend.app import _routes, access_of, create_app
from llmd.frontend.exchange import Exchange
from llmd.frontend.fields import Fields
from llmd.frontend.native.admin import ALIASES
from llmd.frontend.native.generate import Generate
from llmd.frontend.native.params import _UNSUPPORTED, read_sampling
from llmd.frontend.native.tokenize import Detokenize, Tokenize
from llmd.frontend.openai.chat import ChatCompletions
from llmd.frontend.openai.completions import Completions
from llmd.frontend.openai.embeddings import Embeddings
from llmd.frontend.openapi import bodies
from llmd.frontend.openapi.document import ADMIN, OPEN, document, text
from llmd.frontend.openapi.serve import DOCUMENT, page
from llmd.frontend.runtime import Runtime
from llmd.tokenizer.chat import ChatTemplate
from llmd.tokenizer.facts import TokenFacts
from llmd.tokenizer.load import Tokenizer
from tests.daemon import SLOW

from .test_access import make_runtime
from .test_app import nothing, served
from .test_state import READY


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Runtime]:
    made = make_runtime(tmp_path, HttpArgs())
    yield made
    made.manager.executor.shutdown()


def test_the_written_document_is_current() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == text(), "run: make docs"


def test_it_has_every_route_and_no_other(runtime: Runtime) -> None:
    found = {(path.replace("{model}", "{model:path}"), method.upper()) for path, item in document()["paths"].items() for method in item}
    routes = _routes(runtime)
    assert found == {(route.path, method) for route in routes for method in route.methods or () if method != "HEAD"}
    kinds = access_of(routes)
    assert {path for path, kind in kinds.items() if kind in (Access.OPEN, Access.METRICS)} == set(OPEN)
    assert {path for path, kind in kinds.items() if kind is Access.ADMIN} == set(ADMIN)


def test_every_post_describes_its_body_in_full() -> None:
    made = document()
    schemas = made["components"]["schemas"]
    names = set()
    for path, item in made["paths"].items():
        if "post" not in item:
            continue
        schema = schemas[item["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]]
        names.add(path)
        assert schema["properties"], path
        for name, field in schema["properties"].items():
            assert field.get("type") or field.get("anyOf") or field.get("$ref"), (path, name)
        assert {"200", "400", "401", "429", "503"} <= set(item["post"]["responses"])
    assert len(names) >= 11
    assert len(schemas["ChatCompletionRequest"]["properties"]) > 30
    for reference in re.findall(r'"#/components/schemas/(\w+)"', text()):
        assert reference in schemas


class Spy:
    """What an endpoint reads of its body: names with an effect, and others."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.known: set[str] = set()
        self.without_effect: set[str] = set()
        spy, get, ignore, neutral = self, Fields.get, Fields.ignore, Fields.neutral

        def spied_get(fields: Fields, name: str) -> Any:
            if fields.path("") == "":
                spy.known.add(name)
            return get(fields, name)

        def spied_ignore(fields: Fields, *names: str) -> None:
            if fields.path("") == "":
                spy.without_effect.update(names)
            ignore(fields, *names)

        def spied_neutral(fields: Fields, *names: str, **more: Any) -> None:
            if fields.path("") == "":
                spy.without_effect.update(names)
            neutral(fields, *names, **more)

        monkeypatch.setattr(Fields, "get", spied_get)
        monkeypatch.setattr(Fields, "ignore", spied_ignore)
        monkeypatch.setattr(Fields, "neutral", spied_neutral)

    @property
    def read(self) -> set[str]:
        return self.known - self.without_effect


def equip(runtime: Runtime) -> None:
    inner = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    runtime.manager.equip(Tokenizer(inner, TokenFacts(None, False, ())), ChatTemplate("{{ messages[0].content }}"))
    runtime.view.prepare()
    runtime.view.take(READY)


@pytest.mark.parametrize(
    ("endpoint", "body", "given"),
    [
        (ChatCompletions, bodies.ChatCompletionRequest, [{"messages": [{"role": "user", "content": "a"}]}]),
        (Completions, bodies.CompletionRequest, [{"prompt": "a"}]),
        (Embeddings, bodies.EmbeddingRequest, [{"input": "a"}]),
        (Generate, bodies.GenerateRequest, [{"text": "a"}]),
        (Tokenize, bodies.TokenizeRequest, [{"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}]),
        (Detokenize, bodies.DetokenizeRequest, [{"tokens": [0]}]),
    ],
)
async def test_the_fields_are_those_that_the_endpoint_reads(
    endpoint: Callable[[Runtime], Any], body: type[Any], given: list[dict[str, Any]], runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    equip(runtime)
    spy = Spy(monkeypatch)
    made = endpoint(runtime)
    for data in given:
        if hasattr(made, "prepare"):
            await made.prepare(Exchange(), data)
        else:
            fields = Fields(data)
            fields.get("model")
            await made.answer(fields)
    assert spy.read | ({"response_format"} & set(body.model_fields)) == set(body.model_fields)


def test_the_fields_of_sampling_params_are_those_that_are_read(runtime: Runtime) -> None:
    fields = set(bodies.NativeSampling.model_fields)
    read_sampling(dict.fromkeys(fields), "sampling_params", vocabulary=2, manager=runtime.manager)
    assert not fields & set(_UNSUPPORTED)
    for name in fields:
        with pytest.raises(RequestError, match=re.escape(name)):
            read_sampling({name: {"no": "value"}}, "sampling_params", vocabulary=2, manager=runtime.manager)


@pytest.mark.parametrize("alias", ALIASES, ids=lambda alias: alias.verb)
def test_the_fields_of_the_administrative_paths_are_those_that_are_read(alias: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {"flush": bodies.FlushRequest, "abort": bodies.AbortRequest, "reload": bodies.ReloadRequest}
    spy = Spy(monkeypatch)
    alias.translate(Fields({"rid": "x", "model_path": "y"}))
    assert spy.read == set(kinds[alias.verb].model_fields)


def test_the_events_of_streams_are_described() -> None:
    made = document()
    for path, name in (("/v1/chat/completions", "ChatCompletionChunk"), ("/v1/completions", "CompletionChunk"), ("/generate", "Generated")):
        schema = made["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]["schema"]
        piece, last = schema["properties"]["data"]["anyOf"]
        assert [kind["$ref"].rpartition("/")[2] for kind in piece["contentSchema"]["anyOf"]] == [name, "Error"]
        assert last == {"const": "[DONE]"}
        assert made["components"]["schemas"][name]["properties"]


def test_the_document_says_what_the_endpoints_hold_bodies_to() -> None:
    schemas = document()["components"]["schemas"]
    for name, fields in (("GenerateRequest", ["text", "input_ids"]), ("TokenizeRequest", ["prompt", "messages"])):
        assert [option["required"] for option in schemas[name]["oneOf"]] == [[field] for field in fields]
    for name in ("ChatCompletionRequest", "CompletionRequest", "NativeSampling"):
        (biases,) = [option for option in schemas[name]["properties"]["logit_bias"]["anyOf"] if option["type"] == "object"]
        assert biases["patternProperties"] and biases["additionalProperties"] is False


async def test_the_list_of_paths_is_that_of_the_document(runtime: Runtime) -> None:
    async with served(create_app(runtime, nothing())) as url, httpx.AsyncClient(timeout=20 * SLOW) as client:
        listed = (await client.get(url + "/")).json()["paths"]
    assert sorted(listed) == sorted(f"{method.upper()} {path}" for path, item in document()["paths"].items() for method in item)
    ids = [operation["operationId"] for item in document()["paths"].values() for operation in item.values()]
    assert len(ids) == len(set(ids))


async def test_document_and_page_are_served_and_the_page_needs_nothing_from_elsewhere(runtime: Runtime) -> None:
    async with served(create_app(runtime, nothing())) as url, httpx.AsyncClient(timeout=20 * SLOW) as client:
        assert (await client.get(url + "/openapi.json")).json() == document()
        answer = await client.get(url + "/docs")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    assert "<script" not in answer.text and "http://" not in answer.text and "https://" not in answer.text
    for word in ("/v1/chat/completions", "max_completion_tokens", "encoding_format", "sampling_params", "rate_limit_exceeded"):
        assert word in answer.text


def test_what_is_written_in_the_document_is_text_on_the_page() -> None:
    made = json.loads(json.dumps(document()))
    made["paths"]["/v1/completions"]["post"]["summary"] = "<script>alert(1)</script>"
    assert "<script" not in page(made)
