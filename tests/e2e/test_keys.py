"""A daemon with API keys: what clients, admins and scripts of SGLang may do, and that no key gets anywhere it should not be."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.daemon import SLOW, Brake, Daemon, wait_for

USER, ADMIN = "sk-user-1f6cc7", "sk-admin-b0a41d"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("daemon")
    write(path / "keys", f"user:sha256:{hashlib.sha256(USER.encode()).hexdigest()}\n")
    write(path / "admin", f"{ADMIN}\n")
    return path


@pytest.fixture(scope="module")
def daemon(directory: Path) -> Iterator[Daemon]:
    http = {"api_keys_file": str(directory / "keys"), "admin_key_file": str(directory / "admin"), "host": "0.0.0.0"}
    config = {"model": {"path": "dummy"}, "http": http, "observability": {"log_level": "debug"}}
    with Daemon(directory, config=config, failpoints=Brake(directory).steps).start() as started:
        yield started


def write(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o600)


def post(daemon: Daemon, path: str, key: str | None = None, **body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.post(daemon.url + path, json=body, headers=headers, timeout=30 * SLOW)


def test_only_who_has_a_key_is_served(daemon: Daemon) -> None:
    assert post(daemon, "/v1/completions", prompt="a").status_code == 401
    assert post(daemon, "/v1/completions", USER, prompt="a", max_tokens=2).status_code == 200
    with openai.OpenAI(base_url=daemon.url + "/v1", api_key=USER, max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["dummy"]
    with openai.OpenAI(base_url=daemon.url + "/v1", api_key="sk-wrong", max_retries=0) as client, pytest.raises(openai.AuthenticationError):
        client.models.list()
    assert httpx.get(daemon.url + "/readyz", timeout=10 * SLOW).status_code == 200


def test_scripts_of_sglang_find_the_administrative_verbs(daemon: Daemon) -> None:
    assert post(daemon, "/flush_cache").status_code == 401
    assert post(daemon, "/flush_cache", USER).status_code == 403
    answer = httpx.post(daemon.url + "/flush_cache?timeout=10", headers={"Authorization": f"Bearer {ADMIN}"}, timeout=30 * SLOW)
    assert answer.status_code == 200, answer.text
    assert answer.json()["success"] is True
    line = json.loads((daemon.directory / "state" / "audit.jsonl").read_text().splitlines()[-1])
    assert line["verb"] == "flush" and "/flush_cache" in line["reason"]
    assert (line["key"], line["address"], line["uid"]) == ("admin", "127.0.0.1", None), "who asked, not the frontend that passed it on"
    assert httpx.get(daemon.url + "/flush_cache", headers={"Authorization": f"Bearer {USER}"}, timeout=30 * SLOW).status_code == 403
    assert httpx.head(daemon.url + "/flush_cache", headers={"Authorization": f"Bearer {ADMIN}"}, timeout=30 * SLOW).status_code == 405
    answer = httpx.get(daemon.url + "/flush_cache", headers={"Authorization": f"Bearer {ADMIN}"}, timeout=30 * SLOW)
    assert answer.status_code == 200 and answer.json()["operation"]["verb"] == "flush", answer.text
    for path in ("/pause_generation", "/continue_generation", "/load_lora_adapter", "/unload_lora_adapter"):
        assert post(daemon, path, USER).status_code == 403
        answer = post(daemon, path, ADMIN)
        assert answer.status_code == 501 and "not built" in answer.json()["error"]["message"]
    missing = post(daemon, "/abort_request", ADMIN)
    assert (missing.status_code, missing.json()["error"]["param"]) == (400, "rid")
    outside = post(daemon, "/update_weights_from_disk", ADMIN, model_path="/etc")
    assert outside.status_code >= 400
    assert outside.json()["error"]["message"]


def test_a_running_request_is_aborted_by_the_name_that_its_client_gave(daemon: Daemon) -> None:
    body = {"text": "abc", "rid": "named", "stream": True, "sampling_params": {"max_new_tokens": 8000, "ignore_eos": True}}
    with httpx.stream("POST", daemon.url + "/generate", json=body, headers={"Authorization": f"Bearer {USER}"}, timeout=60) as response:
        lines = (line for line in response.iter_lines() if line)
        assert next(lines).startswith("data: ")
        assert post(daemon, "/abort_request", ADMIN, rid="named").status_code == 200
        *_, error, done = lines
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "aborted"
    assert done == "data: [DONE]"


def test_a_key_that_is_taken_out_of_the_file_opens_nothing_any_more(daemon: Daemon, directory: Path) -> None:
    write(directory / "keys", "other:sk-other-77\n")
    try:
        wait_for("the key is not known any more", lambda: post(daemon, "/v1/tokenize", USER, prompt="a").status_code == 401, 20)
        assert post(daemon, "/v1/tokenize", "sk-other-77", prompt="a").status_code == 200
    finally:
        write(directory / "keys", f"user:sha256:{hashlib.sha256(USER.encode()).hexdigest()}\n")
    wait_for("the key is known again", lambda: post(daemon, "/v1/tokenize", USER, prompt="a").status_code == 200, 20)


def test_no_key_and_no_prompt_is_in_any_log_metric_status_or_command_line(daemon: Daemon) -> None:
    sentinel = "zebra-crossing-4711"
    post(daemon, "/v1/completions", USER, prompt=sentinel, max_tokens=2)
    post(daemon, "/v1/completions", USER, prompt=sentinel, max_tokens=-1, stop=[sentinel])
    post(daemon, "/v1/chat/completions", USER, messages=[{"role": sentinel, "content": sentinel}], stop=sentinel)
    post(daemon, "/generate", USER, text=sentinel, sampling_params={"stop": sentinel, "regex": sentinel})
    post(daemon, "/v1/embeddings", USER, input=[sentinel])
    post(daemon, "/v1/completions", "sk-" + sentinel, prompt=sentinel)
    texts = [daemon.log_text(), httpx.get(daemon.url + "/metrics", timeout=10 * SLOW).text, json.dumps(daemon.status())]
    texts += [daemon.admin("GET", path).text for path in ("/v1/config", "/v1/requests", "/v1/processes")]
    texts += [file.read_text(errors="replace") for name in ("log", "state") for file in (daemon.directory / name).rglob("*") if file.is_file()]
    texts += [" ".join(child.cmdline()) for child in daemon.children()]
    texts += [file.read_bytes().decode("latin-1") for file in daemon.run_dir.rglob("*") if file.is_file()]
    for secret in (USER, ADMIN, sentinel, hashlib.sha256(USER.encode()).hexdigest()):
        assert not any(secret in text for text in texts)
