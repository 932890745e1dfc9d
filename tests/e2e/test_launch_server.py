"""`python -m llmd.launch_server` and `launch_server(args)`: a whole daemon from a command line written for SGLang."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from llmd.engine.foreground import launch_server
from tests.daemon import SLOW, gone, wait_for

ARGUMENTS = ["--served-model-name", "mine", "--host", "127.0.0.1", "--port", "0", "--tp", "1", "--max-running-requests=4", "--disable-radix-cache"]


@contextlib.contextmanager
def started(argv: list[str], directory: Path, env: dict[str, str] | None = None, cwd: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
    with (directory / "log").open("wb") as log, (directory / "out").open("wb") as out:
        process = subprocess.Popen([sys.executable, *argv], stdout=out, stderr=log, env=os.environ | (env or {}), cwd=cwd)
    try:
        yield process
    finally:
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.kill()
        process.wait(10 * SLOW)
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def url_of(process: subprocess.Popen[bytes], directory: Path) -> str:
    """Where it serves, once it is ready."""

    def url() -> str:
        assert process.poll() is None, (directory / "log").read_text()
        with contextlib.suppress(OSError, ValueError, KeyError, httpx.HTTPError):
            found = json.loads((directory / "run" / "llmd.lock").read_text())["http"]
            if found and httpx.get(found + "/readyz", timeout=2).status_code == 200:
                return str(found)
        return ""

    return wait_for("ready", url, 60)


def own(directory: Path) -> list[str]:
    return ["--set", f"run_dir={directory}/run", "--set", f"state_dir={directory}/state", "--set", f"log_dir={directory}/log.d"]


def complete(url: str) -> str:
    answer = httpx.post(url + "/v1/completions", json={"model": "mine", "prompt": "abc", "max_tokens": 5, "temperature": 0}, timeout=30 * SLOW)
    return str(answer.json()["choices"][0]["text"])


def test_a_command_line_for_sglang_starts_llmd(tmp_path: Path) -> None:
    argv = ["-m", "llmd.launch_server", "--model-path", "dummy", *ARGUMENTS, "--allow-failpoints", *own(tmp_path)]
    with started(argv, tmp_path) as process:
        url = url_of(process, tmp_path)
        assert complete(url) == "abcab"
        assert [m["id"] for m in httpx.get(url + "/v1/models").json()["data"]] == ["mine"]
        pids = [p.pid for p in psutil.Process(process.pid).children(recursive=True)]
        process.send_signal(signal.SIGTERM)
        assert process.wait(20 * SLOW) == 0
        assert gone(pids)


def test_keys_on_the_command_line_guard_the_server_and_leave_no_trace(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    argv = ["-m", "llmd.launch_server", "--model-path", "dummy", "--port", "0", "--api-key", "sk-one", "--admin-api-key=sk-two"]
    with started([*argv, "--allow-failpoints", *own(tmp_path)], tmp_path, env={"TMPDIR": f"{tmp_path}/tmp"}) as process:
        url = url_of(process, tmp_path)
        status = {key: httpx.get(url + "/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code for key in ("sk-one", "sk-two", "sk-no")}
        assert status["sk-one"] == 200 and status["sk-no"] == 401
        assert httpx.post(url + "/flush_cache", headers={"Authorization": "Bearer sk-two"}).status_code == 200
        assert httpx.post(url + "/flush_cache", headers={"Authorization": "Bearer sk-one"}).status_code == 403
        for pid in [process.pid, *(p.pid for p in psutil.Process(process.pid).children(recursive=True))]:
            assert b"sk-" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20 * SLOW) == 0
    assert list((tmp_path / "tmp").iterdir()) == [] and "sk-" not in (tmp_path / "log").read_text()


#: Names that llmd or its libraries import.
HOSTILE = ["numpy", "queue", "msgspec", "zmq", "types", "socket", "json", "logging", "click", "llmd", "supervisor", "uvicorn", "tokenizers"]


def hostile(directory: Path) -> Path:
    """A directory of modules that betray whoever imports them."""
    directory.mkdir()
    for name in HOSTILE:
        (directory / f"{name}.py").write_text(f"open({str(directory)!r} + '/RUN-{name}', 'w').close()\nraise SystemExit(66)\n")
    return directory


def test_nothing_is_imported_from_the_working_directory(tmp_path: Path) -> None:
    here = hostile(tmp_path / "hostile")
    program = str(Path(sys.executable).with_name("llmd"))
    config = tmp_path / "llmd.yaml"
    config.write_text(f"model: {{path: dummy}}\nhttp: {{port: 0}}\nrun_dir: {tmp_path}/run\nstate_dir: {tmp_path}/state\nlog_dir: {tmp_path}/log.d\n")
    with started([program, "run", "-c", str(config), "--allow-failpoints"], tmp_path, cwd=here) as process:
        url = url_of(process, tmp_path)
        answer = httpx.post(url + "/v1/completions", json={"model": "dummy", "prompt": "abc", "max_tokens": 5, "temperature": 0}, timeout=30 * SLOW)
        assert answer.json()["choices"][0]["text"] == "abcab"
        subprocess.run(
            [str(Path(sys.executable).with_name("llmctl")), "--socket", f"{tmp_path}/run/admin.sock", "config", "explain", "http"], cwd=here, check=True
        )
        process.send_signal(signal.SIGTERM)
        assert process.wait(20 * SLOW) == 0
    assert list(here.glob("RUN-*")) == [] and not (here / "__pycache__").exists()


FROM_PYTHON = """
import logging, os, signal, sys, time
from llmd import ServerArgs, launch_server

def state():
    root = logging.getLogger()
    umask = os.umask(0); os.umask(umask)
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    fds = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}
    return dict(os.environ), root.handlers, root.level, umask, handlers, fds, signal.set_wakeup_fd(-1)

logging.basicConfig(level=logging.ERROR)
os.umask(0o077)
before = state()
bad = ServerArgs.from_kwargs(model_path="/nowhere/at/all", port=0, config=sys.argv[1])
assert launch_server(bad) == 78
assert state() == before, (before, state())
args = ServerArgs.from_kwargs(model_path="dummy", served_model_name="mine", port=0, config=sys.argv[1])
for _ in range(2):
    assert launch_server(args, allow_failpoints=True) == 0
    assert state() == before, (before, state())
    print("over", flush=True)
"""


def test_launch_server_from_python_can_be_called_again_and_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    config = tmp_path / "llmd.yaml"
    config.write_text(f"run_dir: {tmp_path}/run\nstate_dir: {tmp_path}/state\nlog_dir: {tmp_path}/log.d\n")
    with started(["-c", FROM_PYTHON, str(config)], tmp_path) as process:
        for life in range(2):
            wait_for("the other life is over", lambda life=life: (tmp_path / "out").read_text().count("over") == life, 20)
            assert complete(url_of(process, tmp_path)) == "abcab"
            process.send_signal(signal.SIGTERM)
        assert process.wait(20 * SLOW) == 0, (tmp_path / "log").read_text()


def test_launch_server_says_what_it_takes() -> None:
    for wrong in (None, {}, "model"):
        with pytest.raises(TypeError, match="ServerArgs"):
            launch_server(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("argv", "status", "line"),
    [
        (["--model-path", "/nowhere/at/all"], 78, "/nowhere/at/all"),
        (["--model-path", "dummy"], 78, "--allow-failpoints"),
        (["--dp", "2"], 78, "data parallelism"),
        (["--page-size", "0"], 78, "--page-size"),
        (["--enable-lora"], 2, "--enable-lora: not supported"),
        (["--nothing"], 2, "--nothing: unknown flag"),
    ],
)
def test_what_cannot_be_ends_with_its_status(argv: list[str], status: int, line: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "llmd.launch_server", "--port", "0", *own(tmp_path), *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30 * SLOW)
    assert done.returncode == status
    assert line in done.stderr and "Traceback" not in done.stderr


def test_launch_server_needs_the_main_thread() -> None:
    code = """
import threading
from llmd import ServerArgs, launch_server
def run():
    try:
        launch_server(ServerArgs())
    except Exception as error:
        print(type(error).__name__, error)
thread = threading.Thread(target=run); thread.start(); thread.join()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30 * SLOW)
    assert done.stdout.startswith("UsageError launch_server runs in the main thread only")
