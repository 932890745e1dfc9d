"""What a frontend answers while the daemon loads, drains, loses its engine, and ends."""

from __future__ import annotations

import http.client
import json
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import psutil
import pytest

from llmd.wire.messages import Detokenizer404, Publish

from .conftest import World, picture, wait_for

COMP: dict[str, Any] = {"model": "toy", "prompt": "hello", "max_tokens": 400}


def comp(world: World, **changes: Any) -> httpx.Response:
    return httpx.post(world.url + "/v1/completions", json={**COMP, **changes}, timeout=15)


def error(answer: httpx.Response) -> dict[str, Any]:
    found: dict[str, Any] = answer.json()["error"]
    return found


class Background(threading.Thread):
    """A request in the background; `begun` is set with the first byte of its answer's body."""

    def __init__(self, world: World, **changes: Any) -> None:
        super().__init__(daemon=True)
        self._world, self._changes = world, changes
        self._status = 0
        self._headers = httpx.Headers()
        self._body = b""
        self.begun = threading.Event()
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", self._world.url + "/v1/completions", json={**COMP, **self._changes}, timeout=15) as answer:
            for piece in answer.iter_raw():
                self._body += piece
                self.begun.set()
            self._status, self._headers = answer.status_code, answer.headers

    def result(self) -> httpx.Response:
        self.join(10)
        assert self._status, "the request hangs"
        return httpx.Response(self._status, headers=self._headers, content=self._body)

    @property
    def events(self) -> list[str]:
        return [line[6:] for line in self.result().text.splitlines() if line.startswith("data: ")]


def running(world: World, n: int = 1) -> None:
    """`n` requests have reached the engine."""
    wait_for(lambda: len(world.engine.requests) == n, 5)


def slow(world: World, tokens: int = 400) -> None:
    world.engine.pace = 0.02
    world.engine.script = lambda request: ["x"] * tokens


# ---------------------------------------------------------------- start


def test_alive_before_control_is_there_and_loading_until_ready(make_world: Callable[..., World]) -> None:
    world = make_world()
    answer = httpx.get(world.url + "/livez", timeout=10)
    assert answer.status_code == 200
    answer = httpx.get(world.url + "/readyz")
    assert answer.status_code == 503
    assert set(answer.json()) >= {"status", "stage", "progress", "reason"}
    answer = comp(world)
    assert answer.status_code == 503
    assert error(answer)["code"] == "loading"
    assert int(answer.headers["retry-after"]) > 0
    assert httpx.get(world.url + "/metrics").status_code == 503
    assert world.control.ready.wait(10)
    world.control.publish(state="loading", stage="loading weights", progress=0.5, engine_up=False, epoch=1, detokenizer_incarnation=1)
    wait_for(lambda: httpx.get(world.url + "/readyz").json()["stage"] == "loading weights", 2)
    assert httpx.get(world.url + "/readyz").json() == {"status": "loading", "stage": "loading weights", "progress": 0.5, "reason": ""}
    assert error(comp(world))["code"] == "loading"
    assert httpx.get(world.url + "/startupz").status_code == 503
    assert httpx.get(world.url + "/v1/models").status_code == 200
    world.control.publish(state="warming", engine_up=True)
    assert world.control.command("warmup").ok
    assert httpx.get(world.url + "/readyz").status_code == 503
    world.control.publish(state="ready", stage="")
    wait_for(lambda: httpx.get(world.url + "/readyz").status_code == 200, 2)
    assert httpx.get(world.url + "/startupz").status_code == 200
    assert comp(world, max_tokens=5).json()["choices"][0]["text"] == "hello"
    wait_for(lambda: world.outcomes() == {"rejected": 2, "ok": 1, "length": 1}, 3)
    assert world.control.counter("llmd_generation_tokens_total") == 5
    assert world.control.counter("llmd_prompt_tokens_total") == 5


def test_a_restarted_frontend_waits_for_its_first_picture(make_world: Callable[..., World]) -> None:
    world = make_world(incarnation=2)
    assert world.control.ready.wait(10)
    request = Background(world, max_tokens=5)
    time.sleep(0.3)
    world.control.publish()
    assert request.result().status_code == 200


def test_metrics_and_aliases(world: World) -> None:
    text = httpx.get(world.url + "/metrics").text
    assert "llmd_state 1" in text
    assert "llmd_metrics_age_seconds" in text
    assert httpx.get(world.url + "/ping").json() == httpx.get(world.url + "/livez").json()
    assert httpx.get(world.url + "/health").status_code == 200
    assert httpx.head(world.url + "/livez").status_code == 200


def test_probes_cost_nothing_and_are_not_counted(world: World) -> None:
    for path in ("/readyz", "/livez", "/health", "/metrics") * 5:
        httpx.get(world.url + path)
    assert world.engine.requests == []
    assert httpx.get(world.url + "/health_generate").status_code == 200
    assert len(world.engine.requests) == 1
    assert world.engine.requests[0].sampling.max_new_tokens == 1
    time.sleep(0.15)
    assert world.outcomes() == {}
    assert world.control.counter("llmd_generation_tokens_total") == 0


# ---------------------------------------------------------------- loss of the engine or the detokenizer


LOSSES: list[dict[str, Any]] = [
    {"state": "recovering", "engine_up": False, "epoch": 2},
    {"epoch": 2},
    {"state": "recovering", "detokenizer_incarnation": 0},
    {"detokenizer_incarnation": 2},
]


@pytest.mark.parametrize("loss", LOSSES)
def test_requests_in_flight_end_with_an_error_not_with_silence(world: World, loss: dict[str, Any]) -> None:
    slow(world)
    whole, stream = Background(world), Background(world, stream=True)
    running(world, 2)
    assert stream.begun.wait(5)
    world.control.publish(**loss)
    answer = whole.result()
    assert answer.status_code == 503
    assert error(answer)["code"] == "engine_unavailable"
    assert answer.headers["retry-after"]
    assert stream.result().status_code == 200
    assert stream.events[-1] == "[DONE]"
    assert json.loads(stream.events[-2])["error"]["code"] == "engine_unavailable"
    assert set(json.loads(stream.events[0])["choices"][0]["text"]) == {"x"}
    wait_for(lambda: world.outcomes() == {"error": 2}, 2)
    if "epoch" not in loss:
        wait_for(lambda: len(world.engine.aborts) == 2, 2)  # the engine lives: it need not compute what nobody waits for


def test_while_the_engine_is_away_new_requests_are_told_so(world: World) -> None:
    world.control.publish(state="recovering", engine_up=False, reason="scheduler 0 died (SIGKILL)")
    wait_for(lambda: httpx.get(world.url + "/readyz").status_code == 503, 2)
    assert httpx.get(world.url + "/readyz").json()["reason"] == "scheduler 0 died (SIGKILL)"
    assert httpx.get(world.url + "/livez").status_code == 200
    answer = comp(world)
    assert (answer.status_code, error(answer)["code"]) == (503, "engine_unavailable")
    assert answer.headers["retry-after"]


def test_a_new_epoch_gets_its_requests_on_its_own_socket(world: World) -> None:
    world.new_engine(2)
    world.control.publish(state="recovering", engine_up=False, epoch=2)
    world.control.publish(state="ready", engine_up=True, epoch=2)
    wait_for(lambda: httpx.get(world.url + "/readyz").status_code == 200 and world.control.picture.epoch == 2, 2)
    wait_for(lambda: comp(world, max_tokens=5).status_code == 200, 5)
    assert {r.epoch for r in world.engine.requests} == {2}


def test_a_scheduler_that_never_takes_a_request_is_an_error_too(world: World) -> None:
    world.engine.stop()
    world.control.publish(epoch=3)
    time.sleep(0.2)
    answer = comp(world)
    assert (answer.status_code, error(answer)["code"]) == (503, "engine_unavailable")


def test_a_request_that_the_detokenizer_forgot(world: World) -> None:
    slow(world)
    stream = Background(world, stream=True)
    assert stream.begun.wait(5)
    world.engine.say(Detokenizer404(rid=world.engine.requests[0].rid, epoch=1))
    assert json.loads(stream.events[-2])["error"]["code"] == "engine_unavailable"
    assert world.engine.wait_abort().code == "engine_unavailable"


# ---------------------------------------------------------------- drain and end


@pytest.mark.parametrize("by", ["command", "picture"])
def test_draining_refuses_new_work_and_finishes_the_old(world: World, by: str) -> None:
    slow(world, 100)
    kept = http.client.HTTPConnection("127.0.0.1", int(world.url.rsplit(":", 1)[1]), timeout=10)
    kept.request("GET", "/livez")
    kept.getresponse().read()
    old = Background(world, stream=True)
    running(world)
    if by == "command":
        assert world.control.command("drain").data == {"inflight": 1}
    else:
        world.control.publish(state="draining")
        wait_for(lambda: httpx.get(world.url + "/readyz").status_code == 503, 1)
    assert httpx.get(world.url + "/readyz").json()["status"] == "draining"
    assert httpx.get(world.url + "/livez").status_code == 200
    assert httpx.get(world.url + "/metrics").status_code == 200
    answer = comp(world)
    assert (answer.status_code, error(answer)["code"]) == (503, "draining")
    assert answer.headers["connection"] == "close"
    assert answer.headers["retry-after"]
    kept.request("POST", "/v1/completions", json.dumps(COMP))
    on_kept = kept.getresponse()
    assert (on_kept.status, on_kept.getheader("connection")) == (503, "close")
    kept.close()
    assert old.events[-1] == "[DONE]"
    assert json.loads(old.events[-2])["choices"][0]["finish_reason"] == "stop"
    wait_for(lambda: world.control.beats[-1].totals.gauges["llmd_frontend_inflight"] == 0, 2)
    if by == "command":
        assert world.control.command("resume").ok
        assert comp(world, max_tokens=5).status_code == 200


def test_shutting_down_ends_every_request_with_that_error(world: World) -> None:
    slow(world)
    whole, stream = Background(world), Background(world, stream=True)
    running(world, 2)
    assert stream.begun.wait(5)
    reply = world.control.command("shutting_down")
    assert reply.ok
    assert reply.data == {"inflight": 0}
    assert (whole.result().status_code, error(whole.result())["code"]) == (503, "shutting_down")
    assert json.loads(stream.events[-2])["error"]["code"] == "shutting_down"
    assert stream.events[-1] == "[DONE]"
    assert error(comp(world))["code"] == "shutting_down"


def test_sigterm_ends_with_0_and_with_the_error_for_what_is_open(world: World) -> None:
    slow(world)
    stream = Background(world, stream=True)
    assert stream.begun.wait(5)
    start = time.monotonic()
    world.process.send_signal(signal.SIGTERM)
    assert world.process.wait(5) == 0
    assert time.monotonic() - start < 2.5
    assert json.loads(stream.events[-2])["error"]["code"] == "shutting_down"
    assert "Traceback" not in world.stderr


# ---------------------------------------------------------------- the process


def test_it_is_small_and_knows_no_torch(world: World) -> None:
    comp(world, max_tokens=5)
    process = psutil.Process(world.process.pid)
    assert process.memory_info().rss < 150 * 2**20
    assert not [m for m in process.memory_maps() if "torch" in m.path]


def test_other_commands(world: World) -> None:
    assert world.control.command("freeze").ok
    reply = world.control.command("dance")
    assert not reply.ok
    assert reply.code == "unknown_verb"


def test_a_broken_tokenizer_ends_with_78(make_world: Callable[..., World]) -> None:
    world = make_world()
    (world.dir / "small" / "tokenizer.json").write_text("{")
    world.process.kill()
    world.process.wait(5)
    world.process = world._spawn()
    assert world.process.wait(15) == 78
    assert "tokenizer.json" in world.stderr


def test_heartbeats_carry_a_living_pulse(world: World) -> None:
    time.sleep(1)
    assert all(beat.step_age_s < 0.9 for beat in world.control.beats[-5:])
    assert world.control.beats[-1].steps > 2


def test_the_access_log(world: World) -> None:
    httpx.get(world.url + "/livez")
    httpx.get(world.url + "/livezz")
    httpx.get(world.url + "/metrics")
    httpx.post(world.url + "/v1/completions", json={**COMP, "max_tokens": 5, "prompt": "SENTINEL"}, headers={"X-Request-Id": 'a "quoted" id'})
    world.control.publish(state="recovering", engine_up=False)
    wait_for(lambda: httpx.get(world.url + "/readyz").status_code == 503, 2)
    wait_for(lambda: any(line["status"] == 503 for line in world.access_lines()), 2)
    lines = world.access_lines()
    assert [(line["path"], line["status"]) for line in lines[:2]] == [("/livezz", 404), ("/v1/completions", 200)]
    assert lines[1]["request_id"] == 'a "quoted" id'
    assert (lines[1]["prompt_tokens"], lines[1]["completion_tokens"], lines[1]["outcome"]) == (8, 5, "length")
    assert all({"ts", "level", "role", "pid", "msg"} <= set(line) for line in lines)
    assert "SENTINEL" not in json.dumps(lines) + world.stderr


def test_with_an_empty_exclude_list_probes_are_logged(make_world: Callable[..., World]) -> None:
    world = make_world(access_log_exclude=()).up()
    wait_for(lambda: any(line["path"] == "/readyz" and line["status"] == 200 for line in world.access_lines()), 2)


def test_pictures_are_made_of_the_published_type() -> None:
    assert isinstance(picture(state="ready"), Publish)


# ---------------------------------------------------------------- aborts and alarms


def test_an_abort_ends_exactly_what_it_names(world: World) -> None:
    slow(world)
    streamed, whole = Background(world, stream=True), Background(world, n=2)
    running(world, 3)
    assert streamed.begun.wait(5)
    rid = next(r.rid for r in world.engine.requests if not r.rid.endswith(("-0", "-1")))
    assert world.control.command("abort", rid=rid[:-1]).data == {"aborted": []}
    assert world.control.command("abort").data == {"aborted": []}
    assert world.control.command("abort", rid=rid).data == {"aborted": [rid]}
    assert json.loads(streamed.events[-2])["error"]["code"] == "aborted" and streamed.events[-1] == "[DONE]"
    assert len(world.control.command("abort", everything=True).data["aborted"]) == 1
    answer = whole.result()
    assert answer.status_code == 409 and error(answer)["code"] == "aborted"
    wait_for(lambda: len(world.engine.aborts) == 3, 5)
    wait_for(lambda: world.outcomes().get("abort") == 2, 5)


def test_a_stalled_engine_is_not_ready_and_still_takes_requests(world: World) -> None:
    world.control.publish(stalled=True, degraded=("requests wait, none runs",))
    wait_for(lambda: httpx.get(world.url + "/readyz").status_code == 503, 5)
    assert httpx.get(world.url + "/readyz").json()["status"] == "stalled"
    assert comp(world, max_tokens=5).status_code == 200
    world.control.publish(stalled=False, degraded=())
    wait_for(lambda: httpx.get(world.url + "/readyz").status_code == 200, 5)
