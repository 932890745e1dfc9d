"""What an `llmd` process inherits does not matter: closed streams, blocked signals, a stop during its first imports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmd.errors import EXIT_OK, EXIT_RESOURCE
from tests.daemon import SLOW


def llmd(tmp_path: Path, *flags: str, shell: str = "") -> subprocess.Popen[bytes]:
    """`llmd run`, with `shell` said before its exec."""
    sets = {"run_dir": str(tmp_path / "run"), "state_dir": str(tmp_path / "state"), "log_dir": str(tmp_path / "log"), "http.port": "0"}
    words = [sys.executable, "-m", "llmd.cli", "run", *flags, *(f"--set={key}={value}" for key, value in sets.items())]
    return subprocess.Popen(["sh", "-c", f'{shell}\nexec "$@"', "sh", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.parametrize("streams", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_closed_streams_change_nothing(tmp_path: Path, streams: str) -> None:
    child = llmd(tmp_path, "--model", "/nowhere", shell=f"exec {streams}")
    _, said = child.communicate(timeout=30 * SLOW)
    assert child.returncode == 78
    assert b"Traceback" not in said
    assert "llmd ends with status 78" in (tmp_path / "log" / "supervisor.log").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("after", [0.06, 0.12, 0.25])
def test_a_stop_during_the_imports_is_a_stop(tmp_path: Path, number: int, after: float) -> None:
    code = (
        "import sys, os, signal, threading, time\n"
        "sys.argv = ['llmd', 'run', '--model', '/nowhere', '--set=run_dir=%s']\n"
        % (tmp_path / "run")
        + f"stop = threading.Timer({after}, os.kill, (os.getpid(), {int(number)}))\n"
        + "class Slow:\n"
        + "    def find_spec(self, name, *_):\n"
        + "        if not stop.ident: stop.start()\n"  # the first import of main: before it there was no llmd to be asked
        + "        if name in ('click', 'llmd.supervisor.main'): time.sleep(1)\n"
        + "from llmd import entry\n"
        + "sys.meta_path.insert(0, Slow())\n"
        + "sys.exit(entry.main())\n"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=30 * SLOW, check=False)
    assert (done.returncode, b"Traceback" in done.stderr) == (EXIT_OK, False), done.stderr
    assert time.monotonic() - began < 10 * SLOW


def test_blocked_signals_are_let_through() -> None:
    code = (
        "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD})\n"
        "from llmd.entry import prepare; prepare(); print(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30 * SLOW, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("name", "kind"), [("llmd.lock", "fifo"), ("llmd.lock", "directory"), ("private/supervisord.conf", "directory"), ("private/boot.msgpack", "directory")]
)
def test_what_is_in_the_way_of_a_start_file_is_named_with_71(tmp_path: Path, name: str, kind: str) -> None:
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True, mode=0o700)
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    child = llmd(tmp_path, "--model", "dummy", "--allow-failpoints")
    _, said = child.communicate(timeout=30 * SLOW)
    assert child.returncode == EXIT_RESOURCE, said
    assert str(path).encode() in said
    assert b"Traceback" not in said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM])
@pytest.mark.parametrize("entry", ["entry", "launch_server"])
def test_a_signal_while_the_interpreter_ends_does_not_change_the_status(tmp_path: Path, number: int, entry: str) -> None:
    argv = ["llmd", "run", "--model", "/nowhere"] if entry == "entry" else ["llmd", "--model-path", "/nowhere"]
    code = (
        "import os, signal, sys\n"
        f"sys.argv = {[*argv, f'--set=run_dir={tmp_path}/run', f'--set=state_dir={tmp_path}/state', '--set=http.port=0']!r}\n"
        f"signal.signal({int(number)}, lambda *_: None)\n"
        "class Late:\n"
        f"    def __del__(self, kill=os.kill, pid=os.getpid()): kill(pid, {int(number)})\n"
        "late = Late()\n"
        "import importlib\n"
        f"sys.exit(importlib.import_module('llmd.{entry}').main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60 * SLOW, check=False)
    assert done.returncode == 78, done.stderr


@pytest.mark.parametrize("place", ["click", "llmd.store.pull"])
def test_an_interrupted_pull_says_so(tmp_path: Path, place: str) -> None:
    code = (
        f"import sys, os, signal\nsys.argv = ['llmd', 'pull', 'smollm2-135m-instruct', '--cache-dir', {str(tmp_path)!r}]\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {place!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "from llmd import entry\nsys.meta_path.insert(0, Interrupting())\nsys.exit(entry.main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60 * SLOW, check=False)
    assert (done.returncode, done.stderr.strip()) == (130, "llmd: interrupted")


def test_a_working_directory_that_is_gone_is_no_fault_unless_something_is_sought_there(tmp_path: Path) -> None:
    shell = f"mkdir {tmp_path}/gone; cd {tmp_path}/gone; rmdir {tmp_path}/gone"
    for model, words in (("/nowhere", b"no such file"), ("./here", b"the working directory is gone")):
        child = llmd(tmp_path, "--model", model, shell=shell)
        _, said = child.communicate(timeout=60 * SLOW)
        assert child.returncode == 78
        assert words in said and b"Traceback" not in said
