"""The start as it is told: to systemd, on a terminal, in lines; and stops and deadlines in the middle of it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from llmd.config import ServerArgs
from llmd.config.server_args import MemoryArgs, ModelArgs
from llmd.errors import ConfigError
from llmd.plan.spec import ModelFiles
from llmd.supervisor import memory_plan, planview, preflight
from llmd.supervisor.facts import Report
from llmd.supervisor.interrupts import Interrupted, Overdue, deadline, held, interruptible
from llmd.supervisor.logsink import LogSink
from llmd.supervisor.notify import Notifier
from llmd.supervisor.os_seam import Os
from llmd.supervisor.starting import Starting, Steps, bar
from tests.daemon import SLOW


def test_a_start_that_gets_on_extends_systemds_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "n"))
        receiver.setblocking(False)
        notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "n")})
        stages: list[str] = []
        start = Starting(notifier, LogSink(Os(), None, os.open(os.devnull, os.O_WRONLY)), 600.0, stages.append)
        start.at("pull")
        with caplog.at_level("INFO"):
            start.output("10 % of 94 MiB")
        assert stages == ["pull"] and "10 % of 94 MiB" in caplog.text
        words = [receiver.recv(200).decode() for _ in range(3)]
        assert words == ["STATUS=starting: pull", "EXTEND_TIMEOUT_USEC=600000000", "STATUS=starting: 10 % of 94 MiB"], "at most one extension a second"
        notifier.ready()
        notifier.extend(600.0)
        notifier.reloading(True)
        notifier.reloading(True)
        notifier.reloading(False)
        notifier.stopping()
        notifier.reloading(True)
        words = [receiver.recv(200).decode() for _ in range(4)]
        assert [word.partition("\n")[0] for word in words] == ["READY=1", "RELOADING=1", "READY=1", "STOPPING=1"]
        with pytest.raises(BlockingIOError):
            receiver.recv(200)


def test_the_bar_stays_below_the_lines() -> None:
    reader, writer = os.pipe()
    sink = LogSink(Os(), None, writer, terminal=True)
    Steps(sink).take(Report(state="loading", stage="weights", status="loading: weights 50%", progress=0.5))
    sink.feed("a", b"a line\n")
    sink.show("")
    text = os.read(reader, 4096).decode()
    os.close(reader)
    os.close(writer)
    drawn = "[##############--------------]  50% loading: weights"
    assert text == f"\r\x1b[K{drawn}\r\x1b[Ka line\n{drawn}\r\x1b[K"
    assert bar("x" * 300, 0.5, 80) == bar("x" * 300, 0.5, 80)[:80] and bar("", 0) == ""


def test_without_a_terminal_each_stage_and_each_quarter_is_a_line(caplog: pytest.LogCaptureFixture) -> None:
    steps = Steps(LogSink(Os(), None))
    with caplog.at_level("INFO"):
        for done in range(101):
            steps.take(Report(state="loading", stage=f"scheduler-0: weights, {done} of 100 MiB", status=f"loading {done}", progress=done / 100))
    assert [r.getMessage() for r in caplog.records] == [f"loading {done}" for done in (0, 25, 50, 75, 100)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_is_raised_and_raised_again_if_it_gets_lost(number: signal.Signals) -> None:
    before = signal.getsignal(number)

    def lose_it_once() -> None:
        with interruptible():
            with contextlib.suppress(Interrupted):  # as Python does with what is raised in a finalizer
                os.kill(os.getpid(), number)
                time.sleep(5)
            time.sleep(5)

    with pytest.raises(Interrupted, match=number.name):
        lose_it_once()
    assert signal.getsignal(number) is before and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_waits_until_a_child_is_forked_which_it_ends(number: signal.Signals) -> None:
    children: list[int] = []

    def start() -> None:
        with interruptible(), held() as let_go:
            pid = os.fork()
            if pid == 0:
                try:
                    os.kill(os.getpid(), number)  # waits
                    let_go()
                finally:
                    os._exit(1)
            signal.raise_signal(number)  # to this thread; one that a test runner has beside it would take what is sent to the process
            children.append(pid)

    with pytest.raises(Interrupted):
        start()
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == -number


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_in_the_moment_of_a_childs_start_ends_the_child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: signal.Signals) -> None:
    children: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def start(*args: Any, **more: Any) -> subprocess.Popen[bytes]:
        children.append(real(*args, **more))
        signal.raise_signal(number)  # waits until the caller has what this returns
        return children[0]

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(Interrupted), interruptible():
        preflight.check(ServerArgs(), tmp_path, dict(os.environ), Os(), [])
    assert children[0].returncode == -signal.SIGKILL


#: In a process of its own, which has one thread as llmd has: where there are others, the kernel gives them the signals that the main thread holds up.
DIES_SLOWLY = """
import os, signal, subprocess, sys, time
from pathlib import Path
from llmd.config import ServerArgs
from llmd.supervisor import preflight
from llmd.supervisor.interrupts import AGAIN_S, Interrupted, interruptible
from llmd.supervisor.os_seam import Os

class Slow(subprocess.Popen):  # the kernel has killed it a while before it can be reaped
    def communicate(self, *_, **__):
        signal.raise_signal(signal.SIGTERM)

    def wait(self, timeout=None):
        time.sleep(2.5 * AGAIN_S)
        status = super().wait(timeout)
        print(status, flush=True)
        return status

subprocess.Popen = Slow
try:
    with interruptible():
        preflight.check(ServerArgs(), Path(sys.argv[1]), dict(os.environ), Os(), [])
except Interrupted as stop:
    print(stop)
"""


def test_a_child_that_dies_slowly_is_waited_for_although_the_stop_is_raised_again(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", DIES_SLOWLY, str(tmp_path)], capture_output=True, text=True, timeout=60 * SLOW, check=False)
    assert (done.stdout.split(), done.stderr) == ([str(-signal.SIGKILL), "SIGTERM"], "")


def test_a_deadline_ends_whatever_waits() -> None:
    with pytest.raises(Overdue), deadline(0.1):
        time.sleep(3600)
    with deadline(0.1):
        pass
    time.sleep(0.15)


FACTS = {
    "path": "", "name": "m", "small_dir": "", "weights_version": "v", "weights_bytes": 1, "context_length": 8192, "vocab_size": 10, "tokenizer_size": 10,
    "eos_token_ids": (), "bos_token_id": None, "add_bos": False, "has_chat_template": False, "architecture": "llama", "quantization": "Q4_1",
}  # fmt: skip


def plan(
    memory: MemoryArgs = MemoryArgs(),  # noqa: B008
    *,
    parameters: int = 1000,
    kv_values: int = 100,
    dtype: str = "auto",
    kv: str = "bfloat16",
    **native: int,
) -> memory_plan.MemoryPlan | None:
    files = ModelFiles(kind="gguf", parameters=parameters, kv_values_per_token=kv_values, **FACTS, **native)  # type: ignore[arg-type]
    model = ModelArgs(device="cpu", context_length=8192, kv_cache_dtype=kv, dtype=dtype)  # type: ignore[arg-type]
    return memory_plan.plan_memory(ServerArgs(model=model, memory=memory), files)


def test_the_kv_pool_is_planned_from_the_header() -> None:
    found = plan()
    assert found is not None and found.kv is not None
    assert (found.kv_bytes_per_token, found.weights, found.kv.context_length) == (200, 4000, 8192)
    assert plan(kv_values=0) is None


@pytest.mark.parametrize(("kv", "each"), [("float32", 4 * 128), ("bfloat16", 2 * 128), ("int8", 128 + 4 * 4)])
def test_the_native_kernels_sizes_are_planned_where_they_serve(kv: str, each: int) -> None:
    found = plan(kv=kv, native_bytes=700, kv_vectors_per_token=4)  # heads of 25 numbers, padded to 32
    assert found is not None
    assert (found.kv_bytes_per_token, found.weights) == (each, 700)


def test_weights_that_do_not_fit_are_said_at_once() -> None:
    with pytest.raises(ConfigError, match=r"the weights of m take \d+ MiB in memory, \d+ MiB are free"):
        plan(parameters=2**50)


def test_a_pool_that_is_too_small_names_settings() -> None:
    with pytest.raises(ConfigError, match=r"needs 8192 .*model\.context_length: 992, or memory\.max_total_tokens: 8192"):
        plan(MemoryArgs(max_total_tokens=1000))


@pytest.mark.parametrize("taken", [True, False, "auto"])
def test_a_pool_that_is_taken_at_the_start_is_said_to_be(taken: Any) -> None:
    args = ServerArgs(memory=MemoryArgs(preallocate=taken))
    made = plan(args.memory)
    assert made is not None
    lines = memory_plan.describe(args, made)
    after = lines[[line.startswith("KV pool") for line in lines].index(True) + 1]
    assert (after.strip() == "all of it is taken before llmd is ready (memory.preallocate: true)") is (taken is True)


@pytest.mark.parametrize(
    ("kept", "kernels", "dtype", "on_cpu", "shown"),
    [
        ("Q4_1", "amx", "auto", True, "weights kept as Q4_1, computed in bfloat16"),
        ("Q4_1", "avx512", "auto", True, "weights kept as Q4_1, computed in float32 from 8-bit activations"),
        ("bfloat16", "amx", "auto", True, "weights kept as bfloat16, computed in bfloat16"),
        ("bfloat16", "avx2", "auto", True, "weights kept as bfloat16, computed in float32"),
        ("float16", "amx", "auto", True, "weights kept as float16, computed in float32"),
        ("", "", "auto", True, "weights and activations float32"),
        ("", "", "bfloat16", True, "weights and activations bfloat16"),
        ("Q4_1", "amx", "auto", False, "weights and activations bfloat16 on the GPU"),
    ],
)
def test_what_weights_are_kept_as_and_computed_in(kept: str, kernels: str, dtype: Any, on_cpu: bool, shown: str) -> None:
    files = ModelFiles(kind="gguf", kernels=kernels, native_format=kept, **FACTS)  # type: ignore[arg-type]
    assert planview.numbers(ServerArgs(model=ModelArgs(dtype=dtype)), files, on_cpu) == shown
