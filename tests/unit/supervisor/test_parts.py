"""The small parts: environment, CPUs, the configuration file, the banner, exit statuses, the shipped unit."""

from __future__ import annotations

import configparser
import errno
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from llmd.config.server_args import HttpArgs, ServerArgs
from llmd.errors import ResourceError, exhausted
from llmd.plan.ports import PortArgs
from llmd.plan.spec import Boot, ModelFiles, make_plan
from llmd.supervisor import banner, conf, cpus, environ, main, preflight
from llmd.supervisor.children import Child, LastExit, describe_status
from llmd.supervisor.logger import SupervisordLogger
from llmd.supervisor.main import _advice
from llmd.supervisor.os_seam import Os
from llmd.supervisor.patches import SteadyClock

ROOT = Path(__file__).parents[3]


def test_children_inherit_nothing_that_speaks_for_the_supervisor() -> None:
    given = {
        "PATH": "/bin",
        "NOTIFY_SOCKET": "x",
        "WATCHDOG_USEC": "1",
        "WATCHDOG_PID": "1",
        "LISTEN_FDS": "1",
        "LISTEN_PID": "1",
        "LISTEN_FDNAMES": "a",
        "LLMD_FAILPOINTS": "a=kill",
        "LLMD_EPOCH": "9",
        "SUPERVISOR_ENABLED": "1",
    }
    assert environ.cleaned(given, failpoints=False) == {"PATH": "/bin"}
    assert environ.cleaned(given, failpoints=True) == {"PATH": "/bin", "LLMD_FAILPOINTS": "a=kill"}
    made = environ.child_env({"PATH": "/bin"}, {"OMP_NUM_THREADS": "2"}, incarnation=3, epoch=4, parent=5, crashed=True)
    own = {"LLMD_INCARNATION": "3", "LLMD_EPOCH": "4", "LLMD_SUPERVISOR_PID": "5", "LLMD_CRASHED": "1"}
    assert made == {"PATH": "/bin", "OMP_NUM_THREADS": "2"} | own


def tree(root: Path, version: int, quota: str) -> tuple[Path, Path]:
    group = root / ("a/b" if version == 2 else "cpu/a/b")
    group.mkdir(parents=True)
    if version == 2:
        (group.parent / "cpu.max").write_text(f"{quota} 100000\n")
        (root / "cgroup").write_text("0::/a/b\n")
    else:
        (group.parent / "cpu.cfs_quota_us").write_text("-1" if quota == "max" else quota)
        (group.parent / "cpu.cfs_period_us").write_text("100000")
        (root / "cgroup").write_text("5:cpuacct,cpu:/a/b\n0::/\n")
    return root, root / "cgroup"


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("quota", "most"), [("50000", 1), ("100000", 1), ("150000", 2), ("max", 10**6)])
def test_a_quota_anywhere_above_counts(tmp_path: Path, version: int, quota: str, most: int) -> None:
    assert cpus.available(*tree(tmp_path, version, quota)) == min(len(os.sched_getaffinity(0)), most)


def test_without_cgroups_the_affinity_counts(tmp_path: Path) -> None:
    assert cpus.available(tmp_path, tmp_path / "nothing") == len(os.sched_getaffinity(0))


def test_the_file_holds_only_fixed_tokens() -> None:
    """A run directory full of the format's special characters does not get into it."""
    specs = make_plan(ServerArgs(http=HttpArgs(workers=2)), PortArgs("/run/my #1 ;model %s"), threads=1)
    text = conf.render(specs, 10.2)
    assert "#1" not in text
    parsed = configparser.RawConfigParser()
    parsed.read_string(text)
    programs = [name for name in parsed.sections() if name.rpartition(":")[2] in {spec.name for spec in specs}]
    assert len(programs) == len(specs) == 5
    for name in programs:
        section = dict(parsed[name])
        assert section["command"] == f"/llmd/plan {name.rpartition(':')[2]}"
        assert (section["autostart"], section["autorestart"], section["startsecs"], section["startretries"]) == ("false", "false", "0", "0")
        assert section["stopwaitsecs"] == "11"
        assert section["stdout_logfile"] == section["stderr_logfile"] == "NONE"
    assert parsed["eventlistener:control-0"]["buffer_size"] == "4096"
    assert parsed["group:engine"]["programs"] == "scheduler-0"


def test_an_odd_name_is_refused() -> None:
    with pytest.raises(ValueError, match="process name"):
        conf.render([replace(make_plan(ServerArgs(), PortArgs("/run"), threads=1)[0], role="a b")], 1.0)  # type: ignore[arg-type]


def boot(**files: Any) -> Boot:
    facts: dict[str, Any] = {
        "kind": "gguf",
        "path": "/m.gguf",
        "name": "it's a model",
        "small_dir": "/s",
        "weights_version": "m@123",
        "weights_bytes": 1,
        "context_length": 8,
        "vocab_size": 8,
        "tokenizer_size": 8,
        "eos_token_ids": (),
        "bos_token_id": None,
        "add_bos": False,
        "has_chat_template": True,
        "architecture": "llama",
        "quantization": "Q4_1",
        **files,
    }
    ports = PortArgs("/run/llmd")
    made = ModelFiles(**facts)
    args = ServerArgs()
    dirs = {"state_dir": "/s", "cache_dir": "/c", "log_dir": "/l"}
    return Boot(start_id="x", started_at=0.0, args=args, ports=ports, files=made, processes=(), http_url="http://127.0.0.1:8000", **dirs)


@pytest.mark.parametrize(("template", "path"), [(True, "/v1/chat/completions"), (False, "/v1/completions")])
def test_the_banner_has_a_line_that_a_shell_can_run(template: bool, path: str) -> None:
    text = banner.text(boot(has_chat_template=template))
    line = next(line for line in text.splitlines() if "curl" in line).split("try", 1)[1]
    shown = subprocess.run(["/bin/sh", "-c", line.replace("curl", "printf '%s\\n'", 1)], capture_output=True, text=True, check=True).stdout.splitlines()
    assert shown[0] == f"http://127.0.0.1:8000{path}"
    assert "it's a model" in shown[-1]
    assert "m@123" in text
    assert "llmctl top" not in text


def test_the_banner_names_a_control_command_that_works_from_this_shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    beside = Path(sys.executable).parent / "llmctl"
    assert beside.exists()
    ready = boot()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nonexistent")
    assert banner.llmctl(ready) == str(beside)
    monkeypatch.setenv("PATH", str(beside.parent))
    assert banner.llmctl(ready) == "llmctl"
    assert banner.llmctl(replace(ready, ports=PortArgs("/srv/a b"))) == "llmctl --socket '/srv/a b/admin.sock'"


@pytest.mark.parametrize(
    ("status", "reason", "text"),
    [
        (78, "x", "llmd check"),
        (71, "x", "free what"),
        (70, LastExit(-9, "signal", 0.0, "").ended, "from outside, not for want of memory"),
        (70, LastExit(-9, "hang", 0.0, "").ended, "llmd itself"),
        (70, "x", "/l/*.log"),
    ],
)
def test_the_last_words_say_what_to_do(status: int, reason: str, text: str) -> None:
    assert text in _advice(status, reason, Path("/l"), oom=False)


def test_the_last_words_name_want_of_memory_only_where_the_record_does() -> None:
    assert "memory.max_total_tokens" in _advice(70, LastExit(-9, "signal", 0.0, "").ended, Path("/l"), oom=True)
    assert "max_total_tokens" not in _advice(70, LastExit(-9, "signal", 0.0, "").ended, Path("/l"), oom=False)
    assert "llmd itself" in _advice(70, LastExit(-9, "hang", 0.0, "").ended, Path("/l"), oom=False)


@pytest.mark.parametrize(("status", "text"), [(0, "status 0"), (3, "status 3"), (-9, "signal 9 (SIGKILL)"), (-99, "signal 99")])
def test_exit_statuses_in_words(status: int, text: str) -> None:
    assert describe_status(status) == text


def test_a_step_of_the_wall_clock_moves_no_deadline_of_supervisord(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SteadyClock()
    before = clock.time()
    monkeypatch.setattr("time.time", lambda: 0.0)
    assert 0 <= clock.time() - before < 5


def test_supervisords_routine_criticals_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    log = SupervisordLogger()
    log.critical("Server 'unix_http_server' running without any HTTP authentication checking")
    assert caplog.records == []
    log.critical("%(name)s broke", name="it")
    assert caplog.records[0].getMessage() == "it broke"


@pytest.mark.parametrize(
    ("path", "needed"), [("smollm2-135m-instruct", True), ("cached", False), ("dummy", False), ("./x", False), ("/m/x", False), ("x.gguf", False)]
)
def test_only_a_name_that_is_not_in_the_cache_is_pulled(tmp_path: Path, path: str, needed: bool) -> None:
    (tmp_path / "models" / "cached").mkdir(parents=True)
    (tmp_path / "models" / "cached" / "manifest.json").write_text("{}")
    args = ServerArgs()
    args = replace(args, model=replace(args.model, path=path))
    assert preflight.needs_pull(args, tmp_path) is needed


def test_the_supervisor_stays_light() -> None:
    """No thread may run in the main process, so nothing that starts one is imported."""
    heavy = ["torch", "transformers", "numpy", "zmq", "pydantic", "starlette", "uvicorn"]
    code = f"import sys, llmd.supervisor.main, llmd.supervisor.rpc; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def unit() -> dict[str, str]:
    parsed = configparser.RawConfigParser(strict=False)
    parsed.optionxform = str  # type: ignore[assignment, method-assign]
    parsed.read(ROOT / "systemd" / "llmd.service")
    return dict(parsed["Service"])


def test_the_shipped_unit_holds_its_promises() -> None:
    section = unit()
    expected = {
        "Type": "notify",
        "NotifyAccess": "main",
        "Restart": "on-failure",
        "KillMode": "mixed",
        "RestartPreventExitStatus": "2 78",
        "RuntimeDirectory": "llmd",
        "RuntimeDirectoryMode": "0750",
        "StateDirectory": "llmd",
        "CacheDirectory": "llmd",
        "LogsDirectory": "llmd",
    }
    assert {name: section[name] for name in expected} == expected
    assert "llmctl" in section["ExecReload"] and " reload " in section["ExecReload"]
    defaults = ServerArgs()
    assert int(section["TimeoutStopSec"].removesuffix("s")) > defaults.http.drain_timeout + defaults.supervision.stop_timeout
    assert int(section["WatchdogSec"].removesuffix("s")) >= 5
    assert int(section["LimitNOFILE"]) >= 4096


def test_systemd_finds_no_fault_in_the_unit(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze")
    text = (ROOT / "systemd" / "llmd.service").read_text().replace("/opt/llmd/bin/llmd run", "/bin/true run").replace("/opt/llmd/bin/llmctl", "/bin/true")
    (tmp_path / "llmd.service").write_text(text)
    done = subprocess.run([analyze, "verify", str(tmp_path / "llmd.service")], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout + done.stderr == ""


def test_too_few_descriptors_are_told_in_our_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(kind: int, limits: tuple[int, int]) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, 128))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    with pytest.raises(ResourceError, match="llmd may open 128 files, and needs 256"):
        main._allow_files()


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EMFILE, errno.ENOMEM])
def test_a_check_that_the_system_does_not_let_start_is_71(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(ResourceError, match=r"cannot start llmd\.store\.check: no m"):
        preflight.check(ServerArgs(), Path("/x"), {}, Os(), [])


def test_what_is_used_up_is_named_with_its_limit() -> None:
    for number, words in ((errno.EAGAIN, "ulimit -u"), (errno.EMFILE, "ulimit -n"), (errno.ENOSPC, "df -i")):
        told = exhausted(OSError(number, os.strerror(number), "/some/file"), "cannot write")
        assert told is not None and told.exit_status == 71
        assert told.message.startswith("cannot write: /some/file: ") and words in told.message
    assert exhausted(RuntimeError("can't start new thread")) is not None
    assert exhausted(OSError(errno.ENOENT, "")) is None and exhausted(ValueError("x")) is None


def test_a_start_that_was_asked_for_is_no_restart() -> None:
    args = ServerArgs()
    child = Child(make_plan(args, PortArgs("/run/x"), threads=1)[-1])
    child.starts(0.0)
    for asked in (True, False, False, True):
        if asked:
            child.expected = (7, "reload")
        child.ends(7, -9, False, 1.0, "")
        child.starts(2.0)
    shown = child.snapshot(7, "running", 3.0, 0.0, 0)
    assert (shown["incarnation"], shown["restarts"], shown["replaced"]) == (5, 2, 2)
