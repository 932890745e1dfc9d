"""`llmd check` finds all that a start would find, in the order of the file, ports included; a start that fails leaves what was to run for `llmctl doctor`."""

from __future__ import annotations

import fcntl
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.daemon import free_port
from tests.integration.llmctl.fake import process_named_llmd
from tests.integration.supervisor.harness import SLOW
from tests.integration.supervisor.test_cli import DUMMY, environment, llmd


def doctor(run_dir: Path) -> list[dict[str, str]]:
    argv = [sys.executable, "-m", "llmctl.main", "--socket", str(run_dir), "doctor", "-o", "json"]
    done = subprocess.run(argv, env=environment(), capture_output=True, text=True, timeout=60 * SLOW, check=False)
    findings: list[dict[str, str]] = json.loads(done.stdout)
    return findings


def configuration(findings: list[dict[str, str]]) -> list[str]:
    return [finding["text"] for finding in findings if finding["what"] == "configuration"]


def busy(port: int) -> tuple[str, ...]:
    return ("--allow-failpoints", "--set", "model.path=dummy", "--set", f"http.port={port}")


def test_all_faults_of_a_file_come_in_its_order_with_the_models_and_the_ports(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        file = tmp_path / "llmd.yaml"
        lines = [
            "http:",
            "  prot: 1",
            f"  port: {port}",
            "model:",
            "  path: /nonexistent/m.gguf",
            "  dtype: float99",
            "lora: {max_rank: 3}",
            "log_dir: /dev/null/x",
        ]
        file.write_text("\n".join(lines))
        argv = [sys.executable, "-m", "llmd.cli", "check", "-c", str(file)]
        done = subprocess.run(argv, env=environment(), capture_output=True, text=True, timeout=30 * SLOW, check=False)
    assert done.returncode == 78
    said = [line.removeprefix("llmd: ") for line in done.stderr.splitlines() if "hint:" not in line]
    assert [int(line.removeprefix(f"{file}:").partition(":")[0]) for line in said] == [2, 3, 5, 6, 7, 8]
    for line, words in zip(said, ("prot", f"127.0.0.1:{port}", "/nonexistent/m.gguf", "float99", "LoRA", "log_dir"), strict=True):
        assert words in line


@pytest.mark.parametrize("key", ["http.port", "admin.listen"])
def test_a_port_that_somebody_else_has_is_71_with_key_and_holder(tmp_path: Path, key: str) -> None:
    (tmp_path / "admin").write_text("k" * 32 + "\n")
    (tmp_path / "admin").chmod(0o600)
    with socket.create_server(("127.0.0.1", free_port())) as taken:  # one that nobody is given once it is free
        port = taken.getsockname()[1]
        wanted = busy(port) if key == "http.port" else (*busy(0), "--set", f"admin.listen=127.0.0.1:{port}", "--set", f"http.admin_key_file={tmp_path}/admin")
        done = llmd(tmp_path, "check", *wanted)
    assert done.returncode == 71
    assert f"--set {key}: cannot listen on" in done.stderr.splitlines()[-1] and f"127.0.0.1:{port}" in done.stderr
    assert "has it" in done.stderr or key in done.stderr
    assert llmd(tmp_path, "check", *busy(port)).returncode == 0, "it listens nowhere, and free is free"


def test_an_address_of_another_machine_is_71(tmp_path: Path) -> None:
    done = llmd(tmp_path, "check", *busy(0), "--set", "http.host=203.0.113.7", "--set", "http.allow_unauthenticated=true")
    assert done.returncode == 71 and "203.0.113.7" in done.stderr and "no such address" in done.stderr


def test_a_port_that_the_llmd_of_this_run_directory_has_is_as_it_should_be(tmp_path: Path) -> None:
    (tmp_path / "run_dir").mkdir(mode=0o750)
    with socket.create_server(("127.0.0.1", 0)) as taken, process_named_llmd() as running:
        port = taken.getsockname()[1]
        facts: dict[str, Any] = {"pid": running.pid, "http": f"http://127.0.0.1:{port}"}
        (tmp_path / "run_dir" / "llmd.lock").write_text(json.dumps(facts))
        done = llmd(tmp_path, "check", *busy(port))
        assert done.returncode == 0, done.stderr
        assert f"in use by the llmd that runs here, pid {running.pid}" in done.stdout


def test_doctor_looks_at_the_configuration_that_was_refused(tmp_path: Path) -> None:
    """Also where no process was ever started, and the run directory is only named in the very file."""
    file = tmp_path / "other.yaml"
    file.write_text(f"run_dir: {tmp_path}/run\nhttp: {{port: 0, prot: 1}}\n")
    argv = [sys.executable, "-m", "llmd.cli", "run", "-c", str(file), "--set", "scheduler.policy=prio"]
    done = subprocess.run(argv, env=environment(LLMD_HTTP__WORKERS="none"), capture_output=True, text=True, timeout=30 * SLOW, check=False)
    assert done.returncode == 78
    findings = doctor(tmp_path / "run")
    name, *faults = configuration(findings)
    assert all(word in name for word in (str(file), "--set scheduler.policy=prio", "LLMD_HTTP__WORKERS=none", "the last start"))
    assert [word for word in ("prot", "scheduler.policy", "LLMD_HTTP__WORKERS") if not any(word in fault for fault in faults)] == []
    assert any("prot" in finding["text"] and "(and 2 more)" in finding["text"] for finding in findings if finding["what"] == "last end")


def test_doctor_looks_at_the_configuration_whose_port_was_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert llmd(tmp_path, "run", *DUMMY[:-1], str(port)).returncode == 71
        faults = configuration(doctor(tmp_path / "run_dir"))
    assert "--allow-failpoints" not in faults[-1] and f"127.0.0.1:{port}" in faults[-1]


def test_what_is_left_of_a_refused_start_holds_no_secret_and_spares_the_llmd_that_runs(tmp_path: Path) -> None:
    secret = "observability.tracing.otlp_endpoint=http://me:s3cret@collector:4317"
    assert llmd(tmp_path, "run", "--set", secret).returncode == 78
    left = "".join(path.read_text() for path in (tmp_path / "run_dir").iterdir() if path.is_file())
    assert "collector" in left and "s3cret" not in left
    with process_named_llmd() as running:
        lock = tmp_path / "run_dir" / "llmd.lock"
        lock.write_text(json.dumps({"pid": running.pid}))
        with lock.open("r+") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            assert llmd(tmp_path, "run", "--set", "http.prot=1").returncode == 78
        assert json.loads(lock.read_text()) == {"pid": running.pid}
