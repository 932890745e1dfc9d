"""llmd as a library: what `Engine` gives, how it fails, and that it leaves the caller's process as it was."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import logging
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from llmd import Engine, ServerArgs
from llmd.engine.frontend import EmbeddedFrontend
from llmd.engine.life import Life
from llmd.errors import ConfigError, EngineDead, RequestError, StartupError, UsageError
from llmd.wire.messages import Command, Publish
from tests.daemon import SLOW, Brake, gone, wait_for
from tests.models import permutation_llama, random_llama

GREEDY = {"temperature": 0, "max_new_tokens": 8}


def echo(prompt: str, length: int) -> str:
    return "".join(itertools.islice(itertools.cycle(prompt), length))


def dummy(failpoints: str = "", **more: Any) -> Engine:
    with pytest.MonkeyPatch.context() as patch:
        if failpoints:
            patch.setenv("LLMD_FAILPOINTS", failpoints)
        return Engine(model_path="dummy", allow_failpoints=True, **more)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[Engine]:
    with dummy(f"scheduler.step=delay(2ms);{Brake(directory, on=False).steps}") as made:
        yield made


@pytest.fixture
def brake(directory: Path) -> Iterator[Brake]:
    """That of `engine`, on: what runs does not end by itself."""
    made = Brake(directory)
    yield made
    made.release()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with Engine(model_path=random_llama(tmp_path_factory.mktemp("llama")), dtype="float32") as made:
        yield made


@pytest.fixture
def short(tmp_path: Path) -> Iterator[Path]:
    """A temporary directory whose path leaves room for sockets."""
    with tempfile.TemporaryDirectory(prefix="e", dir="/tmp") as name:
        yield Path(name)


def tree(engine: Engine) -> list[int]:
    """The child and everything below it."""
    child = psutil.Process(engine.get_server_info()["pid"])
    return [child.pid, *(p.pid for p in child.children(recursive=True))]


# ---------------------------------------------------------------- generating


def test_one_prompt(engine: Engine) -> None:
    result = engine.generate("abcde", {"max_new_tokens": 12, "temperature": 0})
    assert result["text"] == echo("abcde", 12)
    assert result["output_ids"] == list(echo("abcde", 12).encode())
    meta = result["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 12}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (5, 12, 0)
    assert meta["id"] and meta["weight_version"] == "dummy@000000000000" and meta["e2e_latency"] > 0
    assert "output_token_logprobs" not in meta


def test_a_batch_keeps_its_order_and_takes_parameters_for_each(engine: Engine) -> None:
    prompts = [f"prompt {i}" for i in range(20)]
    results = engine.generate(prompts, [{"max_new_tokens": i + 1} for i in range(20)])
    assert [r["text"] for r in results] == [echo(p, i + 1) for i, p in enumerate(prompts)]
    assert len({r["meta_info"]["id"] for r in results}) == 20
    assert [r["text"] for r in engine.generate(input_ids=[[97, 98], [99]], sampling_params=GREEDY)] == [echo("ab", 8), echo("c", 8)]
    assert engine.generate(["one"], GREEDY)[0]["text"] == echo("one", 8)
    assert engine.generate(input_ids=[104, 105], sampling_params=GREEDY)["text"] == echo("hi", 8)


def test_arguments_as_python_programs_have_them(engine: Engine) -> None:
    two = {"max_new_tokens": np.int32(2), "temperature": np.float32(0)}
    assert engine.generate(input_ids=np.array([97, 98]), sampling_params=two)["text"] == "ab"
    assert [r["text"] for r in engine.generate(input_ids=np.array([[97, 98], [99, 100]]), sampling_params=(two, two))] == ["ab", "cd"]
    assert engine.generate(input_ids=[np.int64(97), np.int64(98)], sampling_params=two)["text"] == "ab"
    assert engine.generate("ab", {**two, "logit_bias": {5: 1}, "frequency_penalty": 0.1})["text"] == "ab"
    for call, param in (
        (lambda: engine.generate("a", {1: 2}), "sampling_params.1"),
        (lambda: engine.flush_cache("1"), "timeout_s"),
        (lambda: engine.flush_cache(math.inf), "timeout_s"),
        (lambda: engine.flush_cache(math.nan), "timeout_s"),
        (lambda: engine.flush_cache(-1), "timeout_s"),
        (lambda: engine.update_weights(3), "path"),  # type: ignore[arg-type]
        (lambda: engine.update_weights(Path("relative")), "path"),
    ):
        with pytest.raises(RequestError) as caught:
            call()
        assert caught.value.param == param, caught.value.message
    assert engine.flush_cache(np.float64(1))["pages_freed"] >= 0


def test_several_choices_and_stops(engine: Engine) -> None:
    choices = engine.generate("xy", {"max_new_tokens": 3, "n": 2})
    assert [c["text"] for c in choices] == ["xyx", "xyx"]
    stopped = engine.generate("hello world", {"stop": ["wor"], "temperature": 0})
    assert stopped["text"] == "hello "
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": "wor"}
    by_id = engine.generate("abc.def", {"stop_token_ids": [ord(".")]})
    assert by_id["meta_info"]["finish_reason"] == {"type": "stop", "matched": ord(".")}


def test_more_prompts_than_a_server_would_queue(engine: Engine) -> None:
    results = engine.generate(["ab"] * 1500, {"max_new_tokens": 2})
    assert len(results) == 1500
    assert {r["text"] for r in results} == {"ab"}


def test_a_stream_is_cumulative(engine: Engine, brake: Brake) -> None:
    stream = engine.generate("abcde", {"max_new_tokens": 40}, stream=True)
    pieces = [next(stream)]
    brake.release()
    pieces += stream
    assert len(pieces) > 1
    for before, after in itertools.pairwise(pieces):
        assert after["text"].startswith(before["text"]) and len(after["output_ids"]) > len(before["output_ids"])
        assert before["meta_info"]["finish_reason"] is None
    assert pieces[-1]["text"] == echo("abcde", 40)
    assert pieces[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 40}


def test_a_streamed_batch_says_which_prompt_a_piece_belongs_to(engine: Engine) -> None:
    last: dict[int, str] = {}
    for piece in engine.generate(["ab", "cd"], {"max_new_tokens": 10}, stream=True):
        last[piece["index"]] = piece["text"]
    assert last == {0: echo("ab", 10), 1: echo("cd", 10)}


@pytest.mark.usefixtures("brake")
def test_an_abandoned_stream_is_aborted(engine: Engine) -> None:
    stream = engine.generate("abc", {"max_new_tokens": 4000}, stream=True)
    next(stream)
    stream.close()
    wait_for("nothing runs", lambda: engine.get_server_info()["requests"]["running"] == 0, 5)


def test_logprobs(llama: Engine) -> None:
    params = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    meta = llama.generate("hello", params, return_logprob=True, top_logprobs_num=3, logprob_start_len=0, return_text_in_logprobs=True)["meta_info"]
    assert len(meta["output_token_logprobs"]) == 4 and len(meta["input_token_logprobs"]) == meta["prompt_tokens"]
    assert meta["input_token_logprobs"][0][0] is None and meta["input_top_logprobs"][0] is None
    for (logprob, id, text), top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        assert logprob < 0 and isinstance(text, str)
        assert len(top) == 3 and top[0][:2] == pytest.approx((logprob, id))
        assert [entry[0] for entry in top] == sorted((entry[0] for entry in top), reverse=True)
    plain = llama.generate("hello", params, return_logprob=True)["meta_info"]
    assert plain["input_token_logprobs"] == [] and "output_top_logprobs" not in plain
    assert plain["output_token_logprobs"][0][2] is None
    streamed = list(llama.generate("hello", params, return_logprob=True, stream=True))
    assert streamed[-1]["meta_info"]["output_token_logprobs"] == plain["output_token_logprobs"]


def test_a_batch_gives_what_each_prompt_gives_alone(llama: Engine) -> None:
    prompts = ["hello", "a", "the quick brown fox", "xyz" * 20]
    params = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    assert [r["output_ids"] for r in llama.generate(prompts, params)] == [llama.generate(p, params)["output_ids"] for p in prompts]
    sampled = {"temperature": 1, "sampling_seed": 7, "max_new_tokens": 12, "ignore_eos": True}
    assert llama.generate("hello", sampled)["output_ids"] == llama.generate("hello", sampled)["output_ids"]


def test_random_seed_repeats_what_is_drawn() -> None:
    def draw(**more: Any) -> list[Any]:
        with dummy(**more) as engine:
            life = engine._life
            assert life.frontend is not None
            return [life.frontend.side.manager.fresh_seed() for _ in range(3)]

    assert draw(random_seed=5) == draw(random_seed=5)


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "input_ids": [1]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 3]}, "prompt[1]"),
        ({"input_ids": [99999]}, "input_ids"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "x", "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"prompt": "x", "sampling_params": {"max_tokens": 3}}, "sampling_params.max_tokens"),
        ({"prompt": "x", "sampling_params": {"regex": "a+"}}, "sampling_params.regex"),
        ({"prompt": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
        ({"prompt": ["a", "b"], "sampling_params": [{}, {"top_p": 2}]}, "sampling_params[1].top_p"),
        ({"prompt": "x", "sampling_params": {"max_new_tokens": 9000}}, "sampling_params.max_new_tokens"),
        ({"prompt": "x", "return_logprob": True, "top_logprobs_num": 99}, "top_logprobs_num"),
    ],
)
def test_what_cannot_be_is_refused_by_name(engine: Engine, arguments: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        with pytest.raises(RequestError) as caught:
            list(engine.generate(**arguments, stream=stream))
        assert caught.value.param == param
        assert caught.value.status == 400


# ---------------------------------------------------------------- threads and event loops


async def test_within_a_running_event_loop(engine: Engine) -> None:
    assert engine.generate("abc", GREEDY)["text"] == echo("abc", 8)
    results = await asyncio.gather(*(engine.async_generate(f"number {i}", GREEDY) for i in range(10)))
    assert [r["text"] for r in results] == [echo(f"number {i}", 8) for i in range(10)]
    pieces = [piece async for piece in await engine.async_generate("abcde", {"max_new_tokens": 20}, stream=True)]
    assert pieces[-1]["text"] == echo("abcde", 20)
    with pytest.raises(RequestError):
        await engine.async_generate("x", {"temperature": -1})


@pytest.mark.usefixtures("brake")
async def test_cancelling_aborts(engine: Engine) -> None:
    task = asyncio.create_task(engine.async_generate("abc", {"max_new_tokens": 4000}))
    await asyncio.to_thread(wait_for, "it runs", lambda: engine.get_server_info()["requests"]["running"] == 1, 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(wait_for, "nothing runs", lambda: engine.get_server_info()["requests"]["running"] == 0, 5)


def test_from_several_threads(engine: Engine) -> None:
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda i: engine.generate(f"thread {i}", GREEDY)["text"], range(40)))
    assert texts == [echo(f"thread {i}", 8) for i in range(40)]


def test_an_engine_outlives_the_thread_that_made_it() -> None:
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(dummy).result()
    with made:
        assert made.generate("ab", GREEDY)["text"] == echo("ab", 8)


def test_two_engines_at_once(engine: Engine) -> None:
    with dummy() as other:
        assert other.get_server_info()["pid"] != engine.get_server_info()["pid"]
        assert other.generate("ab", GREEDY)["text"] == engine.generate("ab", GREEDY)["text"]
    assert engine.generate("ab", GREEDY)["text"] == echo("ab", 8)


# ---------------------------------------------------------------- administration


def test_server_info_and_flush(engine: Engine, brake: Brake) -> None:
    info = engine.get_server_info()
    assert (info["state"], info["model"], info["http"]) == ("ready", "dummy", "")
    assert info["server_args"]["model"]["path"] == "dummy"
    assert {p["role"] for p in info["processes"]} == {"supervisor", "control", "detokenizer", "scheduler"}
    assert "pages_freed" in engine.flush_cache()
    stream = engine.generate("abc", {"max_new_tokens": 2000}, stream=True)
    next(stream)
    with pytest.raises(RequestError) as caught:
        engine.flush_cache()
    assert caught.value.code == "busy"
    stream.close()
    brake.release()
    assert "pages_freed" in engine.flush_cache(timeout_s=60)


def test_no_port_is_bound(engine: Engine) -> None:
    for pid in tree(engine):
        assert not [c for c in psutil.Process(pid).net_connections("inet") if c.status == psutil.CONN_LISTEN]


def test_update_weights(tmp_path: Path) -> None:
    letters = tuple(range(ord("a"), ord("f")))
    first, second = permutation_llama(tmp_path / "first", [letters]), permutation_llama(tmp_path / "second", [letters[::-1]])
    with Engine(model_path=first, dtype="float32") as engine:
        assert engine.generate("b", GREEDY)["text"] == "cdeabcde"
        waiting = ThreadPoolExecutor(1)
        answer = engine.update_weights(str(second), version="reversed")
        assert answer == {"weights_version": "reversed", "epoch": 2}
        result = waiting.submit(engine.generate, "b", GREEDY).result(30)
        assert result["text"] == "aedcbaed" and result["meta_info"]["weight_version"] == "reversed"
        with pytest.raises(RequestError):
            engine.update_weights(str(tmp_path / "nothing"))
        assert engine.generate("b", GREEDY)["text"] == "aedcbaed"
        waiting.shutdown()


def test_requests_wait_for_new_weights(tmp_path: Path) -> None:
    letters = tuple(range(ord("a"), ord("f")))
    model = permutation_llama(tmp_path / "model", [letters])
    with Engine(model_path=model, dtype="float32") as engine, ThreadPoolExecutor(2) as pool:
        reload = pool.submit(engine.update_weights, str(model))
        while not reload.done():
            assert engine.generate("b", GREEDY)["text"] == "cdeabcde"
        assert reload.result()["epoch"] == 2


# ---------------------------------------------------------------- failing


def test_a_dead_scheduler_or_detokenizer_costs_nobody_a_token(engine: Engine, brake: Brake) -> None:
    before = tree(engine)
    for role in ("scheduler", "detokenizer"):
        brake.put_on()
        pid = next(p["pid"] for p in engine.get_server_info()["processes"] if p["role"] == role)
        stream = engine.generate("abc", {"max_new_tokens": 2000}, stream=True)
        next(stream)
        with ThreadPoolExecutor(1) as pool:
            batch = pool.submit(engine.generate, ["ab", "cd"], {"max_new_tokens": 1000, "n": 2})
            os.kill(pid, signal.SIGKILL)
            brake.release()
            assert list(stream)[-1]["text"] == echo("abc", 2000)
            assert [result["text"] for result in batch.result(60 * SLOW)] == [echo("ab", 1000)] * 2 + [echo("cd", 1000)] * 2
    assert engine.generate("abc", GREEDY)["text"] == echo("abc", 8), "a new request waits for the engine"
    assert before[0] == engine.get_server_info()["pid"]


def test_the_childs_death_is_an_error_and_never_a_hang(tmp_path: Path) -> None:
    engine = dummy(Brake(tmp_path).steps)
    pids = tree(engine)
    stream = engine.generate("abc", {"max_new_tokens": 8000}, stream=True)
    next(stream)
    with ThreadPoolExecutor(1) as pool:
        batch = pool.submit(engine.generate, ["x"] * 50, {"max_new_tokens": 8000})
        os.kill(pids[0], signal.SIGKILL)
        for call in (lambda: list(stream), lambda: batch.result(60 * SLOW), lambda: engine.generate("a"), engine.flush_cache):
            with pytest.raises(EngineDead, match=rf"llmd \(pid {pids[0]}\).*signal 9"):
                call()
    wait_for("its processes die with it", lambda: gone(pids), 10)
    engine.shutdown()
    with pytest.raises(EngineDead):
        engine.generate("a")


def test_a_request_that_is_begun_as_the_child_dies_is_an_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = dummy()
    pids = tree(engine)
    monkeypatch.setattr(engine._life, "check", lambda: None)  # the call was let in a moment before
    os.kill(pids[0], signal.SIGKILL)
    wait_for("its processes die with it", lambda: gone(pids), 10)
    for call in (lambda: engine.generate("a"), lambda: list(engine.generate("a", stream=True))):
        with pytest.raises(EngineDead, match=rf"llmd \(pid {pids[0]}\).*signal 9"):
            call()
    engine.shutdown()


def test_shutdown_ends_what_runs_and_is_idempotent(tmp_path: Path) -> None:
    engine = dummy(Brake(tmp_path).steps)
    pids = tree(engine)
    stream = engine.generate("abc", {"max_new_tokens": 8000}, stream=True)
    next(stream)
    began = time.monotonic()
    engine.shutdown()
    engine.shutdown()
    assert time.monotonic() - began < 20 * SLOW
    assert gone(pids)
    with pytest.raises(RequestError) as caught:
        list(stream)
    assert caught.value.code == "shutting_down"
    with pytest.raises(EngineDead, match="shut down"):
        engine.generate("a")


def test_a_word_of_control_that_comes_after_the_end_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    take, pictures = EmbeddedFrontend._take, list[Publish]()

    def remember(frontend: EmbeddedFrontend, message: Command | Publish) -> None:
        pictures.extend([message] if isinstance(message, Publish) else [])
        take(frontend, message)

    monkeypatch.setattr(EmbeddedFrontend, "_take", remember)
    with dummy() as engine:
        frontend = engine._life.frontend
    assert frontend is not None
    ready = next(picture for picture in pictures if picture.engine_up)
    take(frontend, msgspec.structs.replace(ready, epoch=ready.epoch + 1))


@pytest.mark.parametrize(
    ("kwargs", "failpoints", "stage", "status"),
    [
        ({"model_path": "dummy"}, "", "configuration", 78),
        ({"model_path": "/nowhere/at/all"}, "", "model files", 78),
        ({"model_path": "dummy", "tp_size": 2}, "", "configuration", 78),
        ({"model_path": "dummy", "allow_failpoints": True}, "supervisor.bind=raise", "port", 70),
        ({"model_path": "dummy", "allow_failpoints": True}, "supervisor.plan=kill", "plan", -9),
        ({"model_path": "dummy", "allow_failpoints": True}, "scheduler.start=exit(71)", "scheduler-0: start", 71),
        ({"model_path": "dummy", "allow_failpoints": True}, "control.start=exit(3)", "control-0: start", 70),
        ({"model_path": "dummy", "allow_failpoints": True}, "detokenizer.start=raise", "detokenizer-0: start", 70),
        ({"model_path": "dummy", "allow_failpoints": True}, "supervisor.plan=exit(3)", "plan", 70),
        ({"model_path": "dummy", "allow_failpoints": True}, "no such thing", "configuration", 2),
    ],
)
def test_a_failed_start_says_where_and_leaves_everything_as_it_was(
    kwargs: dict[str, Any], failpoints: str, stage: str, status: int, monkeypatch: pytest.MonkeyPatch, short: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    if failpoints:
        monkeypatch.setenv("LLMD_FAILPOINTS", failpoints)
    before = world(short)
    with pytest.raises(StartupError) as caught:
        Engine(**kwargs)
    assert caught.value.exit_code == status
    assert caught.value.stage == stage
    assert str(status) in str(caught.value) and caught.value.stage in str(caught.value)
    assert str(short) not in str(caught.value), "what is gone is no place to look"
    assert_back(before, short)


def test_a_start_that_has_failed_before_the_caller_looks_says_the_same(monkeypatch: pytest.MonkeyPatch, short: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    hear = Life._on_stage

    def hear_late(life: Life, stage: str) -> None:
        if stage == "boot":
            wait_for("the child has cleared up", lambda: not life.ports.boot.exists(), 30)
        hear(life, stage)

    monkeypatch.setattr(Life, "_on_stage", hear_late)
    with pytest.raises(StartupError) as caught:
        dummy("control.start=exit(3)")
    assert (caught.value.exit_code, caught.value.stage) == (70, "control-0: start")
    assert "control-0" in caught.value.message and str(short) not in str(caught.value)


def test_a_whole_life_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch, short: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    before = world(short)
    with dummy() as engine:
        engine.generate(["abc"] * 10, GREEDY)
        during = world(short)
        assert during["files"] and during["children"] > before["children"]
        assert {name: during[name] for name in ("environment", "logging", "signals", "directory", "umask")} == {
            name: before[name] for name in ("environment", "logging", "signals", "directory", "umask")
        }
    assert_back(before, short)


def test_bad_arguments_are_the_callers_mistake() -> None:
    with pytest.raises(UsageError, match="not supported"):
        Engine(speculative_algorithm="EAGLE")
    with pytest.raises(UsageError, match="unknown"):
        Engine(modle_path="x")
    with pytest.raises(TypeError):
        Engine(server_args=ServerArgs(), model_path="x")
    with pytest.raises(ConfigError):
        ServerArgs.from_kwargs(port="abc")


def assert_back(before: dict[str, Any], directory: Path) -> None:
    """The kernel's own thread of a joined Python thread may end a moment later, that of an earlier test too."""
    wait_for("the last thread is gone", lambda: len(os.listdir("/proc/self/task")) <= before["tasks"], 10)
    assert world(directory) | {"tasks": before["tasks"]} == before


def world(directory: Path) -> dict[str, Any]:
    """What a library must leave alone."""
    root = logging.getLogger()
    mask = os.umask(0)
    os.umask(mask)
    return {
        "environment": dict(os.environ),
        "logging": (root.level, list(root.handlers), logging.getLogger("llmd").level, list(logging.getLogger("llmd").handlers), logging.raiseExceptions),
        "signals": {n: signal.getsignal(n) for n in signal.valid_signals()},
        "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "directory": os.getcwd(),
        "umask": mask,
        "threads": {t.ident for t in threading.enumerate()},
        "tasks": len(os.listdir("/proc/self/task")),
        "descriptors": {fd: _target(fd) for fd in os.listdir("/proc/self/fd") if _target(fd)},
        "files": sorted(p.name for p in directory.iterdir()),
        "children": {p.pid for p in psutil.Process().children(recursive=True)},
    }


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


# ---------------------------------------------------------------- the caller's end

CALLER = """
import os, sys, time
from llmd import Engine
def threads():
    return len(os.listdir('/proc/self/task'))
def alone():
    until = time.monotonic() + 20
    while threads() > 1 and time.monotonic() < until:
        time.sleep(0.02)
engine = Engine(model_path="dummy", allow_failpoints=True)
info = engine.get_server_info()
print(info["pid"], *(p["pid"] for p in info["processes"]), flush=True)
{then}
"""


def caller(then: str, **env: str) -> tuple[subprocess.Popen[str], list[int]]:
    process = subprocess.Popen(
        [sys.executable, "-c", CALLER.format(then=then)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | env
    )
    assert process.stdout is not None
    pids = [int(word) for word in first_line(process.stdout.fileno()).split()]
    assert pids, process.communicate()[1]
    return process, pids


def first_line(fd: int) -> str:
    """One line of a pipe and not a byte more: what a file's buffer takes with it, `communicate` does not find."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(fd, 1)):
        line += byte
    return line.decode()


def leftovers(directory: Path) -> list[str]:
    return [p.name for p in directory.glob("llmd-engine-*")]


def test_a_shutdown_that_was_interrupted_is_finished_by_the_next(short: Path) -> None:
    then = """
import signal, threading
os.kill(info["pid"], signal.SIGSTOP)  # so that it takes as long as it may
try:
    threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
    engine.shutdown()
except KeyboardInterrupt:
    print("interrupted")
engine.shutdown()
print(os.path.exists(f"/proc/{info['pid']}"))
"""
    process, pids = caller(then, TMPDIR=str(short))
    out, err = process.communicate(timeout=30 * SLOW)
    assert (out, err) == ("interrupted\nFalse\n", "")
    wait_for("no process is left", lambda: gone(pids), 5)
    assert not leftovers(short)


def test_an_engine_that_is_made_as_the_interpreter_ends_is_refused() -> None:
    code = """
import atexit
from llmd import Engine
@atexit.register
def late():
    try:
        Engine(model_path="dummy", allow_failpoints=True)
    except Exception as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30 * SLOW, check=False)
    assert "the interpreter is shutting down" in done.stdout and done.stderr == ""


def test_nothing_survives_a_killed_caller(short: Path, tmp_path: Path) -> None:
    process, pids = caller("engine.generate('x', {'max_new_tokens': 8000}); time.sleep(600)", TMPDIR=str(short), LLMD_FAILPOINTS=Brake(tmp_path).steps)
    assert leftovers(short)
    process.kill()
    process.communicate()
    wait_for("no process is left", lambda: gone(pids), 5)
    wait_for("no file is left", lambda: not leftovers(short), 2)


@pytest.mark.parametrize("then", ["sys.exit(3)", "raise SystemExit(3)", "del engine; import gc; gc.collect(); alone(); print(threads()); os._exit(3)"])
def test_nothing_survives_a_caller_that_forgets_to_shut_down(then: str, short: Path) -> None:
    process, pids = caller(then, TMPDIR=str(short))
    out, err = process.communicate(timeout=20 * SLOW)
    assert process.returncode == 3
    assert err == ""
    assert out in ("", "1\n")
    assert gone(pids) and not leftovers(short)


@pytest.mark.parametrize("delay", [0.05, 0.15, 0.3, 0.5, 0.8])
def test_nothing_survives_a_caller_killed_while_it_starts(delay: float, short: Path) -> None:
    code = "from llmd import Engine\nprint('go', flush=True)\nEngine(model_path='dummy', allow_failpoints=True)"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ | {"TMPDIR": str(short)}
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "go\n"
    time.sleep(delay)  # not a wait for anything: the moment is what varies
    pids = [p.pid for p in psutil.Process(process.pid).children(recursive=True)]
    process.kill()
    process.communicate()

    def all_gone() -> bool:
        return gone(pids) and not any(str(short) in " ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"]))

    wait_for("no process is left", all_gone, 5)
    assert not leftovers(short) or not pids, "one that was killed before it had a child is swept by the next Engine"


def test_leftovers_of_a_killed_engine_are_swept(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    stale, fresh, foreign = (short / f"llmd-engine-{os.getuid()}-{name}" for name in ("stale", "fresh", "foreign"))
    for path in (stale, fresh, foreign):
        path.mkdir()
        (path / "llmd.lock").touch()
    hour_ago = time.time() - 3600
    os.utime(stale, (hour_ago, hour_ago))
    os.utime(foreign, (hour_ago, hour_ago))
    with (foreign / "llmd.lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(StartupError):
            Engine(model_path="/nowhere/at/all")
    assert (stale.exists(), fresh.exists(), foreign.exists()) == (False, True, True)


def test_nothing_survives_an_interrupted_start(short: Path) -> None:
    code = "from llmd import Engine\nprint('go', flush=True)\nEngine(model_path='dummy', allow_failpoints=True)"
    env = os.environ | {"TMPDIR": str(short), "LLMD_FAILPOINTS": "scheduler.start=hang"}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    assert process.stdout.readline() == "go\n"
    workers: list[int] = wait_for(
        "workers", lambda: pids if len(pids := [p.pid for p in psutil.Process(process.pid).children(recursive=True)]) >= 4 else [], 20
    )
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=15 * SLOW)
    assert "KeyboardInterrupt" in err and process.returncode != 0
    assert gone(workers) and not leftovers(short)


def test_a_fork_of_the_caller_neither_uses_nor_ends_the_engine() -> None:
    then = """
pid = os.fork()
if pid == 0:
    try:
        engine.generate("x")
    except Exception as error:
        print(type(error).__name__, flush=True)
    for call in (engine.flush_cache, engine.get_server_info, lambda: engine.update_weights("x"), lambda: list(engine.generate("x", stream=True))):
        try:
            call()
        except Exception as error:
            print(type(error).__name__, flush=True)
    engine.shutdown()
    os._exit(0)
os.waitpid(pid, 0)
print(engine.generate("ab", {"max_new_tokens": 4})["text"])
engine.shutdown()
"""
    process, pids = caller(then)
    out, err = process.communicate(timeout=20 * SLOW)
    assert (out.split(), err) == (["EngineDead"] * 5 + ["abab"], "")
    assert gone(pids)


def test_a_caller_with_odd_signals_and_a_shadowing_directory(short: Path) -> None:
    (short / "types.py").write_text("raise RuntimeError('not the real one')")
    code = """
import signal, sys, os
sys.path.pop(0)
from llmd import Engine
os.chdir(sys.argv[1])
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
signal.signal(signal.SIGINT, signal.SIG_IGN)
with Engine(model_path="dummy", allow_failpoints=True) as engine:
    print(engine.generate("ab", {"max_new_tokens": 4})["text"])
"""
    done = subprocess.run([sys.executable, "-c", code, str(short)], capture_output=True, text=True, timeout=30 * SLOW)
    assert done.stdout == "abab\n", done.stderr


def test_importing_llmd_is_light() -> None:
    code = "import sys, llmd; assert not {'zmq', 'msgspec', 'asyncio', 'torch'} & set(sys.modules); from llmd import Engine; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30 * SLOW)
