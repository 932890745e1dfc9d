"""Scripted checkpoints through the whole chain: split characters, end of sequence, other weights while it runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.daemon import Daemon, wait_for
from tests.models import ASSISTANT, EOS, permutation_llama

FACE, WORLD = "\U0001f600", "世"
FAMILY_AND_FLAG = "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1eb\U0001f1f7 " + FACE + WORLD


def test_characters_split_over_tokens_arrive_whole(tmp_path: Path) -> None:
    ids = [*FACE.encode(), *WORLD.encode()]
    path = permutation_llama(tmp_path / "model", [[ASSISTANT, *ids, EOS]])
    with Daemon(tmp_path, config={"model": {"path": str(path)}}).start() as daemon:
        events = list(daemon.stream(path="/v1/chat/completions", prompt=None, messages=[{"role": "user", "content": "hi"}], max_tokens=50))
        pieces = [e["choices"][0]["delta"]["content"] for e in events if e["choices"][0]["delta"].get("content")]
        # Two characters come in one event where the reader was slow, but each in one piece.
        assert pieces in ([FACE, WORLD], [FACE + WORLD]), "a chunk appears only when a character is whole"
        assert events[-1]["choices"][0]["finish_reason"] == "stop"
        plain = daemon.chat(max_tokens=50, logprobs=True).json()["choices"][0]
        assert plain["message"]["content"] == FACE + WORLD
        assert [bytes(entry["bytes"]) for entry in plain["logprobs"]["content"]][:7] == [bytes([b]) for b in ids]
        assert daemon.stop() == 0


def test_any_text_comes_back_without_replacement_characters(tmp_path: Path) -> None:
    with Daemon(tmp_path, config={"model": {"path": "dummy"}}, failpoints="").start() as daemon:
        length = len(FAMILY_AND_FLAG.encode())
        pieces = [e["choices"][0]["text"] for e in daemon.stream(FAMILY_AND_FLAG, max_tokens=length)]
        assert "".join(pieces) == FAMILY_AND_FLAG == daemon.text(FAMILY_AND_FLAG, max_tokens=length)
        assert not any("\ufffd" in piece for piece in pieces)
        assert daemon.stop() == 0


@pytest.fixture
def daemon_on_a(tmp_path: Path) -> Daemon:
    a = permutation_llama(tmp_path / "models" / "a", [list(b"abcdefgh")])
    permutation_llama(tmp_path / "models" / "b", [list(b"hgfedcba")])
    return Daemon(tmp_path, config={"model": {"path": str(a)}, "reload": {"allowed_dirs": [str(tmp_path / "models")]}})


def test_weights_are_reloaded_while_it_runs(daemon_on_a: Daemon, tmp_path: Path) -> None:
    with daemon_on_a.start() as daemon:
        assert daemon.text("a", max_tokens=4) == "bcde"
        answer = daemon.admin("POST", "/v1/reload", {"path": str(tmp_path / "models" / "b"), "version": "b"}, timeout=60)
        assert answer.status_code == 200, answer.text
        daemon.wait_ready()
        assert daemon.text("h", max_tokens=4) == "gfed"
        status = daemon.status()
        assert status["weights_version"] == "b" and status["epoch"] == 2
        assert daemon.stop() == 0


def test_weights_that_cannot_be_used_change_nothing(daemon_on_a: Daemon, tmp_path: Path) -> None:
    broken = permutation_llama(tmp_path / "models" / "broken")
    shard = next(broken.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    outside = permutation_llama(tmp_path / "outside")
    with daemon_on_a.start() as daemon:
        before = {p["role"]: p["pid"] for p in daemon.status()["processes"]}
        for path, status in ((broken, 400), (outside, 403), (tmp_path / "models" / "missing", 404)):
            answer = daemon.admin("POST", "/v1/reload", {"path": str(path)})
            assert answer.status_code == status, answer.text
        assert daemon.text("a", max_tokens=4) == "bcde"
        assert {p["role"]: p["pid"] for p in daemon.status()["processes"]} == before
        assert daemon.stop() == 0


def test_weights_that_fail_to_load_are_rolled_back(tmp_path: Path) -> None:
    a = permutation_llama(tmp_path / "models" / "a", [list(b"abcdefgh")])
    b = permutation_llama(tmp_path / "models" / "b", [list(b"hgfedcba")])
    with Daemon(
        tmp_path, config={"model": {"path": str(a)}, "reload": {"allowed_dirs": [str(tmp_path / "models")]}}, failpoints=f"loader.shard({b})=raise"
    ).start() as daemon:
        answer = daemon.admin("POST", "/v1/reload", {"path": str(b), "version": "b"}, timeout=60)
        assert answer.status_code >= 400
        wait_for("an operation that was rolled back", lambda: daemon.admin("GET", "/v1/operations").json()["operations"][-1]["state"] == "rolled_back", 20)
        daemon.wait_ready()
        assert daemon.text("a", max_tokens=4) == "bcde"
        assert daemon.stop() == 0
