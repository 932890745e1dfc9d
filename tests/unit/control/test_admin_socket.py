"""The admin socket: whose it is, what it replaces, and what it never touches."""

from __future__ import annotations

import grp
import logging
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmd.control.admin_socket import bind
from llmd.errors import ResourceError


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="llmd-") as directory:
        yield Path(directory) / "admin.sock"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_a_group_that_exists_may_use_it(path: Path) -> None:
    own = grp.getgrgid(os.getgid()).gr_name
    bind(path, own).close()
    assert (mode(path), path.lstat().st_gid) == (0o660, os.getgid())


def test_without_its_group_it_is_for_our_uid_alone_and_says_so_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bind(path, "no-such-group-here").close()
    assert mode(path) == 0o600
    bind(path, "no-such-group-here", missed=logging.DEBUG).close()
    assert [r.levelno for r in caplog.records if r.levelno >= logging.INFO] == [logging.WARNING]
    assert "groupadd no-such-group-here" in caplog.text and "admin.group" in caplog.text


def test_a_stale_socket_is_replaced(path: Path) -> None:
    bind(path, None).close()
    with bind(path, None), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_a_regular_file_is_never_touched(path: Path) -> None:
    path.write_text("precious")
    with pytest.raises(ResourceError, match="not a socket"):
        bind(path, None)
    assert path.read_text() == "precious"


def test_a_path_that_is_too_long_is_named(path: Path) -> None:
    with pytest.raises(ResourceError, match="107"):
        bind(path.parent / ("x" * 120), None)
