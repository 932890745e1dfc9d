"""The command line's exit statuses, before anything is started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmd.memory.host import may_have_gpu
from tests.integration.supervisor.harness import SLOW, until
from tests.models import random_llama


def argv(directory: Path, *words: str) -> list[str]:
    dirs = {name: directory / name for name in ("run_dir", "state_dir", "cache_dir", "log_dir")}
    sets = [word for name, path in dirs.items() for word in ("--set", f"{name}={path}")]
    sets += ["--set", "http.port=0"] if words[0] == "check" else []  # whoever has 8000 on this machine
    return [sys.executable, "-m", "llmd.cli", words[0], *sets, *words[1:]]


def environment(**more: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("LLMD_")} | more


def llmd(directory: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv(directory, *words), env=environment(**env), capture_output=True, text=True, timeout=30 * SLOW, check=False)


DUMMY = ("--allow-failpoints", "--model", "dummy", "--port", "0")


@pytest.mark.parametrize("words", [("--no-such-flag",), ("surplus",), ("--set", "http"), ("-c", ""), ("-c", "a", "-c", "b")])
def test_a_bad_command_line_is_2(tmp_path: Path, words: tuple[str, ...]) -> None:
    assert llmd(tmp_path, "run", *words).returncode == 2


def test_failpoints_need_their_flag(tmp_path: Path) -> None:
    done = llmd(tmp_path, "run", "--model", "dummy", LLMD_FAILPOINTS="scheduler.step=kill")
    assert done.returncode == 2
    assert "--allow-failpoints" in done.stderr


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("--set", "http.prot=1"), "http.prot"),
        (("--set", "parallel.tp=2"), "parallel.tp"),
        (("--model", "dummy"), "--allow-failpoints"),
        (("--host", "0.0.0.0"), "0.0.0.0"),
        (("--model", "/nonexistent/model.gguf"), "/nonexistent/model.gguf"),
    ],
)
@pytest.mark.parametrize("verb", ["run", "check"])
def test_what_can_never_work_is_78_and_named(tmp_path: Path, verb: str, words: tuple[str, ...], names: str) -> None:
    long = {"--model": "model.path=", "--host": "http.host="}
    if verb == "check" and words[0] in long:
        words = ("--set", long[words[0]] + words[1])
    done = llmd(tmp_path, verb, *words, *(("--port", "0") if verb == "run" else ()))
    assert done.returncode == 78
    assert names in done.stderr
    assert "Traceback" not in done.stderr


def test_a_busy_port_is_71_at_once_and_before_any_model_file_is_opened(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    os.mkfifo(model)  # opening it would hang
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        began = time.monotonic()
        done = llmd(tmp_path, "run", "--model", str(model), "--port", str(port))
    assert done.returncode == 71
    assert f"127.0.0.1:{port}" in done.stderr
    assert time.monotonic() - began < 5 * SLOW


def test_a_run_directory_too_long_for_sockets_is_71(tmp_path: Path) -> None:
    done = llmd(tmp_path / ("x" * 150), "run", *DUMMY)
    assert done.returncode == 71
    assert "107" in done.stderr


def test_a_file_in_a_sockets_place_is_71_and_stays(tmp_path: Path) -> None:
    (tmp_path / "run_dir").mkdir(mode=0o750)
    (tmp_path / "run_dir" / "admin.sock").write_text("precious")
    done = llmd(tmp_path, "run", *DUMMY)
    assert done.returncode == 71
    assert str(tmp_path / "run_dir" / "admin.sock") in done.stderr
    assert (tmp_path / "run_dir" / "admin.sock").read_text() == "precious"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop_while_the_model_is_checked_is_0(tmp_path: Path, number: signal.Signals) -> None:
    command = argv(tmp_path, "run", *DUMMY)
    slow = environment(LLMD_FAILPOINTS="supervisor.plan=delay(20s)")
    with subprocess.Popen(command, env=slow, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        try:
            until("the lock is written", lambda: (tmp_path / "run_dir" / "llmd.lock").exists() and (tmp_path / "run_dir" / "llmd.lock").read_text())
            process.send_signal(number)
            assert process.wait(10 * SLOW) == 0
        finally:
            process.kill()


def test_check_prints_the_plan_and_starts_nothing(tmp_path: Path) -> None:
    done = llmd(tmp_path, "check", "--allow-failpoints", "--set", "model.path=dummy")
    assert done.returncode == 0
    assert all(name in done.stdout for name in ("control-0", "frontend-0", "detokenizer-0", "scheduler-0", "http://127.0.0.1:0"))
    assert not (tmp_path / "run_dir").exists()


def test_a_check_and_a_list_of_models_leave_nothing_in_the_cache(tmp_path: Path) -> None:
    model = random_llama(tmp_path / "m")
    (tmp_path / "cache_dir" / "models").mkdir(parents=True)
    (tmp_path / "cache_dir" / "models" / "m").symlink_to(model)
    before = sorted((tmp_path / "cache_dir").rglob("*"))
    assert llmd(tmp_path, "check", "--set", f"model.path={model}").returncode == 0
    assert "llama float32" in llmd(tmp_path, "models").stdout
    assert sorted((tmp_path / "cache_dir").rglob("*")) == before


def test_check_prints_the_effective_configuration_with_sources(tmp_path: Path) -> None:
    done = llmd(tmp_path, "check", "--print", "--set", "http.port=8123", LLMD_HTTP__WORKERS="3")
    assert done.returncode == 0
    assert "8123" in done.stdout
    assert "environment LLMD_HTTP__WORKERS" in done.stdout


def test_help_has_the_exit_statuses() -> None:
    done: Any = subprocess.run([sys.executable, "-m", "llmd.cli", "run", "--help"], capture_output=True, text=True, check=True)
    assert all(f"  {status} " in done.stdout for status in (0, 2, 70, 71, 78, 130))


def test_the_models_are_listed(tmp_path: Path) -> None:
    done = llmd(tmp_path, "models")
    assert done.returncode == 0
    assert "smollm2-135m-instruct" in done.stdout


@pytest.mark.parametrize("verb", ["run", "check"])
@pytest.mark.parametrize("key", ["log_dir", "state_dir", "run_dir"])
def test_a_directory_that_cannot_be_used_is_71_and_named(tmp_path: Path, verb: str, key: str) -> None:
    (tmp_path / "file").write_text("")
    options = DUMMY if verb == "run" else ("--allow-failpoints", "--set", "model.path=dummy")
    done = llmd(tmp_path, verb, *options, "--set", f"{key}={tmp_path}/file/x")
    assert done.returncode == 71
    assert f"{tmp_path}/file" in done.stderr and key in done.stderr
    assert "Traceback" not in done.stderr


def over_long(directory: Path) -> str:
    return f"{directory}/{'x' * 120}"


def in_no_directory(directory: Path) -> str:
    return f"{directory}/nothing/admin.sock"


def a_directory(directory: Path) -> str:
    return str(directory)


def a_file(directory: Path) -> str:
    (directory / "precious").write_text("")
    return f"{directory}/precious"


def below_a_file(directory: Path) -> str:
    return a_file(directory) + "/admin.sock"


def somebody_elses(directory: Path) -> str:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(directory / "live"))
    listener.listen()
    LISTENERS.append(listener)
    return f"{directory}/live"


LISTENERS: list[socket.socket] = []


BAD_SOCKETS = [over_long, in_no_directory, a_directory, a_file, below_a_file, somebody_elses]


@pytest.mark.parametrize(("verb", "make"), [("run", in_no_directory), ("run", somebody_elses), *(("check", make) for make in BAD_SOCKETS)])
def test_an_admin_socket_that_cannot_be_is_71_and_named_before_anything_starts(tmp_path: Path, verb: str, make: Callable[[Path], str]) -> None:
    path = make(tmp_path)
    existed = os.path.lexists(path)
    options = DUMMY if verb == "run" else ("--allow-failpoints", "--set", "model.path=dummy")
    try:
        done = llmd(tmp_path, verb, *options, "--set", f"admin.socket={path}")
    finally:
        while LISTENERS:
            LISTENERS.pop().close()
    assert done.returncode == 71
    assert f"admin.socket: {path}" in done.stderr and "control" not in done.stderr
    assert os.path.lexists(path) == existed


def test_check_tells_what_run_would_find_one_after_the_other(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = llmd(tmp_path, "check", "--set", f"log_dir={tmp_path}/file/x", "--set", "model.path=/nonexistent/model.gguf")
    assert done.returncode == 71
    assert "log_dir" in done.stderr and "/nonexistent/model.gguf" in done.stderr


def test_check_finds_a_pool_that_is_too_small(tmp_path: Path) -> None:
    done = llmd(tmp_path, "check", "--allow-failpoints", "--set", "model.path=dummy", "--set", "memory.max_total_tokens=64")
    assert done.returncode == 78
    assert "memory.max_total_tokens is 64" in done.stderr and "memory.clamp_context: true" in done.stderr


def test_a_context_without_room_for_the_warm_up_is_78(tmp_path: Path) -> None:
    check = ("check", "--allow-failpoints", "--set", "model.path=dummy")
    for faulty, key in (
        (("--set", "model.context_length=7"), "model.context_length"),
        (("--set", "memory.max_total_tokens=4", "--set", "memory.page_size=1", "--set", "memory.clamp_context=true"), "memory.max_total_tokens"),
    ):
        done = llmd(tmp_path, *check, *faulty)
        assert done.returncode == 78 and key in done.stderr.splitlines()[-1]
    assert llmd(tmp_path, *check, "--set", "model.context_length=8").returncode == 0


@pytest.mark.skipif(may_have_gpu(), reason="there is a GPU")
@pytest.mark.parametrize("verb", ["run", "check"])
def test_a_gpu_that_is_not_there_is_78_before_anything_is_loaded(tmp_path: Path, verb: str) -> None:
    options = DUMMY if verb == "run" else ("--allow-failpoints", "--set", "model.path=dummy")
    done = llmd(tmp_path, verb, *options, "--set", "model.device=cuda")
    assert done.returncode == 78
    assert "model.device" in done.stderr and "scheduler" not in done.stderr


def test_a_name_of_no_model_says_what_is_taken(tmp_path: Path) -> None:
    done = llmd(tmp_path, "check", "--set", "model.path=llama3")
    assert done.returncode == 78
    assert "model.path" in done.stderr and "GGUF file" in done.stderr and "directory" in done.stderr


def test_the_version_is_a_flag_too() -> None:
    done = subprocess.run([sys.executable, "-m", "llmd.cli", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("llmd 0.")


@pytest.mark.parametrize(
    "words",
    [("run", "--set", "http.prot=1"), ("check", "--set", "run_dir=/dev/null/x", "--set", "model.path=dummy", "--allow-failpoints"), ("pull", "nothing")],
)
def test_the_last_line_is_the_fault_and_not_a_hint(tmp_path: Path, words: tuple[str, ...]) -> None:
    lines = llmd(tmp_path, *words).stderr.splitlines()
    assert not lines[-1].startswith("llmd: hint:") and any(word in lines[-1] for word in ("http.prot", "/dev/null/x", "nothing"))
