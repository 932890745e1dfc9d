"""The native kernels in a whole daemon: no torch where they serve, packed weights from the cache, torch with one warning where they do not."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmd.kernels.shared_library import library
from tests.daemon import Daemon, titles, wait_for
from tests.models import permutation_llama
from tests.starts import fails

pytestmark = pytest.mark.skipif(library() is None, reason="the native kernels are not built")

CYCLE = list(b"abcdefgh")


def config(directory: Path, **model: Any) -> dict[str, Any]:
    return {"model": {"path": str(directory / "model"), "device": "cpu", **model}, "cache_dir": str(directory / "cache")}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    directory = tmp_path_factory.mktemp("native")
    permutation_llama(directory / "model", [CYCLE])
    with Daemon(directory, config=config(directory)).start() as running:
        yield running
        assert running.stop() == 0


def maps(daemon: Daemon) -> str:
    return Path(f"/proc/{daemon.pid('scheduler')}/maps").read_text()


def packs(daemon: Daemon) -> list[Path]:
    return sorted((daemon.directory / "cache" / "packed").glob("*.pack"))


def replace(daemon: Daemon) -> None:
    """Kill the scheduler, and wait until the next one serves."""
    old = daemon.pid("scheduler")
    os.kill(old, signal.SIGKILL)
    wait_for("another scheduler", lambda: (new := daemon.child("scheduler")) is not None and new.pid != old and "llmd: " in titles([new]).get(new.pid, ""), 60)
    wait_for("an answer", lambda: daemon.status_code("/readyz") == 200 and daemon.complete("a", max_tokens=1).status_code == 200, 60)


def test_the_scheduler_has_no_torch(daemon: Daemon) -> None:
    assert daemon.text("a", max_tokens=5) == "bcdef"
    mapped = maps(daemon)
    assert "libllmd_kernels.so" in mapped
    assert not re.search(r"torch|libgomp|mkl", mapped)


def test_its_weights_are_in_the_cache_and_a_new_one_takes_the_same(daemon: Daemon) -> None:
    (pack,) = packs(daemon)
    inode = pack.stat().st_ino
    replace(daemon)
    wait_for("both have said so", lambda: daemon.log_text().count(f"packed weights from {pack}") == 2, 10)
    assert packs(daemon) == [pack] and pack.stat().st_ino == inode, "it is not made again"
    assert daemon.text("c", max_tokens=3) == "def"


def test_a_damaged_pack_costs_a_warning(daemon: Daemon) -> None:
    (pack,) = packs(daemon)
    data = bytearray(pack.read_bytes())
    data[100] ^= 1
    pack.unlink()  # the running engine keeps what it has mapped
    pack.write_bytes(data)
    replace(daemon)
    wait_for("the warning", lambda: daemon.has_logged("the weights are packed again"), 10)
    assert daemon.text("a", max_tokens=5) == "bcdef"


def test_torch_serves_when_it_is_asked_for(tmp_path: Path) -> None:
    permutation_llama(tmp_path / "model", [CYCLE])
    with Daemon(tmp_path, config=config(tmp_path), env={"LLMD_ISA": "torch"}).start() as daemon:
        assert daemon.text("a", max_tokens=5) == "bcdef"
        assert "libtorch" in maps(daemon)
        assert daemon.stop() == 0
        assert daemon.log_text().count("torch computes this model") == 1
    assert not (tmp_path / "cache" / "packed").exists()


@pytest.mark.parametrize(
    ("model", "env", "said"),
    [
        ({"quantization": "int8"}, {"LLMD_ISA": "torch"}, "model.quantization: int8 needs the native CPU kernels (LLMD_ISA=torch asks for torch)"),
        ({"kv_cache_dtype": "int8"}, {"LLMD_ISA": "torch"}, "model.kv_cache_dtype: int8 needs the native CPU kernels (LLMD_ISA=torch asks for torch)"),
        ({}, {"LLMD_ISA": "sse9"}, "LLMD_ISA=sse9"),
    ],
)
def test_what_cannot_be_computed_here_ends_the_start(tmp_path: Path, model: dict[str, str], env: dict[str, str], said: str) -> None:
    permutation_llama(tmp_path / "model", [CYCLE])
    ended = fails(tmp_path, config(tmp_path, **model), env=env)
    assert ended.status == 78
    assert said in ended.log


def test_without_a_cache_it_serves_all_the_same(tmp_path: Path) -> None:
    permutation_llama(tmp_path / "model", [CYCLE])
    settings = config(tmp_path)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "packed").write_text("a file in the way")
    with Daemon(tmp_path, config=settings).start() as daemon:
        assert daemon.text("a", max_tokens=5) == "bcdef"
        assert daemon.stop() == 0
        assert daemon.has_logged("packed weights cannot be kept")
