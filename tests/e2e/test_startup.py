"""How starts fail and succeed with real files: statuses, messages that name the fault and settings that work, and what is told meanwhile."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from tests.daemon import SLOW, Brake, Daemon, wait_for, whole_lines
from tests.models import permutation_llama, random_llama, read_checkpoint, write_checkpoint, write_safetensors
from tests.starts import Start, fails

DUMMY = {"model": {"path": "dummy"}}


def model(path: Path, **more: Any) -> dict[str, Any]:
    return {"model": {"path": str(path), "threads": 1, **more}}


# ------------------------------------------------------------ statuses


def missing_directory(tmp: Path) -> dict[str, Any]:
    return model(tmp / "nothing")


def cut_shard(tmp: Path) -> dict[str, Any]:
    path = random_llama(tmp / "m")
    os.truncate(path / "model.safetensors", 5000)
    return model(path)


def missing_shard(tmp: Path) -> dict[str, Any]:
    path = random_llama(tmp / "m", shards=2)
    (path / "model-00002-of-00002.safetensors").unlink()
    return model(path)


def index_names_an_absent_tensor(tmp: Path) -> dict[str, Any]:
    path = random_llama(tmp / "m", shards=2)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.layers.9.mlp.up_proj.weight"] = "model-00001-of-00002.safetensors"
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return model(path)


def parameter_without_file(tmp: Path) -> dict[str, Any]:
    config, tensors = read_checkpoint(random_llama(tmp / "whole"))
    del tensors["model.layers.1.mlp.up_proj.weight"]
    return model(write_checkpoint(tmp / "m", config, tensors))


def trailing_bytes(tmp: Path) -> dict[str, Any]:
    path = random_llama(tmp / "m")
    with (path / "model.safetensors").open("ab") as file:
        file.write(b"\0" * 100)
    return model(path)


def lfs_pointer(tmp: Path) -> dict[str, Any]:
    path = random_llama(tmp / "m")
    (path / "model.safetensors").write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n")
    return model(path)


def lfs_pointer_of_the_tokenizer(tmp: Path) -> dict[str, Any]:
    path = random_llama(tmp / "m")
    (path / "tokenizer.json").write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n")
    return model(path)


def not_a_number(tmp: Path) -> dict[str, Any]:
    return model(damaged(tmp / "m"), verify_weights=True)


def damaged(path: Path) -> Path:
    _, tensors = read_checkpoint(random_llama(path))
    tensors["model.layers.1.mlp.down_proj.weight"][3, 4] = np.nan
    write_safetensors(path / "model.safetensors", tensors)
    return path


def absent_template(tmp: Path) -> dict[str, Any]:
    return model(random_llama(tmp / "m"), chat_template=str(tmp / "nothing.jinja"))


def broken_template(tmp: Path) -> dict[str, Any]:
    (tmp / "bad.jinja").write_text("{% for m in messages %}\n{{ m.content }}\n{% endfor\n")
    return model(random_llama(tmp / "m"), chat_template=str(tmp / "bad.jinja"))


NEVER = [
    (missing_directory, "nothing: no such file"),
    (cut_shard, "truncated"),
    (missing_shard, "model-00002-of-00002.safetensors"),
    (index_names_an_absent_tensor, "model.layers.9.mlp.up_proj.weight"),
    (parameter_without_file, "model.layers.1.mlp.up_proj.weight"),
    (trailing_bytes, "belong to no tensor"),
    (lfs_pointer, "Git LFS pointer"),
    (lfs_pointer_of_the_tokenizer, "Git LFS pointer"),
    (not_a_number, "'model.layers.1.mlp.down_proj.weight' holds NaN or Inf"),
    (absent_template, "nothing.jinja: chat template cannot be read: No such file"),
    (broken_template, "bad.jinja:3: chat template"),
]


@pytest.mark.parametrize(("make", "text"), NEVER, ids=[make.__name__ for make, _ in NEVER])
def test_files_that_can_never_work_are_78_and_the_last_line_names_them(tmp_path: Path, make: Any, text: str) -> None:
    ended = fails(tmp_path, make(tmp_path))
    assert ended.status == 78, ended.log[-3000:]
    assert text in ended.last_line and "status 78" in ended.last_line
    if make is not not_a_number:  # which only a full read can find
        assert ended.seconds < 5 * SLOW


def test_every_other_status(tmp_path: Path) -> None:
    def directory(name: str) -> Path:
        (tmp_path / name).mkdir()
        return tmp_path / name

    assert fails(directory("flag"), DUMMY, arguments=("--no-such-flag",)).status == 2
    assert fails(directory("failpoints"), DUMMY, env={"LLMD_FAILPOINTS": "a=raise"}).status == 2
    bad = fails(directory("yaml"), {"memory": {"max_runing_requests": 4}, "http": {"prot": 1}}, failpoints="")
    assert bad.status == 78 and "llmd.yaml:1:" in bad.log and "max_running_requests" in bad.log and "'port'" in bad.log and bad.seconds < 5 * SLOW
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        busy = fails(directory("port"), {**DUMMY, "http": {"port": port}}, failpoints="")
    assert busy.status == 71 and f"127.0.0.1:{port}" in busy.last_line and busy.seconds < 5 * SLOW
    spent = directory("spent")
    with Daemon(spent, config={**DUMMY, "supervision": {"restart": {"max": 0}}}, failpoints="").start() as daemon:
        os.kill(daemon.pid("scheduler"), signal.SIGKILL)
        assert daemon.wait_exit(10) == 70
    with Daemon(directory("stop"), config=DUMMY, failpoints="").start() as daemon:
        assert daemon.stop() == 0


# ------------------------------------------------------------ a child that dies while it starts


@pytest.mark.parametrize("role", ["scheduler", "detokenizer", "frontend"])
def test_the_death_of_any_process_ends_the_start_at_once(tmp_path: Path, role: str) -> None:
    with Start(tmp_path, DUMMY, failpoints=f"{role}.start=hang" if role != "frontend" else "frontend.http=hang") as start:
        start.until(lambda: "failpoint " in start.log())
        victim = start.pid_of(f"llmd: {role}", f"llmd.worker {role}")
        assert victim, "it runs"
        killed = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        ended = start.end(10)
        assert time.monotonic() - killed < 5 * SLOW
        assert ended.status == 70 and f"{role}-0" in ended.last_line and "SIGKILL" in ended.last_line


@pytest.mark.parametrize(("action", "status"), [("raise", 70), ("exit(71)", 71)])
def test_a_control_that_cannot_start_ends_the_start(tmp_path: Path, action: str, status: int) -> None:
    ended = fails(tmp_path, DUMMY, failpoints=f"control.start={action}")
    assert ended.status == status and "control-0" in ended.last_line
    assert ended.seconds < 6 * SLOW and ended.log.count("control-0 (pid") == 1


# ------------------------------------------------------------ context and memory


def suggestions(text: str) -> list[dict[str, dict[str, int]]]:
    return [{section: {key: int(value)}} for section, key, value in re.findall(r"(memory|model)\.(max_total_tokens|context_length): (\d+)", text)]


def test_a_context_beyond_the_kv_pool_is_refused_with_two_settings_that_work(tmp_path: Path) -> None:
    path = random_llama(tmp_path / "m", context=8192)
    config = {**model(path, context_length=8192), "memory": {"max_total_tokens": 1000}}
    ended = fails(tmp_path, config)
    assert ended.status == 78 and ended.seconds < 5 * SLOW
    assert "8192" in ended.last_line and "992" in ended.last_line
    found = suggestions(ended.last_line)
    assert len(found) == 2
    for number, change in enumerate(found):
        (directory := tmp_path / str(number)).mkdir()
        mixed = {section: {**config.get(section, {}), **change.get(section, {})} for section in ("model", "memory")}
        with Daemon(directory, config=mixed).start() as daemon:
            assert daemon.complete().status_code == 200
            assert daemon.stop() == 0


def test_a_clamped_context_is_warned_of_and_shown(tmp_path: Path) -> None:
    path = random_llama(tmp_path / "m", context=8192)
    with Daemon(tmp_path, config={**model(path), "memory": {"max_total_tokens": 1000, "clamp_context": True}}).start() as daemon:
        wait_for("it is warned of", lambda: daemon.has_logged('"warning"', "clamped to 992"), 10)
        assert httpx.get(daemon.url + "/v1/models").json()["data"][0]["max_model_len"] == 992
        assert daemon.stop() == 0


def test_a_pool_that_is_preallocated_is_there_when_llmd_is_ready(tmp_path: Path) -> None:
    memory = {"max_total_tokens": 1 << 19, "preallocate": True}
    with Daemon(tmp_path, config={**model(random_llama(tmp_path / "m")), "memory": memory}).start() as daemon:
        scheduler = next(process for process in daemon.status()["processes"] if process["role"] == "scheduler")
        assert psutil.Process(scheduler["pid"]).memory_info().rss > daemon.admin("GET", "/v1/kv").json()["bytes_total"] >= 1 << 27
        assert daemon.stop() == 0


def test_memory_of_the_pool_is_taken_ahead_of_its_use_and_does_not_change_answers(tmp_path: Path) -> None:
    memory = {"max_total_tokens": 1 << 22}
    with Daemon(tmp_path, config={**model(random_llama(tmp_path / "m")), "memory": memory}).start() as daemon:
        scheduler = next(process for process in daemon.status()["processes"] if process["role"] == "scheduler")
        process = psutil.Process(scheduler["pid"])
        assert daemon.admin("GET", "/v1/kv").json()["bytes_total"] >= 1 << 30
        early = daemon.complete(prompt="a b c d e f g h", max_tokens=24).json()["choices"][0]["text"]
        wait_for("half a GiB", lambda: process.memory_info().rss > 512 << 20, 20)
        assert process.memory_info().rss < 900 << 20
        assert daemon.complete(prompt="a b c d e f g h", max_tokens=24).json()["choices"][0]["text"] == early
        assert daemon.stop() == 0


# ------------------------------------------------------------ paths


def test_long_temporary_directories_and_names_do_no_harm(tmp_path: Path) -> None:
    long = tmp_path / ("t" * 150)
    long.mkdir()
    env = {"TMPDIR": str(long), "XDG_RUNTIME_DIR": str(tmp_path / "nothing")}
    with Daemon(tmp_path, config={"model": {"path": "dummy", "served_name": "n" * 200}}, failpoints="", env=env).start() as daemon:
        assert daemon.complete().json()["model"] == "n" * 200
        assert daemon.stop() == 0
    ended = fails(tmp_path, {**DUMMY, "run_dir": str(tmp_path / ("r" * 150))}, failpoints="")
    assert ended.status == 71 and ended.seconds < 5 * SLOW
    assert "107" in ended.last_line and "r" * 150 in ended.last_line and "zmq" not in ended.log


def test_a_cache_that_cannot_be_written_is_warned_of_and_a_local_model_served(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with Daemon(tmp_path, config={**model(random_llama(tmp_path / "m")), "cache_dir": str(tmp_path / "file" / "cache")}).start() as daemon:
        assert daemon.complete().status_code == 200
        wait_for("it is warned of", lambda: daemon.has_logged('"warning"', "set cache_dir"), 10)
        assert daemon.stop() == 0
    assert not (tmp_path / "run" / "private" / "small").exists()


# ------------------------------------------------------------ chat template


def test_without_a_template_text_is_served_and_chat_is_refused(tmp_path: Path) -> None:
    path = random_llama(tmp_path / "m", chat=False)
    with Daemon(tmp_path, config=model(path)).start() as daemon:
        wait_for("it is warned of", lambda: daemon.has_logged('"warning"', "chat template"), 10)
        assert daemon.complete().status_code == 200
        refused = daemon.chat()
        assert refused.status_code == 400
        assert (refused.json()["error"]["param"], refused.json()["error"]["code"]) == ("messages", "no_chat_template")
        sent = daemon.chat(chat_template="{{ 7 * 191 }}")
        assert sent.status_code == 400 and "1337" not in sent.text
        assert daemon.stop() == 0


def test_a_template_of_the_operator_is_used_and_a_clients_is_not(tmp_path: Path) -> None:
    path = permutation_llama(tmp_path / "m", chat=False)
    (tmp_path / "good.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with Daemon(tmp_path, config=model(path, chat_template=str(tmp_path / "good.jinja"))).start() as daemon:
        assert daemon.chat("a").json()["choices"][0]["message"]["content"] == "bcdefghi"
        sent = daemon.chat("a", chat_template="{{ 7 * 191 }}")
        assert sent.status_code == 400 or sent.json()["choices"][0]["message"]["content"] == "bcdefghi"
        assert daemon.stop() == 0


# ------------------------------------------------------------ weights that are not numbers


def test_weights_that_were_not_verified_cost_requests_and_not_the_server(tmp_path: Path) -> None:
    with Daemon(tmp_path, config=model(damaged(tmp_path / "m"))).start() as daemon:
        pids = {p.pid for p in daemon.children()}
        for _ in range(3):
            failed = daemon.complete()
            assert failed.status_code == 500 and failed.json()["error"]["code"] == "non_finite_logits"
        wait_for("the errors are counted", lambda: daemon.metric('llmd_requests_total{endpoint="/v1/completions",outcome="error"}') == 3, 5)
        assert daemon.status_code("/readyz") == 200 and {p.pid for p in daemon.children()} == pids
        assert daemon.stop() == 0


# ------------------------------------------------------------ what systemd is told


class Notified:
    """A notify socket and all that came."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self.socket.settimeout(0.2)
        self.words: list[str] = []
        self.url = ""
        self.ready_was_true: int | None = None
        self._ended = False
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        while not self._ended:
            try:
                word = self.socket.recv(4096).decode()
            except TimeoutError:
                continue
            self.words.append(word)
            if word == "READY=1" and self.ready_was_true is None and self.url:
                self.ready_was_true = httpx.post(self.url + "/v1/completions", json={"prompt": "a", "max_tokens": 1}, timeout=30 * SLOW).status_code

    def close(self) -> None:
        self._ended = True
        self._thread.join()
        self.socket.close()


def test_systemd_hears_of_the_start_a_reload_and_the_stop(tmp_path: Path) -> None:
    address = f"@llmd-test-{os.getpid()}-{tmp_path.name}"
    notified = Notified(address)
    try:
        first, second = permutation_llama(tmp_path / "a"), permutation_llama(tmp_path / "b")
        config = {**model(first), "reload": {"allowed_dirs": [str(tmp_path)]}}
        load = Brake(tmp_path)
        with Daemon(tmp_path, config=config, failpoints=load.holds("scheduler.weights"), env={"NOTIFY_SOCKET": address}).start(ready=False) as daemon:
            notified.url = daemon.url
            for word in ("EXTEND_TIMEOUT_USEC=", "STATUS=loading: scheduler-0: weights"):
                wait_for(f"systemd hears {word}", lambda word=word: any(heard.startswith(word) for heard in notified.words), 30)  # type: ignore[misc]
            assert "READY=1" not in notified.words
            load.release()
            daemon.wait_ready()
            wait_for("systemd hears that it is ready", lambda: notified.ready_was_true, 30)
            assert notified.ready_was_true == 200
            assert not any("NOTIFY_SOCKET" in child.environ() for child in daemon.children())
            count = len(notified.words)
            assert daemon.admin("POST", "/v1/reload", {"path": str(second)}, timeout=60).status_code == 200
            wait_for("the reload is over", lambda: "READY=1" in notified.words[count:], 30)
            assert daemon.stop() == 0
        wait_for("systemd has heard of the stop", lambda: "STOPPING=1" in notified.words, 30)
        after = [word for word in notified.words[count:] if not word.startswith("STATUS=")]
        assert re.fullmatch(r"RELOADING=1\nMONOTONIC_USEC=\d+", after[0])
        assert after[1:3] == ["READY=1", "STOPPING=1"] and notified.words.count("READY=1") == 2
    finally:
        notified.close()


@pytest.mark.parametrize("kind", ["empty", "missing", "long", "file", "word"])
def test_an_odd_notify_socket_is_one_warning(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").write_text("")
    address = {"empty": "", "missing": f"{tmp_path}/no", "long": "/" + "x" * 200, "file": f"{tmp_path}/file", "word": "odd"}[kind]
    with Daemon(tmp_path, config=DUMMY, failpoints="", env={"NOTIFY_SOCKET": address}).start() as daemon:
        assert daemon.complete().status_code == 200
        warnings = [line for line in daemon.log_text().splitlines() if "systemd cannot be notified" in line]
        assert len(warnings) == (0 if kind == "empty" else 1)
        assert daemon.stop() == 0


# ------------------------------------------------------------ logs


def test_every_line_of_every_process_is_one_json_object(tmp_path: Path) -> None:
    with Daemon(tmp_path, config=DUMMY | {"observability": {"log_format": "json", "log_level": "debug"}}, failpoints="").start() as daemon:
        ids = [f"id-{number}" for number in range(48)] + ['quo"te', "x" * 128]
        answers: list[httpx.Response] = []

        def ask(name: str | bytes) -> None:
            headers = {"X-Request-Id": name} if isinstance(name, str) else [(b"X-Request-Id", name)]
            answers.append(httpx.post(daemon.url + "/v1/completions", json={"prompt": "a secret prompt", "max_tokens": 2}, headers=headers, timeout=60 * SLOW))

        threads = [threading.Thread(target=ask, args=(name,)) for name in ids]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60 * SLOW)
        assert [answer.status_code for answer in answers] == [200] * 50
        assert sorted(answer.headers["x-request-id"] for answer in answers) == sorted(ids)
        for odd in ("y" * 10_000, "naïve".encode(), b"a\tb"):
            ask(odd)
            assert answers[-1].status_code == 400 and answers[-1].json()["error"]["param"] == "X-Request-Id"
        for role in ("control", "frontend", "detokenizer", "scheduler"):
            os.kill(daemon.pid(role), signal.SIGUSR1)  # stacks, written by C code
        wait_for("the stacks are in the log", lambda: daemon.log_text().count("Current thread") == 4, 10)
        logged = wait_for("the access log is written", lambda: len(access := whole_lines(tmp_path / "log/access.log")) >= 53 and access, 5)
        assert daemon.stop() == 0
    assert {json.loads(line).get("request_id") for line in logged} >= set(ids)
    files = sorted(path.name for path in (tmp_path / "log").iterdir())
    assert files == ["access.log", "control-0.log", "detokenizer-0.log", "frontend-0.log", "scheduler-0.log", "supervisor.log"]
    text = daemon.log_text() + "".join((tmp_path / "log" / name).read_text() for name in files)
    for line in text.splitlines():
        if line and not line.startswith("  "):  # the banner on stdout
            assert {"ts", "level", "role", "pid", "msg"} <= json.loads(line).keys(), line
    assert "secret prompt" not in text
