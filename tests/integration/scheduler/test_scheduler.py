"""The scheduler process, seen from its peers."""

from __future__ import annotations

import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.daemon import Brake, signal_another_thread
from tests.integration.scheduler.engine import EOS, SLOW, Engine, echo

Start = Callable[..., Engine]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts engines in short directories (socket paths are limited to 107 bytes) and ends them."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="llmd-")))

        def begin(**options: Any) -> Engine:
            return stack.enter_context(Engine(directory, **options))

        yield begin


def test_it_answers_and_tells_what_it_is(start: Start) -> None:
    engine = start()
    engine.send("a", [104, 105], 5)
    (answer,) = engine.wait_over("a")
    assert answer.tokens == [104, 105, 104, 105, 104]
    assert answer.finish is not None and answer.finish.reason == "length"
    assert engine.ready is not None
    info = engine.ready.info
    assert info["context_length"] == 1024 and info["kv"]["page_size"] == 16 and info["max_running_requests"] == 64
    assert info["max_total_tokens"] == info["kv"]["pages_total"] * 16 == 64 * 1024
    assert engine.terminate() == 0


def test_64_at_once_each_get_their_own_answer_and_all_pages_come_back(start: Start) -> None:
    engine = start()
    prompts = {f"r{i}": [(i * 7 + j) % 250 for j in range(1 + i % 40)] for i in range(64)}
    for i, (rid, prompt) in enumerate(prompts.items()):
        engine.send(rid, prompt, 50 + i, frontend=i % 2)
    for (rid, prompt), answer in zip(prompts.items(), engine.wait_over(*prompts), strict=True):
        assert answer.tokens == echo(prompt, 50 + int(rid[1:]))
    assert_idle(engine)
    assert engine.gauge("llmd_kv_accounting_errors_total") == 0


def test_running_out_of_pages_retracts_and_nobody_loses_a_token(start: Start) -> None:
    # 16 requests of up to 420 tokens want about 6,700; the pool holds 2,560.
    engine = start(args={"memory": {"max_total_tokens": 2560}})
    prompts = {f"r{i}": [i, i + 1, 3] * 6 for i in range(16)}
    for rid, prompt in prompts.items():
        engine.send(rid, prompt, 400)
    for (_, prompt), answer in zip(prompts.items(), engine.wait_over(*prompts), strict=True):
        assert answer.tokens == echo(prompt, 400)
    assert engine.gauge("llmd_requests_retracted_total") > 0
    assert_idle(engine)


def test_stop_tokens_end_a_request_unless_ignored(start: Start) -> None:
    engine = start()
    prompt = [10, 11, EOS]
    engine.send("eos", prompt, 9)
    engine.send("ignored", prompt, 9, sampling={"ignore_eos": True})
    engine.send("token", prompt, 9, sampling={"ignore_eos": True, "stop_token_ids": (11,)})
    engine.send("later", [10, EOS], 9, sampling={"min_new_tokens": 3})
    eos, ignored, token, later = engine.wait_over("eos", "ignored", "token", "later")
    assert (eos.tokens, eos.finish.reason, eos.finish.matched) == (prompt, "stop", EOS)  # type: ignore[union-attr]
    assert (ignored.tokens, ignored.finish.reason) == (echo(prompt, 9), "length")  # type: ignore[union-attr]
    assert (token.tokens, token.finish.matched) == ([10, 11], 11)  # type: ignore[union-attr]
    assert EOS not in later.tokens[:3] and later.tokens[3] == EOS


def test_the_context_ends_a_request(start: Start) -> None:
    engine = start(args={"model": {"path": "dummy", "context_length": 48}})
    engine.send("long", list(range(40)), 100)
    engine.send("full", list(range(48)), 100)
    engine.send("over", list(range(49)), 1)
    long, full, over = engine.wait_over("long", "full", "over")
    assert long.finish is not None and long.finish.reason == "length" and len(long.tokens) == 8
    assert full.error is not None and full.error.code == "context_length_exceeded"
    assert over.error is not None and over.error.code == "context_length_exceeded"


def test_a_resubmission_goes_on_from_the_tokens_its_client_has(start: Start) -> None:
    engine = start()
    prompt = [1, 2, 3]
    engine.send("again", prompt, 10, output_ids=echo(prompt, 4))
    engine.send("done", prompt, 4, output_ids=echo(prompt, 4))
    again, done = engine.wait_over("again", "done")
    assert again.tokens == echo(prompt, 10) and again.chunks[0].token_ids == echo(prompt, 5)
    assert done.finish is not None and done.finish.reason == "length" and done.chunks[0].token_ids == echo(prompt, 4)


def test_logprobs_of_output_and_prompt(start: Start) -> None:
    engine = start()
    engine.send("a", [5, 6, 7], 2, logprobs=2, prompt_logprobs=True)
    engine.send("scored", [5, 6, 7], 0, logprobs=0, prompt_logprobs=True)
    engine.send("nothing", [5, 6, 7], 0)
    a, scored, nothing = engine.wait_over("a", "scored", "nothing")
    logprobs = a.chunks[0].logprobs
    assert logprobs is not None and logprobs[0].token_id == 5 and len(logprobs[0].top) == 2
    for answer in (a, scored):
        prompt = answer.chunks[0].prompt_logprobs
        assert prompt is not None and [entry.token_id for entry in prompt] == [5, 6, 7] and prompt[0].logprob is None
    assert all(chunk.prompt_logprobs is None for chunk in a.chunks[1:])
    assert scored.tokens == nothing.tokens == []


def test_aborts_take_effect_at_once_running_or_waiting(start: Start, tmp_path: Path) -> None:
    engine = start(args={"memory": {"max_running_requests": 1}}, failpoints=Brake(tmp_path).steps)
    engine.send("running", [1], 900)
    engine.until("first token", lambda: engine.answers["running"].tokens, 5)
    engine.send("waiting", [2], 900)
    engine.send("next", [3], 3)
    engine.abort("waiting")
    engine.abort("running")
    assert engine.wait_over("next")[0].tokens == [3, 3, 3]
    engine.until("the detokenizer is told", lambda: engine.forgotten, 5)
    assert engine.forgotten == ["running"]
    engine.send("waiting", [4], 2)
    assert engine.wait_over("waiting")[0].tokens == [4, 4]
    assert_idle(engine)


def test_a_dead_frontends_requests_are_aborted(start: Start, tmp_path: Path) -> None:
    brake = Brake(tmp_path)
    engine = start(failpoints=brake.steps)
    engine.send("theirs", [1], 900, frontend=1)
    engine.send("successors", [3], 100, frontend=1, incarnation=2)
    engine.send("ours", [2], 100, frontend=0)
    engine.until("all run", lambda: all(engine.answers[rid].tokens for rid in ("theirs", "successors", "ours")), 5)
    assert engine.command("frontend_gone", frontend=1, incarnation=1).data == {"aborted": 1}
    brake.release()
    assert engine.wait_over("ours")[0].tokens == [2] * 100
    assert engine.wait_over("successors")[0].tokens == [3] * 100
    assert engine.answers["theirs"].finish is None
    assert engine.forgotten == ["theirs"]
    assert_idle(engine)


def test_flush_is_refused_while_anything_runs(start: Start, tmp_path: Path) -> None:
    engine = start(args={"memory": {"max_running_requests": 1}}, failpoints=Brake(tmp_path).steps)
    engine.send("a", [1], 900)
    engine.send("b", [1], 900)
    engine.until("a runs", lambda: engine.answers["a"].tokens, 5)
    engine.until("b waits", lambda: engine.command("flush").data == {"running": 1, "waiting": 1}, 5)
    busy = engine.command("flush")
    assert not busy.ok and busy.code == "busy"
    engine.abort("a")
    engine.abort("b")
    engine.until("flush", lambda: engine.command("flush").ok, 5)
    assert engine.command("freeze").ok
    unknown = engine.command("no-such-verb")
    assert not unknown.ok and unknown.code == "not_found"


def test_the_queue_is_bounded_and_refuses_at_once(start: Start, tmp_path: Path) -> None:
    brake = Brake(tmp_path)
    engine = start(args={"memory": {"max_running_requests": 1}, "scheduler": {"max_queued_requests": 8}}, failpoints=brake.steps)
    rids = [f"r{i}" for i in range(50)]
    engine.send(rids[0], [1, 2], 400)
    engine.until("it runs", lambda: engine.answers[rids[0]].tokens, 5)
    for rid in rids[1:]:
        engine.send(rid, [1, 2], 20)
    engine.until("41 refusals", lambda: sum(engine.answers[rid].error is not None for rid in rids) == 41, 5)
    assert not engine.answers[rids[0]].over
    brake.release()
    answers = engine.wait_over(*rids)
    assert {a.error.code for a in answers if a.error} == {"queue_full"}
    assert [rid for rid, a in zip(rids, answers, strict=True) if a.finish] == rids[:9]


def test_waiting_and_running_are_limited_in_time(start: Start, tmp_path: Path) -> None:
    limits = {"queue_timeout": 0.3, "request_timeout": 1.0 * SLOW}  # what waits is to be given up well before what runs
    engine = start(args={"memory": {"max_running_requests": 1}, "scheduler": limits}, failpoints=Brake(tmp_path).steps)
    began = time.monotonic()
    engine.send("runs", [1], 900)
    engine.send("waits", [1], 900)
    assert engine.wait_over("waits")[0].error.code == "queue_timeout"  # type: ignore[union-attr]
    assert time.monotonic() - began >= 0.3
    assert engine.wait_over("runs")[0].error.code == "request_timeout"  # type: ignore[union-attr]
    assert 1.0 * SLOW <= time.monotonic() - began < 20 * SLOW
    assert_idle(engine)


def test_what_can_never_fit_is_refused_at_once(start: Start) -> None:
    engine = start(args={"memory": {"max_total_tokens": 64, "clamp_context": True}})
    assert engine.ready is not None and engine.ready.info["context_length"] == 64
    engine.send("fits", [1] * 60, 4)
    engine.send("never", [1] * 65, 4)
    fits, never = engine.wait_over("fits", "never")
    assert fits.tokens == [1] * 4
    assert never.error is not None and never.error.code == "context_length_exceeded"


def test_what_is_not_a_request_of_this_epoch_is_dropped(start: Start, tmp_path: Path) -> None:
    brake = Brake(tmp_path)
    engine = start(failpoints=brake.steps)
    engine.send("old", [1], 4, epoch=7)
    engine.send_frame(b"\xc1 not msgpack")
    engine.send("twice", [1], 400)
    engine.send("twice", [2], 400)
    engine.send("bad", [1, 300], 4)
    engine.send("empty", [], 4)
    engine.until("it is a duplicate", lambda: engine.gauge("llmd_requests_duplicate_total") == 1, 10)
    brake.release()
    twice, bad, empty = engine.wait_over("twice", "bad", "empty")
    assert twice.tokens == [1] * 400
    assert bad.error is not None and empty.error is not None
    assert "old" not in engine.answers
    assert engine.gauge("llmd_requests_duplicate_total") == 1
    assert engine.gauge('llmd_wire_stale_messages_total{channel="scheduler_input"}') == 1
    assert engine.gauge('llmd_wire_bad_frames_total{channel="scheduler_input"}') == 1


def test_a_fault_in_one_request_costs_that_one_only(start: Start) -> None:
    engine = start(failpoints="scheduler.prompt(RAISEME)=raise")
    engine.send("good", [1, 2], 200)
    engine.send("bad", [3], 20, debug_text="please RAISEME now")
    engine.send("other", [4], 20)
    good, bad, other = engine.wait_over("good", "bad", "other")
    assert bad.error is not None and bad.error.code == "internal_error"
    assert good.tokens == echo([1, 2], 200) and other.tokens == [4] * 20
    assert_idle(engine)


def test_a_step_that_fails_costs_its_requests_and_the_next_are_served(start: Start) -> None:
    engine = start(failpoints="scheduler.step=1*raise")
    engine.send("a", [1], 5)
    assert engine.wait_over("a")[0].error.code == "internal_error"  # type: ignore[union-attr]
    engine.send("b", [2], 5)
    assert engine.wait_over("b")[0].tokens == [2] * 5
    assert_idle(engine)


def test_while_the_detokenizer_is_away_outputs_are_kept_then_work_stops_then_all_arrives(start: Start) -> None:
    args = {"model": {"path": "dummy", "context_length": 8192}, "supervision": {"heartbeat": 0.05, "hang_timeout": 30.0}}
    engine = start(args=args, detokenizer=False)
    rids = [f"r{i}" for i in range(12)]
    for i, rid in enumerate(rids):
        engine.send(rid, [i, 100], 6000)
    engine.until("blocked", lambda: engine.heartbeats and engine.heartbeats[-1].phase == "blocked on detokenizer", 20)
    steps = engine.heartbeats[-1].steps
    time.sleep(0.5)
    engine.gauge("llmd_requests_running")
    assert engine.heartbeats[-1].steps <= steps + 1 and engine.heartbeats[-1].step_age_s < 0.3 * SLOW
    engine.open_detokenizer()
    for i, answer in enumerate(engine.wait_over(*rids, timeout=40)):
        assert answer.tokens == echo([i, 100], 6000)
    assert_idle(engine)


def test_idle_costs_nothing_and_wakes_at_once(start: Start) -> None:
    engine = start(args={"supervision": {"heartbeat": 0.5}})
    engine.send("warm", [1], 1)
    engine.wait_over("warm")
    process = psutil.Process(engine.process.pid)
    before = process.cpu_times()
    time.sleep(2)
    after = process.cpu_times()
    assert after.user + after.system - before.user - before.system < 0.05 * SLOW
    delays = []
    for i in range(20):
        began = time.monotonic()
        engine.send(f"r{i}", [1], 1)
        while not engine.answers[f"r{i}"].over:
            engine.pump(0.5)
        delays.append(time.monotonic() - began)
    assert sorted(delays)[10] < 0.005 * SLOW


def test_a_new_epoch_removes_the_sockets_of_others_and_a_term_in_mid_step_ends_with_0(start: Start) -> None:
    engine = start()
    engine.process.kill()
    engine.process.wait(10 * SLOW)
    private = engine.ports.private
    assert (private / "scheduler_input.1").exists()
    engine.__exit__()
    again = start(epoch=2, failpoints="scheduler.step=hang")
    assert sorted(p.name for p in private.glob("scheduler_input.*")) == ["scheduler_input.2"]
    again.send("a", [1], 5)
    again.until("it hangs", lambda: again.heartbeats and again.heartbeats[-1].step_age_s > 0.1, 5)
    assert again.terminate() == 0


def test_a_term_ends_it_whichever_thread_gets_it(start: Start) -> None:
    engine = start()
    engine.send("a", [1], 3)
    engine.wait_over("a")
    assert_idle(engine)
    signal_another_thread(engine.process.pid, signal.SIGTERM)
    assert engine.process.wait(10 * SLOW) == 0


def test_a_pool_that_cannot_work_ends_with_78_and_says_what_would(start: Start, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="llmd-") as directory:
        engine = Engine(Path(directory), args={"memory": {"max_total_tokens": 500}})
        try:
            assert engine.process.wait(15 * SLOW) == 78
            text = engine.log.read_text()
            assert "memory.max_total_tokens: 1024" in text and "model.context_length: 496" in text
        finally:
            engine.__exit__()


def test_a_storm_of_aborts_harms_nobody(start: Start) -> None:
    engine = start(args={"memory": {"max_running_requests": 16, "max_total_tokens": 2048}}, failpoints="scheduler.step=delay(1ms)")
    chance = random.Random(7)
    kept: dict[str, list[int]] = {}
    open_rids: list[str] = []
    for i in range(400):
        rid, prompt = f"r{i}", [i % 250, (i + 1) % 250, 7] * chance.randint(1, 20)
        engine.send(rid, prompt, chance.randint(1, 120))
        if i % 4 == 0:
            kept[rid] = prompt
        else:
            open_rids.append(rid)
        if len(open_rids) > 40 or chance.random() < 0.5:
            engine.abort(open_rids.pop(chance.randrange(len(open_rids))) if open_rids else "never-sent")
        engine.pump(0)
    for rid in open_rids:
        engine.abort(rid)
    for (_, prompt), answer in zip(kept.items(), engine.wait_over(*kept, timeout=30), strict=True):
        assert answer.finish is not None and answer.tokens == echo(prompt, len(answer.tokens))
    assert_idle(engine)
    assert engine.gauge("llmd_kv_accounting_errors_total") == 0
    assert "Traceback" not in engine.log.read_text()


def assert_idle(engine: Engine) -> None:
    """Nothing runs, nothing waits, every page is free."""
    engine.until("idle", lambda: engine.gauge("llmd_requests_running") == 0 == engine.gauge("llmd_requests_waiting"), 5)
    assert engine.gauge('llmd_kv_pages{state="active"}') == 0
    free, cached = engine.gauge('llmd_kv_pages{state="free"}'), engine.gauge('llmd_kv_pages{state="cached"}')
    assert free + cached == engine.gauge("llmd_kv_capacity_pages") > 0
    flushed = engine.command("flush")
    assert flushed.ok and flushed.data["pages_freed"] == cached
    assert engine.gauge('llmd_kv_pages{state="free"}') == engine.gauge("llmd_kv_capacity_pages")
    assert engine.gauge("llmd_kv_accounting_errors_total") == 0
    flushed = engine.command("flush")
    assert flushed.ok and flushed.data == {"pages_freed": 0}
    assert engine.process.poll() is None
