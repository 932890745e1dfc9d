"""SGLang's load generator, `sglang.bench_serving`: itself where it is installed, and its requests word for word everywhere."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.daemon import SLOW, Daemon
from tests.models import random_llama

INSTALLED = importlib.util.find_spec("sglang") is not None
PROMPT = "a prompt of the load generator"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    directory = tmp_path_factory.mktemp("daemon")
    model = random_llama(directory / "tiny", context=512)
    key = directory / "admin"
    key.write_text("sk-bench\n")
    key.chmod(0o600)
    config = {"model": {"path": str(model)}, "memory": {"max_running_requests": 8, "max_total_tokens": 4096}, "http": {"admin_key_file": str(key)}}
    with Daemon(directory, config=config).start() as started:
        yield started


def lines(daemon: Daemon, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """It reads line by line, takes off `data: ` and stops at nothing but the end of the body."""
    found = []
    with httpx.stream("POST", daemon.url + path, json=body, timeout=60) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            chunk = line.strip().removeprefix("data: ")
            if chunk and chunk != "[DONE]":
                found.append(json.loads(chunk))
    return found


@pytest.mark.parametrize("prompt", [{"text": PROMPT}, {"input_ids": list(PROMPT.encode())}])
def test_backend_sglang(daemon: Daemon, prompt: dict[str, Any]) -> None:
    body = {
        **prompt,
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True},
        "stream": True,
        "lora_path": None,
        "return_logprob": False,
        "return_routed_experts": False,
        "logprob_start_len": -1,
    }
    found = lines(daemon, "/generate", body)
    counts = [event["meta_info"]["completion_tokens"] for event in found if event.get("text")]
    assert counts == sorted(counts)
    assert counts[-1] == 12
    assert {event["meta_info"]["prompt_tokens"] for event in found} == {len(PROMPT)}
    assert found[-1]["meta_info"].get("spec_accept_length") is None
    body["stream"] = False
    whole = httpx.post(daemon.url + "/generate", json=body, timeout=60)
    assert whole.json()["text"] == found[-1]["text"]
    with_logprobs = lines(daemon, "/generate", {**body, "stream": True, "return_logprob": True, "top_logprobs_num": 2})
    assert len(with_logprobs[-1]["meta_info"]["output_top_logprobs"]) == 12


def test_backends_vllm_and_openai(daemon: Daemon) -> None:
    model = httpx.get(daemon.url + "/v1/models", timeout=20 * SLOW).json()["data"][0]["id"]
    body = {"model": model, "prompt": PROMPT, "best_of": 1, "max_tokens": 12, "stream": True, "temperature": 0.0, "ignore_eos": True}
    found = lines(daemon, "/v1/completions", body)
    text = "".join(chunk["choices"][0]["text"] for chunk in found)
    whole = httpx.post(daemon.url + "/v1/completions", json={**body, "stream": False}, timeout=60).json()
    assert text == whole["choices"][0]["text"]
    assert whole["usage"]["completion_tokens"] == 12


def test_backend_openai_chat(daemon: Daemon) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
    for content in (messages, [{"role": "user", "content": PROMPT}]):
        body = {"model": "tiny", "messages": content, "max_completion_tokens": 12, "stream": True, "temperature": 0.0, "ignore_eos": True, "lora_path": None}
        body["stream_options"] = {"include_usage": True}
        found = lines(daemon, "/v1/chat/completions", {name: value for name, value in body.items() if name != "model"})
        assert found[-1]["usage"]["completion_tokens"] == 12
        assert found[0]["choices"][0]["delta"]["role"] == "assistant"


def test_backend_openai_embedding(daemon: Daemon) -> None:
    answer = httpx.post(
        daemon.url + "/v1/embeddings", json={"input": PROMPT, "model": httpx.get(daemon.url + "/v1/models").json()["data"][0]["id"]}, timeout=60
    )
    assert answer.status_code == 200
    assert len(answer.json()["data"][0]["embedding"]) == 64


def test_what_it_asks_before_and_after(daemon: Daemon) -> None:
    info = httpx.get(daemon.url + "/model_info", timeout=20 * SLOW).json()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(info.get("tokenizer_path") or info["model_path"])
    asked = httpx.post(daemon.url + "/tokenize", json={"prompt": PROMPT}, timeout=20 * SLOW).json()
    assert tokenizer(PROMPT, add_special_tokens=False)["input_ids"] == asked["tokens"]
    server = httpx.get(daemon.url + "/server_info", timeout=20 * SLOW).json()
    assert "decode" not in server and server["internal_states"][0].get("avg_spec_accept_length") is None
    flushed = httpx.post(daemon.url + "/flush_cache", params={"timeout": 60.0}, headers={"Authorization": "Bearer sk-bench"}, timeout=60)
    assert flushed.status_code == 200


@pytest.mark.skipif(not INSTALLED, reason="sglang is not installed")
@pytest.mark.parametrize("backend", ["sglang", "vllm", "sglang-oai", "sglang-oai-chat"])
def test_the_generator_itself(daemon: Daemon, tmp_path: Path, backend: str) -> None:
    argv = [sys.executable, "-m", "sglang.bench_serving", "--backend", backend, "--base-url", daemon.url, "--dataset-name", "random-ids", "--num-prompts", "8"]
    argv += ["--random-input-len", "16", "--random-output-len", "8", "--disable-tqdm", "--output-file", str(tmp_path / "result.jsonl")]
    argv += ["--tokenizer", str(daemon.directory / "tiny")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    result = json.loads((tmp_path / "result.jsonl").read_text().splitlines()[-1])
    assert result["completed"] == 8
