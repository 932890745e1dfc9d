"""Vectors of the whole daemon: those of transformers, for every pooling, while others generate."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest

from tests.daemon import SLOW, Brake, Daemon, wait_for
from tests.models import random_llama

TEXTS = ["The quick brown fox", "jumps", "over the lazy dog. " * 20, "\u4e16\u754c"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_llama(tmp_path_factory.mktemp("model") / "tiny", context=512)


@pytest.fixture(scope="module", params=["auto", "mean"])
def daemon(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    config = {
        "model": {"path": str(model), "dtype": "float32", "pooling": request.param},
        "scheduler": {"chunked_prefill_size": 32},
        "memory": {"max_running_requests": 4, "max_total_tokens": 2048},
    }
    with Daemon(tmp_path_factory.mktemp("daemon"), config=config).start() as started:
        yield started


def reference(model: Path, ids: list[int], pooling: str) -> npt.NDArray[np.float64]:
    """By transformers, of length 1."""
    import torch
    from transformers import AutoModel

    loaded = AutoModel.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode():
        states = loaded(torch.tensor([ids])).last_hidden_state[0].double().numpy()
    vector: npt.NDArray[np.float64] = states.mean(0) if pooling == "mean" else states[-1]
    return vector / np.linalg.norm(vector)


def vectors(daemon: Daemon, given: Any, **more: Any) -> npt.NDArray[np.float64]:
    answer = httpx.post(daemon.url + "/v1/embeddings", json={"input": given, **more}, timeout=60 * SLOW)
    assert answer.status_code == 200, answer.text
    return np.array([entry["embedding"] for entry in answer.json()["data"]])


def test_vectors_are_those_of_transformers_while_others_generate(daemon: Daemon, model: Path) -> None:
    pooling = "mean" if '"pooling": "mean"' in daemon.config_path.read_text() else "last"
    streams = [threading.Thread(target=lambda: list(daemon.stream("abc", max_tokens=60, ignore_eos=True))) for _ in range(3)]
    for stream in streams:
        stream.start()
    found = vectors(daemon, TEXTS)
    for stream in streams:
        stream.join(60 * SLOW)
    for text, vector in zip(TEXTS, found, strict=True):
        np.testing.assert_allclose(vector, reference(model, list(text.encode()), pooling), atol=1e-4)
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)
    again = vectors(daemon, [list(text.encode()) for text in TEXTS])
    np.testing.assert_allclose(again, found, atol=1e-5)


def test_fewer_dimensions_are_the_first_ones_of_length_one(daemon: Daemon) -> None:
    (whole,), (cut,) = vectors(daemon, "hello"), vectors(daemon, "hello", dimensions=16)
    assert cut.shape == (16,)
    np.testing.assert_allclose(cut, whole[:16] / np.linalg.norm(whole[:16]), atol=1e-5)
    answer = httpx.post(daemon.url + "/v1/embeddings", json={"input": "x", "dimensions": 65}, timeout=20 * SLOW)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "dimensions")


def test_nothing_is_left_behind(daemon: Daemon) -> None:
    vectors(daemon, ["ab", "cde"])
    wait_for("it is counted", lambda: daemon.metric('llmd_requests_total{endpoint="/v1/embeddings",outcome="ok"}') >= 1, 20)
    wait_for("nothing runs", lambda: daemon.requests() == (0, 0), 20)
    assert daemon.admin("POST", "/v1/flush", {}).status_code == 200
    wait_for("no page is in use", lambda: daemon.status()["kv"]["pages_free"] == daemon.status()["kv"]["pages_total"], 20)


def test_a_text_is_embedded_although_the_engine_dies_over_it(tmp_path: Path) -> None:
    config = {"model": {"path": "dummy"}, "scheduler": {"chunked_prefill_size": 16}}
    brake, text = Brake(tmp_path), "sixteen letters. " * 256
    with Daemon(tmp_path, config=config, failpoints=brake.steps).start() as daemon:
        found: list[npt.NDArray[np.float64]] = []
        asking = threading.Thread(target=lambda: found.append(vectors(daemon, text)))
        asking.start()
        wait_for("it runs", lambda: daemon.requests()[0] == 1, 20)
        scheduler = daemon.child("scheduler")
        assert scheduler is not None
        scheduler.kill()
        brake.release()
        asking.join(60 * SLOW)
        assert [len(vector) for vector in found] == [1]
        np.testing.assert_allclose(found[0], vectors(daemon, text))
