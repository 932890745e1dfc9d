"""Requests in flight, the engine's picture, the access log: each without a process."""

from __future__ import annotations

import asyncio
import json
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest

from llmd.config import ServerArgs
from llmd.errors import RequestError
from llmd.frontend.access_log import AccessLog
from llmd.frontend.engine_view import EngineView
from llmd.frontend.exchange import OUTCOMES, Exchange, outcome_of
from llmd.frontend.line_file import KEEP
from llmd.frontend.req_state import LOOSE, Generation
from llmd.plan.ports import PortArgs
from llmd.plan.spec import Boot, ModelFiles
from llmd.wire.messages import Finish, Publish, SamplingParams, TextChunk, TokenizedGenerateReqInput, TokenLogprob

FILES = ModelFiles(
    kind="dummy",
    path="",
    name="toy",
    small_dir="",
    weights_version="file",
    weights_bytes=0,
    context_length=77,
    vocab_size=2,
    tokenizer_size=2,
    eos_token_ids=(),
    bos_token_id=None,
    add_bos=False,
    has_chat_template=False,
    architecture="",
    quantization="",
)
BOOT = Boot(start_id="", started_at=0, args=ServerArgs(), ports=PortArgs("/x"), files=FILES, processes=(), http_url="", state_dir="", cache_dir="", log_dir="")
READY = Publish(
    state="ready", stage="", reason="", degraded=(), progress=1, epoch=1, engine_up=True, detokenizer_incarnation=1, weights_version="", model={}, metrics=""
)


def view(**changes: Any) -> EngineView:
    made = EngineView(BOOT, restarted=False)
    made.prepare()
    made.take(msgspec.structs.replace(READY, **changes))
    return made


def refusal(v: EngineView) -> str | None:
    error = v.refusal()
    return error.code if error else None


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, None),
        ({"degraded": ("slow",)}, None),
        ({"state": "starting"}, "loading"),
        ({"state": "loading"}, "loading"),
        ({"state": "warming"}, "loading"),
        ({"state": "recovering"}, "engine_unavailable"),
        ({"engine_up": False}, "engine_unavailable"),
        ({"detokenizer_incarnation": 0}, "engine_unavailable"),
        ({"state": "paused"}, "engine_unavailable"),
        ({"state": "failed"}, "engine_unavailable"),
        ({"state": "draining"}, "draining"),
        ({"state": "stopping"}, "draining"),
    ],
)
def test_each_state_has_its_answer(changes: dict[str, Any], code: str | None) -> None:
    assert refusal(view(**changes)) == code
    assert view(**changes).ready == (code is None)


def test_before_control_has_spoken() -> None:
    fresh = EngineView(BOOT, restarted=False)
    assert refusal(fresh) == "loading"
    assert not fresh.started
    assert fresh.metrics() is None
    assert fresh.health(False)["status"] == "starting"
    assert fresh.weights_version == "file"
    assert fresh.context_length == 77


def test_a_frontend_that_is_restarted_says_so_until_it_can_serve() -> None:
    again = EngineView(BOOT, restarted=True, rank=1)
    assert (again.health(False)["status"], again.health(False)["reason"]) == ("recovering", "frontend-1 is being restarted")
    again.take(msgspec.structs.replace(READY, reason="frontend-1 is away", degraded=("frontend-1 is away",)))
    assert (again.health(False)["status"], again.health(False)["reason"]) == ("recovering", "frontend-1 is away")
    again.take(READY)
    assert (again.health(False)["status"], again.health(False)["reason"]) == ("recovering", "frontend-1 is being restarted")
    again.prepare()
    assert (again.health(True)["status"], again.health(True)["reason"]) == ("ready", "")


def test_facts_come_from_the_engine_once_it_is_known() -> None:
    known = view(model={"context_length": 50, "max_total_tokens": 60}, weights_version="w")
    assert (known.context_length, known.kv_capacity, known.weights_version) == (50, 60, "w")


def test_a_drain_command_counts_at_once_and_resume_ends_it() -> None:
    v = view()
    v.drain()
    assert (v.state, refusal(v), v.draining) == ("draining", "draining", True)
    v.resume()
    assert refusal(v) is None
    v.shutting_down = True
    assert refusal(v) == "shutting_down"


def request(rid: str) -> TokenizedGenerateReqInput:
    return TokenizedGenerateReqInput(rid=rid, frontend=0, epoch=1, input_ids=[1, 2], sampling=SamplingParams(max_new_tokens=9))


async def test_what_a_slow_reader_has_not_taken_is_merged() -> None:
    generation = Generation("g", streamed=True)
    a, b = generation.add(request("a")), generation.add(request("b"))
    for i, text in enumerate("xyz"):
        a.put(TextChunk("a", i, text, [i], cached_tokens=5))
    b.put(TextChunk("b", 0, "w", [9], Finish("stop")))
    assert await generation.wait(0)
    deltas = generation.take()
    assert [(d.index, d.text, d.token_ids) for d in deltas] == [(0, "xyz", [0, 1, 2]), (1, "w", [9])]
    assert a.cached_tokens == 2, "never more than the prompt"
    assert not generation.done
    assert not await generation.wait(0.01)
    a.put(TextChunk("a", 3, "", [], Finish("length")))
    assert await generation.wait(1)
    generation.take()
    assert generation.done
    assert a.output_ids == [0, 1, 2]


async def test_a_whole_answer_is_woken_once_at_the_end() -> None:
    generation = Generation("g", streamed=False)
    a = generation.add(request("a"))
    waiter = asyncio.create_task(generation.wait(5))
    await asyncio.sleep(0)
    a.put(TextChunk("a", 0, "x", [1]))
    await asyncio.sleep(0)
    assert not waiter.done()
    a.put(TextChunk("a", 1, "y", [2], Finish("stop")))
    assert await waiter
    assert generation.take()[0].text == "xy"


async def test_errors_and_disconnects_wake_too_and_the_first_error_counts() -> None:
    generation = Generation("g", streamed=False)
    generation.add(request("a"))
    waiter = asyncio.create_task(generation.wait(5))
    await asyncio.sleep(0)
    generation.fail(RequestError("one", code="aborted"))
    generation.fail(RequestError("two", code="loading"))
    assert await waiter
    assert generation.error is not None
    assert generation.error.message == "one"
    other = Generation("h", streamed=False)
    other.disconnect()
    assert await other.wait(0)


def test_the_worst_outcome_stays() -> None:
    exchange = Exchange()
    for outcome in ("stop", "error", "length"):
        exchange.settle(outcome)
    assert exchange.outcome == "error"


def test_every_code_has_a_known_outcome() -> None:
    from llmd.errors import CODES

    assert {outcome_of(RequestError("", code=code)) for code in CODES} <= set(OUTCOMES)


def log_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(log: AccessLog, path: str, status: int) -> None:
    exchange = Exchange()
    exchange.status = status
    exchange.request_id = 'a"b'
    log.write({"path": path, "method": "GET", "client": ("127.0.0.1", 5)}, exchange)


def test_excluded_paths_are_whole_segments_and_only_2xx(tmp_path: Path) -> None:
    log = AccessLog(tmp_path / "log" / "access.log", role="frontend-0", exclude=("/metrics", "/health/"), as_json=True)
    log.start()
    for path, status in [("/metrics", 200), ("/metrics/x", 204), ("/metricsx", 200), ("/metrics", 503), ("/health", 200), ("/health_generate", 200)]:
        write(log, path, status)
    log.close()
    assert [(line["path"], line["status"]) for line in log_lines(tmp_path / "log" / "access.log")] == [
        ("/metricsx", 200),
        ("/metrics", 503),
        ("/health_generate", 200),
    ]


def test_newlines_cannot_forge_a_line(tmp_path: Path) -> None:
    for as_json in (True, False):
        path = tmp_path / f"{as_json}.log"
        log = AccessLog(path, role="f", exclude=(), as_json=as_json)
        log.start()
        write(log, "/a\n{}\x1b[31m", 404)
        log.close()
        assert len(path.read_text().splitlines()) == 1
        assert "\x1b" not in path.read_text()


def test_rotation_bounds_size_and_number_with_two_writers(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    logs = [AccessLog(path, role=f"f{i}", exclude=(), as_json=True, max_bytes=20_000) for i in range(2)]
    for log in logs:
        log.start()

    def many(log: AccessLog) -> None:
        for _ in range(2000):
            write(log, "/x", 200)

    threads = [threading.Thread(target=many, args=(log,)) for log in logs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for log in logs:
        log.close()
    files = [p for p in tmp_path.iterdir() if p.suffix != ".lock"]
    assert 1 < len(files) <= KEEP + 1
    for file in files:
        assert file.stat().st_mode & 0o007 == 0
        log_lines(file)


def test_a_log_that_cannot_be_written_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    log = AccessLog(tmp_path / "file" / "access.log", role="f", exclude=(), as_json=True)
    log.start()
    for _ in range(5):
        write(log, "/x", 200)
    log.close()
    assert len([r for r in caplog.records if "access log" in r.message]) == 1
    assert log.dropped == 5


def test_what_a_slow_client_has_not_taken_is_kept_small_and_whole() -> None:
    def made(i: int) -> TokenLogprob:
        top = tuple((i * 20 + k, -k / 7) for k in range(20))
        return TokenLogprob(i, -0.5 if i else None, top, b"\xff%d" % i, tuple(b"alternative %d" % id for id, _ in top))

    generation = Generation("r", streamed=True)
    state = generation.add(TokenizedGenerateReqInput(rid="r", frontend=0, epoch=1, input_ids=[1], sampling=SamplingParams(max_new_tokens=9000)))
    tracemalloc.start()
    for i in range(2000):
        state.put(TextChunk("r", i, "x", [i], logprobs=[made(i)]))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held / 2000 < 1600, "bytes a token; it is more than 3000 as objects"
    (delta,) = generation.take()
    assert delta.logprobs == [made(i) for i in range(2000)]
    assert (len(delta.text), len(delta.token_ids)) == (2000, 2000)
    state.put(TextChunk("r", 2000, "y", [1], logprobs=[made(7)]))
    assert generation.take()[0].logprobs == [made(7)]
    assert (generation.unread, generation.done) == (0, False)


def test_what_has_waited_comes_in_pieces_of_few_logprobs_that_go_with_their_text() -> None:
    generation = Generation("r", streamed=True)
    state = generation.add(TokenizedGenerateReqInput(rid="r", frontend=0, epoch=1, input_ids=[1], sampling=SamplingParams(max_new_tokens=900)))
    for i in range(150):
        state.put(TextChunk("r", i, chr(65 + i % 26), [i], Finish("length") if i == 149 else None, [TokenLogprob(i, -1.0)]))
    assert generation.finished
    seen: list[int] = []
    finishes = []
    while not generation.done:
        (delta,) = generation.take_pieces()
        assert 0 < len(delta.logprobs) <= LOOSE
        assert [e.token_id for e in delta.logprobs] == delta.token_ids
        assert delta.text == "".join(chr(65 + i % 26) for i in delta.token_ids)
        seen += delta.token_ids
        finishes.append(delta.finish)
    assert seen == list(range(150))
    assert finishes == [None, None, Finish("length")]
    assert generation.unread == 0
