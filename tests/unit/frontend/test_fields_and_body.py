"""Parsing of bodies and fields: bounds, nulls, names of faults."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from llmd.errors import RequestError
from llmd.frontend.body import ClientGone, parse, read_json
from llmd.frontend.fields import Fields
from llmd.frontend.limits import MAX_JSON_DEPTH


def nested(depth: int) -> bytes:
    return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


def test_depth_is_bounded_exactly_and_strings_do_not_count() -> None:
    assert parse(nested(MAX_JSON_DEPTH))
    with pytest.raises(RequestError, match=str(MAX_JSON_DEPTH)):
        parse(nested(MAX_JSON_DEPTH + 1))
    assert parse(b'{"a": "' + b"[{" * 500 + b'\\"[[[["}')
    assert parse(b'{"a": [' + b",".join([b"[1]"] * 500) + b"]}")


def test_a_string_that_never_ends_is_looked_at_once() -> None:
    began = time.process_time()
    with pytest.raises(RequestError) as caught:
        parse(b"[]" * MAX_JSON_DEPTH + b'"' + b'\\"' * 50_000)
    assert caught.value.code == "invalid_json"
    assert time.process_time() - began < 10  # some 80 s where each quote is tried as a beginning; it is less than a millisecond


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_a_body_is_utf_8(encoding: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse('{"a": 1}'.encode(encoding))
    assert caught.value.code == "invalid_json"
    assert parse('{"a": "\u00e9"}'.encode("utf-8-sig")) == {"a": "\u00e9"}


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":[' + b"[1]," * 2_000_000 + b"[1]]}",
        b'{"x":[' + b"{}," * 100_000 + b"{}]}",
        b'{"x":{' + b",".join(b'"%d":1' % i for i in range(700_000)) + b"}}",
    ],
)
def test_a_body_of_very_many_small_things_is_refused_before_it_is_parsed(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmd.frontend.body.json.loads", lambda body: pytest.fail("it was parsed"))
    with pytest.raises(RequestError) as caught:
        parse(body)
    assert caught.value.code == "invalid_json"
    assert "limit" in caught.value.message


def test_what_stands_in_strings_is_no_list_and_names_nothing() -> None:
    text = "[{:" * 100_000
    assert parse(json.dumps({"prompt": text}).encode()) == {"prompt": text}
    ids = [[1] * 1000 for _ in range(256)]
    assert parse(json.dumps({"prompt": ids}).encode())["prompt"] == ids


def test_non_finite_numbers_reach_the_field() -> None:
    fields = Fields(parse(b'{"a": NaN, "b": 1e999, "c": -Infinity}'))
    for name in "abc":
        with pytest.raises(RequestError) as caught:
            fields.number(name, 0, 2, 1.0)
        assert caught.value.param == name


@pytest.mark.parametrize("body", [b"", b"[1]", b"{'a': 1}", b"\x00", b"\xff", b'{"a": ' + b"1" * 5000 + b"}"])
def test_what_is_not_an_object_is_invalid_json(body: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        parse(body)
    assert caught.value.code == "invalid_json"


def test_null_is_absent() -> None:
    fields = Fields(dict.fromkeys("abcdefg"))
    assert fields.boolean("a", True) is True
    assert fields.integer("b", 0, 1) is None
    assert fields.number("c", 0, 1, 0.5) == 0.5
    assert fields.string("d", longest=1) is None
    assert fields.mapping("e") is None
    fields.neutral("f", "g")


def test_true_is_no_number_and_1_is_no_boolean() -> None:
    fields = Fields({"a": True, "b": 1})
    for call in (lambda: fields.integer("a", 0, 5), lambda: fields.number("a", 0, 5, 1), lambda: fields.boolean("b")):
        with pytest.raises(RequestError):
            call()


def test_neutral_compares_types_too() -> None:
    Fields({"a": 0}).neutral("a", values=(0, 0.0))
    with pytest.raises(RequestError):
        Fields({"a": False}).neutral("a", values=(0, 0.0))


def test_strict_names_what_nobody_knows() -> None:
    fields = Fields({"a": 1, "b": 2}, "outer.")
    fields.integer("a", 0, 5)
    fields.finish(strict=False)
    with pytest.raises(RequestError) as caught:
        fields.finish(strict=True)
    assert caught.value.param == "outer.b"


def read(parts: list[bytes], *, limit: int, headers: list[tuple[bytes, bytes]] | None = None, gone: bool = False) -> dict[str, Any]:
    waiting: list[MutableMapping[str, Any]] = [{"type": "http.request", "body": p, "more_body": True} for p in parts]
    if gone:
        waiting.append({"type": "http.disconnect"})
    else:
        waiting[-1]["more_body"] = False

    async def receive() -> MutableMapping[str, Any]:
        return waiting.pop(0)

    with ThreadPoolExecutor(1) as executor:
        return asyncio.run(read_json({"headers": headers or []}, receive, limit=limit, executor=executor))


def test_a_body_may_come_in_parts_and_be_large() -> None:
    assert read([b'{"a"', b": 1}"], limit=100) == {"a": 1}
    assert read([b'{"a": "', b"x" * 200_000, b'"}'], limit=10**6) == {"a": "x" * 200_000}


def test_the_limit_counts_bytes_declared_or_not() -> None:
    for headers in ([], [(b"content-length", b"12")]):
        with pytest.raises(RequestError) as caught:
            read([b"123456", b"123456"], limit=10, headers=headers)
        assert caught.value.status == 413


def test_a_client_that_leaves_in_the_body_is_no_error_of_ours() -> None:
    with pytest.raises(ClientGone):
        read([b"{"], limit=10, gone=True)
