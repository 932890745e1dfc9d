"""The run directory: modes, owners, links, the lock, and what an earlier life left there."""

from __future__ import annotations

import json
import os
import socket
import stat
from pathlib import Path

import pytest

from llmd.errors import ResourceError
from llmd.plan.ports import PortArgs
from llmd.supervisor import rundir


@pytest.fixture
def ports(tmp_path: Path) -> PortArgs:
    return PortArgs(str(tmp_path / "run"))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def unix_socket(path: Path) -> None:
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    made.close()


def clear(ports: PortArgs) -> None:
    rundir.clear_stale_sockets(ports, ports.admin_socket, 2)


def test_both_directories_are_made_with_their_modes(ports: PortArgs) -> None:
    before = os.umask(0)
    try:
        rundir.prepare(ports, None)
    finally:
        os.umask(before)
    assert mode(Path(ports.run_dir)) == 0o750
    assert mode(ports.private) == 0o700


def test_existing_ones_are_tightened(ports: PortArgs) -> None:
    ports.private.mkdir(parents=True, mode=0o755)
    os.chmod(ports.run_dir, 0o770)
    rundir.prepare(ports, None)
    assert mode(Path(ports.run_dir)) == 0o750
    assert mode(ports.private) == 0o700


def test_a_directory_for_all_is_refused_and_left_alone(ports: PortArgs) -> None:
    Path(ports.run_dir).mkdir()
    os.chmod(ports.run_dir, 0o1777)
    with pytest.raises(ResourceError, match="written by others"):
        rundir.prepare(ports, None)
    assert mode(Path(ports.run_dir)) == 0o1777


def test_links_are_not_followed(ports: PortArgs, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    Path(ports.run_dir).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ResourceError, match="not a directory"):
        rundir.prepare(ports, None)
    Path(ports.run_dir).unlink()
    Path(ports.run_dir).mkdir(mode=0o750)
    ports.private.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ResourceError, match="private is not a directory"):
        rundir.prepare(ports, None)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_is_refused(ports: PortArgs) -> None:
    ports.private.mkdir(parents=True)
    os.chmod(ports.run_dir, 0o750)
    os.chown(ports.private, 12345, -1)
    with pytest.raises(ResourceError, match="belongs to uid 12345"):
        rundir.prepare(ports, None)


def test_an_unknown_group_is_no_error(ports: PortArgs) -> None:
    rundir.prepare(ports, "no-such-group-anywhere")


def test_a_run_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="file"):
        rundir.prepare(PortArgs(str(tmp_path / "file" / "run")), None)


def test_the_lock_is_exclusive_and_tells_who_has_it(ports: PortArgs) -> None:
    rundir.prepare(ports, None)
    lock = rundir.Lock(ports.lock)
    lock.write({"pid": 4711, "long": "x" * 500})
    lock.write({"pid": 4712})
    with pytest.raises(ResourceError, match=r"already running .* \(pid 4712\)") as refused:
        rundir.Lock(ports.lock)
    assert f"llmctl --socket {ports.lock.parent} status" in refused.value.hint
    assert json.loads(ports.lock.read_text()) == {"pid": 4712}


def test_stale_sockets_go_and_foreign_files_stay(ports: PortArgs) -> None:
    rundir.prepare(ports, None)
    sockets = [ports.supervisor_socket, ports.reports, ports.admin_socket, ports.private / "tokenizer.0", ports.private / "scheduler_input.7"]
    for path in sockets:
        unix_socket(path)
    (ports.private / "notes").write_text("kept")
    (Path(ports.run_dir) / "notes").write_text("kept")
    clear(ports)
    assert not any(path.exists() for path in sockets)
    assert (ports.private / "notes").read_text() == (Path(ports.run_dir) / "notes").read_text() == "kept"


@pytest.mark.parametrize(
    "name", ["admin.sock", *(f"private/{name}" for name in ("supervisor.sock", "reports.sock", "control.side", "tokenizer.1", "scheduler_input.3"))]
)
@pytest.mark.parametrize("kind", ["file", "link", "directory"])
def test_anything_else_at_a_sockets_path_is_named_and_never_deleted(ports: PortArgs, name: str, kind: str, tmp_path: Path) -> None:
    rundir.prepare(ports, None)
    path = Path(ports.run_dir) / name
    unix_socket(tmp_path / "real")
    {"file": lambda: path.write_text("precious"), "link": lambda: path.symlink_to(tmp_path / "real"), "directory": path.mkdir}[kind]()
    with pytest.raises(ResourceError) as caught:
        clear(ports)
    assert str(path) in caught.value.message
    assert os.path.lexists(path)


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "state"
    rundir.write_file(path, b"one")
    rundir.write_file(path, b"two", 0o640)
    assert path.read_bytes() == b"two"
    assert mode(path) == 0o640
    assert list(tmp_path.iterdir()) == [path]
