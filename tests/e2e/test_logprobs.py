"""Logprobs and stops on a model whose context matters: a small Llama of random weights behind the whole daemon."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.daemon import Daemon
from tests.models import SPECIALS, VOCAB, random_llama


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    directory = tmp_path_factory.mktemp("logprobs")
    model = {"path": str(random_llama(directory / "model")), "dtype": "float32"}
    with Daemon(directory, config={"model": model}).start(timeout=120) as running:
        yield running


def choice(daemon: Daemon, **fields: Any) -> dict[str, Any]:
    answer = daemon.complete(**fields)
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["choices"][0])


def test_echo_gives_text_the_logprobs_that_it_had_when_it_was_generated(daemon: Daemon) -> None:
    made = choice(daemon, prompt="hello world", max_tokens=12, logprobs=1, return_token_ids=True, ignore_eos=True, temperature=0)
    ids = made["prompt_token_ids"] + made["token_ids"]
    again = choice(daemon, prompt=ids, max_tokens=1, echo=True, logprobs=1, prompt_logprobs=2, temperature=1, top_k=1, ignore_eos=True)
    shown = again["logprobs"]
    assert {len(shown[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")} == {len(ids) + 1}
    assert [i for i, value in enumerate(shown["token_logprobs"]) if value is None] == [0]
    assert shown["token_logprobs"][len(made["prompt_token_ids"]) : -1] == pytest.approx(made["logprobs"]["token_logprobs"], abs=1e-3)
    by_id = [entry[str(id)]["logprob"] for id, entry in zip(ids[1:], again["prompt_logprobs"][1:], strict=True)]
    assert by_id == pytest.approx(shown["token_logprobs"][1:-1])
    assert all(len(entry) >= 2 for entry in again["prompt_logprobs"][1:])


def test_logprobs_of_a_prompt_are_those_of_transformers(daemon: Daemon) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    asked = choice(daemon, prompt="hello world", echo=True, logprobs=3, max_tokens=1, temperature=1, top_k=1, return_token_ids=True)
    ids = asked["prompt_token_ids"] + asked["token_ids"]
    loaded = AutoModelForCausalLM.from_pretrained(daemon.directory / "model", dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = loaded(torch.tensor([ids])).logits[0, :-1].clone()
        logits[:, max(SPECIALS.values()) + 1 :] = -torch.inf  # ids that the tokenizer does not know
    expected = torch.log_softmax(logits, -1)
    assert asked["logprobs"]["token_logprobs"][0] is None
    assert asked["logprobs"]["token_logprobs"][1:] == pytest.approx([float(row[id]) for row, id in zip(expected, ids[1:], strict=True)], abs=1e-3)
    for shown, row in zip(asked["logprobs"]["top_logprobs"][1:], expected, strict=True):
        assert sorted(shown.values())[-3:] == pytest.approx(sorted(row.tolist())[-3:], abs=1e-3)


def test_stops_cut_the_greedy_text_on_every_path(daemon: Daemon) -> None:
    prompt = "the quick brown fox"
    text = daemon.text(prompt, max_tokens=48, ignore_eos=True)
    stop = text[20:25]
    assert stop.strip("\ufffd"), "the seed gives nothing to stop at"
    expected = text[: text.find(stop)]
    for wish in ({"stop": stop}, {"stop": [stop, stop[:3] + "\x00"]}, {"stop": [stop + "never", stop]}):
        for asked in (prompt, list(prompt.encode())):
            fields = {"max_tokens": 48, "ignore_eos": True, **wish}
            assert choice(daemon, prompt=asked, **fields)["text"] == expected
            assert "".join(e["choices"][0]["text"] for e in daemon.stream(**{"prompt": asked, **fields})) == expected


def joined(events: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """One choice of a stream, as a whole answer has it."""
    whole: dict[str, Any] = {"text": "", "finish_reason": None, "logprobs": {}, "token_ids": []}
    for piece in (event["choices"][0] for event in events if event["choices"] and event["choices"][0]["index"] == index):
        assert whole["finish_reason"] is None, "nothing comes behind the finish"
        whole["text"] += piece["text"]
        whole["finish_reason"] = piece["finish_reason"]
        whole["token_ids"] += piece["token_ids"]
        for name, values in piece["logprobs"].items():
            whole["logprobs"].setdefault(name, []).extend(values)
    return whole


def wishes(dice: random.Random, free: list[str]) -> dict[str, Any]:
    """Stop strings that stand in the free answers, or nearly, and what else decides of the shape of an answer."""
    text, stops = "".join(free), []
    for _ in range(dice.randrange(1, 4)):
        at = dice.randrange(len(text))
        stops.append(text[at : at + dice.choice([1, 2, 3, 7])] + dice.choice(["", "", "q"]))
    return {"stop": stops, "include_stop_str_in_output": dice.random() < 0.3, "echo": dice.random() < 0.3, "logprobs": dice.choice([1, 2])}


@pytest.mark.parametrize("seed", range(12))
def test_an_answer_is_the_free_one_cut_at_its_first_stop_whole_or_joined(daemon: Daemon, seed: int) -> None:
    dice = random.Random(seed)
    prompts: list[Any] = dice.choice([["the quick brown fox", "a"], ["hello world é"], [list(b"abc")]])
    body: dict[str, Any] = {
        "prompt": prompts,
        "n": dice.choice([1, 3]),
        "max_tokens": dice.randrange(2, 40),
        "temperature": dice.choice([0, 1.2]),
        "seed": seed,
    }
    body |= {"return_token_ids": True, "ignore_eos": dice.random() < 0.7}
    free = daemon.complete(**body).json()["choices"]
    body |= wishes(dice, [choice["text"] for choice in free])
    whole = daemon.complete(**body).json()
    events = list(daemon.stream(**body, stream_options={"include_usage": True}))
    assert whole["usage"] == events[-1]["usage"]
    assert whole["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in whole["choices"])
    for choice, unstopped in zip(whole["choices"], free, strict=True):
        text, prompt = unstopped["text"], prompts[choice["index"] // body["n"]]
        shown = (prompt if isinstance(prompt, str) else bytes(prompt).decode()) if body["echo"] else ""
        at, size = min(((text.find(stop), len(stop)) for stop in body["stop"] if stop in text), default=(len(text), 0))
        assert choice["text"] == shown + text[: at + size if body["include_stop_str_in_output"] else at]
        assert choice["finish_reason"] == ("stop" if size else unstopped["finish_reason"])
        assert choice["token_ids"] == unstopped["token_ids"][: len(choice["token_ids"])]
        stream = joined(events, choice["index"])
        assert stream == {name: choice[name] for name in stream}


def test_ids_that_the_tokenizer_does_not_know_never_appear(daemon: Daemon) -> None:
    known = max(SPECIALS.values()) + 1
    assert known < VOCAB
    made = choice(daemon, prompt="x", max_tokens=1500, temperature=2, ignore_eos=True, return_token_ids=True, seed=3)
    assert len(made["token_ids"]) == 1500 and max(made["token_ids"]) < known
    refused = daemon.complete(prompt=[65, known])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")


def test_a_seed_gives_the_same_text_and_choices_differ(daemon: Daemon) -> None:
    body = {"prompt": "x", "max_tokens": 20, "temperature": 1.5, "seed": 11, "n": 3, "ignore_eos": True}
    first, second = (httpx.post(daemon.url + "/v1/completions", json=body).json()["choices"] for _ in range(2))
    assert first == second
    assert len({c["text"] for c in first}) == 3
