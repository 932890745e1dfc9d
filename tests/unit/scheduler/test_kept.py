"""Output that is sent again after a detokenizer was lost, and requests that go on in a new engine."""

from __future__ import annotations

import pytest

from llmd.scheduler import kept
from llmd.wire.messages import AbortReq, Ack, Finish, SamplingParams, TokenizedGenerateReqInput
from tests.unit.scheduler.harness import Bench, oracle

PROMPT = [4, 5, 6]


def test_all_output_is_sent_again_while_it_runs_and_then_goes_on() -> None:
    bench = Bench()
    bench.send("a", PROMPT, 20)
    for _ in range(8):
        bench.turn()
    so_far = len(bench.out.tokens["a"])
    assert 0 < so_far < 20
    bench.resend("a", PROMPT, 20, bench.out.tokens["a"][:3])
    bench.run()
    assert len(bench.out.again) == 1 and bench.out.again[0].finish is None
    assert bench.out.tokens["a"] == oracle(PROMPT, 20)


def test_what_has_finished_is_kept_until_its_frontend_has_it() -> None:
    bench = Bench()
    bench.send("a", PROMPT, 5)
    bench.run()
    for _ in range(2):  # the answer may be lost as well
        bench.resend("a", PROMPT, 5, [])
        bench.run()
    assert [chunk.finish for chunk in bench.out.again] == [Finish("length")] * 2
    bench.source.queue.append(Ack(rid="a", epoch=1))
    bench.run()
    assert len(bench.scheduler._kept) == 0


def test_logprobs_are_sent_again_from_where_the_frontend_is() -> None:
    bench = Bench()
    bench.send("a", PROMPT, 6, logprobs=2, prompt_logprobs=True)
    bench.run()
    sent = bench.out.logprobs["a"]
    assert len(sent) == 6
    for known in (0, 2, 6):
        bench.resend("a", PROMPT, 6, oracle(PROMPT, known), logprobs=2)
    bench.run()
    assert [chunk.logprobs or [] for chunk in bench.out.again] == [sent, sent[2:], []]
    first = bench.out.first["a"].prompt_logprobs
    assert first is not None and [chunk.prompt_logprobs for chunk in bench.out.again] == [first, None, None]


def test_a_request_without_output_has_nothing_to_send_again() -> None:
    bench = Bench(max_running=1)
    bench.send("a", PROMPT, 20)
    bench.send("b", PROMPT, 20)
    bench.turn()
    bench.turn()
    bench.resend("b", PROMPT, 20, [])
    bench.out.lost.clear()
    bench.run()
    assert bench.out.tokens["b"] == oracle(PROMPT, 20) and bench.out.again == []


def test_an_unknown_request_goes_on_from_what_its_frontend_has() -> None:
    bench = Bench()
    bench.resend("a", PROMPT, 20, oracle(PROMPT, 7))
    bench.out.lost.clear()
    bench.run()
    assert bench.out.tokens["a"] == oracle(PROMPT, 20)


def test_resumed_requests_go_before_new_ones_and_are_never_refused_for_a_full_queue() -> None:
    bench = Bench(max_running=1, max_queued=1)
    bench.send("new", [1], 3)
    bench.send("waits", [2], 3)
    bench.send("refused", [3], 3)
    for rid in ("x", "y"):
        bench.send(rid, PROMPT, 9, output_ids=oracle(PROMPT, 4), resumed=True)
    ended: list[str] = []
    while bench.turn() or bench.scheduler.in_flight:
        ended += [rid for rid, chunk in bench.out.last.items() if chunk.finish and rid not in ended]
    assert ended == ["x", "y", "new", "waits"]
    assert bench.out.errors == {"refused": "queue_full"}
    assert bench.out.tokens["y"] == oracle(PROMPT, 9)


def test_finished_output_is_bounded_and_aborted_output_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MAX_TOKENS", 50)
    bench = Bench()
    for n in range(20):
        bench.send(f"r{n}", PROMPT, 7)
    bench.run()
    assert len(bench.scheduler._kept) == 5
    bench.send("long", PROMPT, 90)
    for _ in range(5):
        bench.turn()
    assert len(bench.scheduler._kept) == 6
    bench.source.queue.append(AbortReq(rid="long", epoch=1))
    bench.run()
    assert len(bench.scheduler._kept) == 5
    bench.scheduler.frontend_gone(0, 1)
    assert len(bench.scheduler._kept) == 0


def test_a_resubmission_that_was_complete_ends_at_once_with_all_its_text() -> None:
    bench = Bench()
    request = TokenizedGenerateReqInput(
        rid="a", frontend=0, epoch=1, input_ids=PROMPT, sampling=SamplingParams(max_new_tokens=4), output_ids=oracle(PROMPT, 4), resumed=True
    )
    bench.source.queue.append(request)
    bench.run()
    assert (bench.out.tokens["a"], bench.out.last["a"].finish) == (oracle(PROMPT, 4), Finish("length"))


def test_resumed_requests_catch_up_in_few_steps_whoever_streams_beside_them() -> None:
    bench = Bench(max_running=16, pages=1024, context=512, chunk=None, policy="lpm")
    bench.send("stream", [1, 2], 400)
    for _ in range(5):
        bench.turn()
    prompts = {f"r{number}": [number] * 100 for number in range(8)}
    for rid, prompt in prompts.items():
        bench.send(rid, prompt, 150, output_ids=oracle(prompt, 100), resumed=True)
    for _ in range(6):
        bench.turn()
    assert all(len(bench.out.tokens[rid]) > 100 for rid in prompts), "1600 tokens, beside a stream, in chunks of 512"
    bench.send("new", [7] * 400, 3)
    bench.turn()
    assert bench.runner.step_sizes[-1] < 100, "a new one does not hurry"
    bench.run()
    assert all(bench.out.tokens[rid] == oracle(prompt, 150) for rid, prompt in prompts.items())
