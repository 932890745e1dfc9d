"""Packed weights: mapped where they are there and whole, made again where not; never half, never somebody else's."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from llmd.model import pack_cache, pack_file
from llmd.model.pack_cache import DIRECTORY, load_packed
from llmd.model.pack_file import Bytes, Item, Packed, PackKey, source_facts
from tests.daemon import SLOW

KEY = PackKey(weights_version="m@0123", quantization="auto", layout="scalar-1", sources=(("m.gguf", 10, 20, 30),))
PADDING = 1010  # between two tensors: nobody's
SIZES = {"a": 1000, "b": 64, "c": 0, "d": 70_001}


def content(name: str) -> Bytes:
    return np.random.default_rng(ord(name)).integers(0, 256, SIZES[name]).astype(np.uint8)


class Maker:
    """Items that count how often they are made."""

    def __init__(self) -> None:
        self.made: list[str] = []

    @property
    def items(self) -> list[Item]:
        def make(name: str, out: Bytes) -> None:
            self.made.append(name)
            out[:] = content(name)

        return [Item(name, size, lambda out, name=name: make(name, out)) for name, size in SIZES.items()]  # type: ignore[misc]


def load(cache: Path, maker: Maker | None = None, key: PackKey = KEY) -> Packed:
    packed = load_packed(cache, key, (maker or Maker()).items, lambda stage, done, total: None)
    assert {name: bytes(tensor) for name, tensor in packed.tensors.items()} == {name: bytes(content(name)) for name in SIZES}
    assert packed.nbytes == sum(SIZES.values())
    return packed


def files(cache: Path) -> list[Path]:
    return sorted((cache / DIRECTORY).glob("*.pack"))


@pytest.fixture(params=[True, False], autouse=True)
def huge_pages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Read into huge pages, or mapped."""
    monkeypatch.setattr(pack_file, "has_huge_pages", lambda: request.param)
    return bool(request.param)


def test_a_second_start_takes_what_the_first_made(tmp_path: Path, huge_pages: bool) -> None:
    maker = Maker()
    first = load(tmp_path, maker)
    assert maker.made == list(SIZES)
    second = load(tmp_path, maker)
    assert maker.made == list(SIZES), "nothing is packed twice"
    assert first.path == second.path == files(tmp_path)[0]
    for tensor in second.tensors.values():
        assert not tensor.flags.writeable and tensor.ctypes.data % 64 == 0
    assert (str(second.path) in Path("/proc/self/maps").read_text()) != huge_pages


def test_progress_counts_bytes(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    load_packed(tmp_path, KEY, Maker().items, lambda *step: seen.append(step))
    assert {stage for stage, *_ in seen} == {pack_cache.STAGE}
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[0][1] == 0 and seen[-1][1:] == (sum(SIZES.values()), sum(SIZES.values()))


@pytest.mark.parametrize("where", [0, 500, PADDING, 40_000, -1, -10, -20, -60])
def test_a_damaged_byte_costs_a_warning_and_the_packing(tmp_path: Path, where: int, caplog: pytest.LogCaptureFixture) -> None:
    load(tmp_path)
    (path,) = files(tmp_path)
    data = bytearray(path.read_bytes())
    data[where] ^= 1
    path.write_bytes(data)
    maker = Maker()
    load(tmp_path, maker)
    assert maker.made == ([] if where == PADDING else list(SIZES))
    assert [record.levelname for record in caplog.records] == (["WARNING"] if maker.made else [])
    again = Maker()
    load(tmp_path, again)
    assert again.made == []


@pytest.mark.parametrize("size", [0, 1, 19, 20, 21, 1000, 71_000, -1])
def test_a_truncated_file_is_made_again(tmp_path: Path, size: int, caplog: pytest.LogCaptureFixture) -> None:
    load(tmp_path)
    (path,) = files(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[:size])
    maker = Maker()
    load(tmp_path, maker)
    assert maker.made == list(SIZES)
    assert "packed again" in caplog.text
    assert path.read_bytes() == data


def test_a_pipe_in_its_place_is_replaced(tmp_path: Path) -> None:
    load(tmp_path)
    (path,) = files(tmp_path)
    path.unlink()
    os.mkfifo(path)
    load(tmp_path)
    assert path.is_file()


def test_any_damage_at_all_is_survived(tmp_path: Path) -> None:
    load(tmp_path)
    (path,) = files(tmp_path)
    whole, dice = path.read_bytes(), np.random.default_rng(0)
    for _ in range(60):
        data = bytearray(whole)
        table = len(whole) - 400
        for _ in range(int(dice.integers(1, 4))):
            data[int(dice.integers(table, len(whole)))] = int(dice.integers(0, 256))
        path.write_bytes(data)
        load(tmp_path)


@pytest.mark.parametrize(
    "other",
    [
        PackKey(weights_version="m@9999", quantization="auto", layout="scalar-1", sources=KEY.sources),
        PackKey(weights_version="m@0123", quantization="int8", layout="scalar-1", sources=KEY.sources),
        PackKey(weights_version="m@0123", quantization="auto", layout="avx2-1", sources=KEY.sources),
        PackKey(weights_version="m@0123", quantization="auto", layout="scalar-2", sources=KEY.sources),
        PackKey(weights_version="m@0123", quantization="auto", layout="scalar-1", sources=(("m.gguf", 10, 21, 30),)),
    ],
)
def test_each_part_of_the_key_counts(tmp_path: Path, other: PackKey) -> None:
    load(tmp_path)
    maker = Maker()
    load(tmp_path, maker, other)
    assert maker.made == list(SIZES)


def test_a_file_under_a_wrong_name_is_not_used(tmp_path: Path) -> None:
    other = PackKey(weights_version="n@1", quantization="auto", layout="scalar-1", sources=())
    load(tmp_path)
    load(tmp_path, key=other)
    one, two = files(tmp_path)
    one.write_bytes(two.read_bytes())
    maker = Maker()
    load(tmp_path, maker)
    assert maker.made == list(SIZES)


def test_only_what_is_replaced_or_long_unused_goes(tmp_path: Path) -> None:
    newer = PackKey(weights_version="m@0123", quantization="auto", layout="scalar-2", sources=KEY.sources)
    other = PackKey(weights_version="m@0123", quantization="int8", layout="scalar-1", sources=KEY.sources)
    unused = PackKey(weights_version="old@1", quantization="auto", layout="scalar-1", sources=KEY.sources)
    first = load(tmp_path)
    kept, gone = load(tmp_path, key=other), load(tmp_path, key=unused)
    assert len(files(tmp_path)) == 3 and gone.path and kept.path
    os.utime(gone.path, (0, time.time() - 2 * pack_cache.KEEP_S))
    second = load(tmp_path, key=newer)
    assert files(tmp_path) == sorted(path for path in (second.path, kept.path) if path)
    assert bytes(first.tensors["a"]) == bytes(content("a")), "whoever has it mapped keeps it"


def test_a_start_counts_as_use(tmp_path: Path) -> None:
    path = load(tmp_path).path
    assert path
    os.utime(path, (0, 0))
    load(tmp_path)
    assert path.stat().st_mtime > time.time() - 3600


def test_left_overs_of_a_killed_writer_go(tmp_path: Path) -> None:
    path = load(tmp_path).path
    assert path
    left = path.with_name(f".{path.name}.abc.tmp")
    left.write_bytes(b"half")
    path.unlink()
    load(tmp_path)
    assert not left.exists()


@pytest.mark.parametrize("obstacle", ["cache", DIRECTORY])
def test_without_a_cache_the_weights_lie_in_memory(tmp_path: Path, obstacle: str, caplog: pytest.LogCaptureFixture) -> None:
    cache = tmp_path / "cache"
    in_the_way = cache if obstacle == "cache" else cache / DIRECTORY
    in_the_way.parent.mkdir(exist_ok=True)
    in_the_way.write_text("a file")
    maker = Maker()
    packed = load(cache, maker)
    assert packed.path is None and maker.made == list(SIZES)
    assert [record.levelname for record in caplog.records][-1] == "WARNING"
    assert "packed again at each start" in caplog.text


_LOAD = """
import resource, sys
from pathlib import Path
from tests.unit.model.test_pack_cache import Maker, load
if len(sys.argv) > 2:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
maker = Maker()
packed = load(Path(sys.argv[1]), maker)
print(len(maker.made), packed.path is None)
"""


def child(cache: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", _LOAD, str(cache), *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_full_disk_costs_a_warning(tmp_path: Path) -> None:
    out, err = child(tmp_path, "50000").communicate(timeout=60 * SLOW)
    assert out.split() == [str(len(SIZES) * 2), "True"], err  # once into the file that did not fit, once into memory
    assert "packed weights cannot be kept" in err
    assert not [path for path in (tmp_path / DIRECTORY).iterdir() if path.suffix != ".lock"], "nothing half is left"


def test_several_starts_at_once(tmp_path: Path) -> None:
    both = [child(tmp_path) for _ in range(4)]
    found = [process.communicate(timeout=60 * SLOW) for process in both]
    assert [process.returncode for process in both] == [0] * 4, found
    assert all(out.split()[1] == "False" for out, _ in found)
    assert sorted(out.split()[0] for out, _ in found) == ["0", "0", "0", str(len(SIZES))], "the others waited for the first"
    assert len(files(tmp_path)) == 1


def test_without_locks_both_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without flock."""
    import fcntl

    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    maker = Maker()
    assert load(tmp_path, maker).path is not None
    assert maker.made == list(SIZES)


def test_source_facts_tell_a_changed_file(tmp_path: Path) -> None:
    file = tmp_path / "w"
    file.write_bytes(b"one")
    os.utime(file, (0, 0))
    before = source_facts([file])
    assert before == source_facts([file])
    file.write_bytes(b"two")
    os.utime(file, (0, 0))
    assert before != source_facts([file]), "same size and time of change: the kernel's own time of the inode tells"
