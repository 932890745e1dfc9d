"""The checking child: one JSON line out, or every fault on a line of stderr and exit 78; quick, and never with torch."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from llmd.config import ServerArgs
from llmd.config.server_args import ModelArgs
from llmd.plan.spec import ModelFiles
from tests.daemon import SLOW
from tests.models import permutation_llama, random_llama


def check(path: Path | str, cache: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    request = msgspec.json.encode({"args": ServerArgs(model=ModelArgs(path=str(path))), "cache_dir": str(cache)}).decode()
    return subprocess.run([sys.executable, *flags, "-m", "llmd.store.check"], input=request, capture_output=True, text=True, timeout=30 * SLOW, check=False)


def test_a_good_model(tmp_path: Path) -> None:
    begun = time.monotonic()
    done = check(permutation_llama(tmp_path / "m"), tmp_path / "cache")
    assert (done.returncode, done.stderr) == (0, "")
    assert time.monotonic() - begun < 10 * SLOW
    files = msgspec.json.decode(done.stdout, type=ModelFiles)
    assert files.name == "m"


def test_faults(tmp_path: Path) -> None:
    path = random_llama(tmp_path / "m", shards=2)
    (path / "model-00002-of-00002.safetensors").unlink()
    (path / "tokenizer.json").unlink()
    done = check(path, tmp_path / "cache")
    assert (done.returncode, done.stdout) == (78, "")
    lines = done.stderr.splitlines()
    assert len(lines) == 2
    assert "model-00002-of-00002.safetensors" in lines[0]
    assert "tokenizer.json" in lines[1]


@pytest.mark.parametrize("path", ["dummy", "tiny"])
def test_torch_is_not_imported(tmp_path: Path, path: str) -> None:
    done = check(path if path == "dummy" else permutation_llama(tmp_path / path), tmp_path / "cache", "-X", "importtime")
    assert done.returncode == 0
    modules = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert not modules & {"torch", "transformers", "gguf"}
    assert json.loads(done.stdout)["has_chat_template"]
