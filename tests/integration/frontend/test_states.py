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

from llmd.wire.messages import AbortReq, BatchStrOutput, Detokenizer404, Publish, TextChunk
from tests.daemon import SLOW

from .conftest import World, echo, picture, wait_for

COMP: dict[str, Any] = {"model": "toy", "prompt": "hello", "max_tokens": 400}


def comp(world: World, **changes: Any) -> httpx.Response:
    return httpx.post(world.url + "/v1/completions", json={**COMP, **changes}, timeout=15 * SLOW)


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
        with httpx.stream("POST", self._world.url + "/v1/completions", json={**COMP, **self._changes}, timeout=15 * SLOW) as answer:
            for piece in answer.iter_raw():
                self._body += piece
                self.begun.set()
            self._status, self._headers = answer.status_code, answer.headers

    def result(self) -> httpx.Response:
        self.join(10 * SLOW)
        assert self._status, "the request hangs"
        return httpx.Response(self._status, headers=self._headers, content=self._body)

    @property
    def events(self) -> list[str]:
        return [line[6:] for line in self.result().text.splitlines() if line.startswith("data: ")]

    @property
    def text(self) -> str:
        """Of a stream: what has come by now."""
        whole = self._body.decode().rpartition("\n\n")[0]
        choices = [json.loads(line[6:])["choices"][0] for line in whole.splitlines() if line.startswith("data: {")]
        return "".join(choice["text"] for choice in choices)


def running(world: World, n: int = 1) -> None:
    """`n` requests have reached the engine."""
    wait_for(lambda: len(world.engine.requests) == n, 5)


def slow(world: World, tokens: int = 400) -> None:
    """Requests of so many tokens, which do not end until the engine is told to `go_on`."""
    world.engine.pace = 0.02
    world.engine.hold_at = tokens - 1
    world.engine.script = lambda request: ["x"] * tokens


def go_on(world: World) -> None:
    world.engine.hold_at = None


# ---------------------------------------------------------------- start


def test_alive_before_control_is_there_and_loading_until_ready(make_world: Callable[..., World]) -> None:
    world = make_world()
    answer = httpx.get(world.url + "/livez", timeout=10 * SLOW)
    assert answer.status_code == 200
    answer = httpx.get(world.url + "/readyz")
    assert answer.status_code == 503
    assert set(answer.json()) >= {"status", "stage", "progress", "reason"}
    answer = comp(world)
    assert answer.status_code == 503
    assert error(answer)["code"] == "loading"
    assert int(answer.headers["retry-after"]) > 0
    assert httpx.get(world.url + "/metrics").status_code == 503
    assert world.control.ready.wait(10 * SLOW)
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
    world = make_world(incarnation=2, supervision={"control_timeout": 0.1})
    assert world.control.ready.wait(10 * SLOW)
    request = Background(world, max_tokens=5)
    wait_for(lambda: world.control.gauge("llmd_requests_held") == 1, 5)
    time.sleep(0.3)  # control may be away for longer than its timeout
    world.control.publish()
    assert request.result().status_code == 200


def test_a_restarted_frontend_waits_for_control_no_longer_than_for_an_engine(make_world: Callable[..., World]) -> None:
    world = make_world(incarnation=2, supervision={"hold_timeout": 0.3})
    assert world.control.ready.wait(10 * SLOW)
    answer = comp(world)
    assert answer.status_code == 503 and answer.headers["retry-after"]


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


def counted(n: int) -> list[str]:
    """A text whose every character tells its place."""
    return [chr(ord("a") + i % 26) for i in range(n)]


def lose_engine(world: World, epoch: int, hold_at: int) -> None:
    """The engine dies in mid-stream and a new one comes, which holds at `hold_at`; nothing the old one says counts any more."""
    script, pace = world.engine.script, world.engine.pace
    world.control.publish(state="recovering", engine_up=False, reason="scheduler-0 killed by SIGKILL")
    wait_for(lambda: httpx.get(world.url + "/readyz").status_code == 503, 5)
    engine = world.new_engine(epoch)
    engine.script, engine.pace, engine.hold_at = script, pace, hold_at
    world.control.publish(state="ready", engine_up=True, epoch=epoch, reason="")


@pytest.mark.parametrize("times", [1, 2])
def test_a_new_engine_goes_on_where_the_old_one_was(world: World, times: int) -> None:
    world.engine.pace = 0.01
    world.engine.hold_at = 50
    world.engine.script = lambda request: counted(150)
    text = "".join(counted(150))
    whole, stream, two = Background(world), Background(world, stream=True), Background(world, stream=True, n=2)
    running(world, 4)
    assert stream.begun.wait(5 * SLOW) and two.begun.wait(5 * SLOW)
    for epoch in range(2, 2 + times):
        lose_engine(world, epoch, hold_at=50 * epoch)
        running(world, 4)
        # Counted with the first word of the new engine, which has not been lost before it was heard.
        wait_for(lambda epoch=epoch: world.control.counter("llmd_requests_recovered_total") == 3 * (epoch - 1), 5)  # type: ignore[misc]
    go_on(world)
    assert {r.epoch for r in world.engine.requests} == {1 + times}
    assert all(r.resumed and r.sampling.max_new_tokens == COMP["max_tokens"] for r in world.engine.requests)
    assert whole.result().json()["choices"][0]["text"] == text
    assert whole.result().json()["usage"]["completion_tokens"] == 150
    texts = dict.fromkeys((0, 1), "")
    for event in two.events[:-1]:
        for choice in json.loads(event)["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {0: text, 1: text}
    assert "".join(json.loads(event)["choices"][0]["text"] for event in stream.events[:-1]) == text
    assert "error" not in stream.result().text
    wait_for(lambda: world.outcomes() == {"stop": 3}, 2)
    assert world.control.counter("llmd_requests_recovered_total") == 3 * times
    wait_for(lambda: len(world.engine.acks) == 4, 5)


def test_late_words_of_a_lost_engine_reach_nobody(world: World) -> None:
    world.engine.pace = 0.01
    world.engine.hold_at = 20
    world.engine.script = lambda request: counted(60)
    stream = Background(world, stream=True)
    assert stream.begun.wait(5 * SLOW)
    lose_engine(world, 2, hold_at=0)
    running(world, 1)
    rid = world.engine.requests[0].rid
    world.engine.say(BatchStrOutput(epoch=1, chunks=[TextChunk(rid, 0, "?" * 100, [63] * 100)]))
    world.engine.say(AbortReq(rid=rid, epoch=1, code="internal_error"))
    go_on(world)
    assert "".join(json.loads(event)["choices"][0]["text"] for event in stream.events[:-1]) == "".join(counted(60))
    wait_for(lambda: world.control.counter('llmd_wire_stale_messages_total{channel="tokenizer"}') == 2, 5)


def test_a_new_detokenizer_gets_all_output_again(world: World) -> None:
    world.engine.pace = 0.01
    world.engine.hold_at = 75
    world.engine.script = lambda request: counted(150)
    whole, stream = Background(world), Background(world, stream=True)
    running(world, 2)
    assert stream.begun.wait(5 * SLOW)
    world.control.publish(state="recovering", detokenizer_incarnation=0)
    wait_for(lambda: httpx.get(world.url + "/readyz").status_code == 503, 5)
    world.control.publish(state="ready", detokenizer_incarnation=2)
    wait_for(lambda: len(world.engine.resends) == 2, 5)
    known = {r.request.rid: len(r.request.output_ids) for r in world.engine.resends}
    assert set(known) == {r.rid for r in world.engine.requests} and max(known.values()) > 0
    go_on(world)
    assert whole.result().json()["choices"][0]["text"] == "".join(counted(150))
    assert "".join(json.loads(event)["choices"][0]["text"] for event in stream.events[:-1]) == "".join(counted(150))
    assert world.engine.aborts == [] and len(world.engine.requests) == 2


def test_a_request_whose_output_ends_detokenizers_ends_alone(world: World) -> None:
    world.engine.pace = 0.01
    world.engine.hold_at = 30
    world.engine.script = lambda request: counted(150) if request.input_ids[0] == ord("i") else None
    poison, other = Background(world, prompt="poison"), Background(world, prompt="innocent", stream=True)
    running(world, 2)
    wait_for(lambda: len(other.text) == 30, 5)
    for incarnation in (2, 3, 4):
        asked = len(world.engine.resends)
        world.control.publish(state="recovering", detokenizer_incarnation=0)
        wait_for(lambda: httpx.get(world.url + "/readyz").status_code == 503, 5)
        world.control.publish(state="ready", detokenizer_incarnation=incarnation)
        wait_for(lambda asked=asked: len(world.engine.resends) > asked, 5)  # type: ignore[misc]
        world.engine.hold_at = 30 * incarnation
        wait_for(lambda incarnation=incarnation: len(other.text) == 30 * incarnation, 5)  # type: ignore[misc]
    answer = poison.result()
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_crash")
    go_on(world)
    assert "".join(json.loads(event)["choices"][0]["text"] for event in other.events[:-1]) == "".join(counted(150))


def test_output_that_the_detokenizer_forgot_is_asked_for_again(world: World) -> None:
    slow(world, 100)
    stream = Background(world, stream=True)
    assert stream.begun.wait(5 * SLOW)
    world.engine.say(Detokenizer404(rid=world.engine.requests[0].rid, epoch=1))
    wait_for(lambda: len(world.engine.resends) == 1, 5)
    go_on(world)
    assert "".join(json.loads(event)["choices"][0]["text"] for event in stream.events[:-1]) == "x" * 100
    world.engine.say(Detokenizer404(rid="nobody", epoch=1))
    assert world.engine.wait_abort().rid == "nobody"


def test_a_request_that_was_meant_for_the_frontend_before_is_sent_again(world: World) -> None:
    world.engine.script = lambda request: None if request.resumed else AbortReq(rid=request.rid, epoch=1, code="engine_unavailable")
    request = Background(world)
    running(world, 2)
    world.engine.say(AbortReq(rid=world.engine.requests[1].rid, epoch=1, code="queue_full", message="too many"))
    assert error(request.result())["code"] == "queue_full"


def test_other_weights_never_go_on_with_a_text_that_has_begun(world: World) -> None:
    slow(world)
    begun = Background(world, stream=True)
    assert begun.begun.wait(5 * SLOW)
    world.engine.script = lambda request: None
    fresh = Background(world, max_tokens=5)
    running(world, 2)
    world.engine.script = echo
    world.control.publish(state="reloading", engine_up=False, weights_version="toy@new")
    engine = world.new_engine(2)
    world.control.publish(state="ready", engine_up=True, epoch=2)
    assert json.loads(begun.events[-2])["error"]["code"] == "reloaded"
    assert fresh.result().json()["choices"][0]["text"] == "hello"
    assert len(engine.requests) == 1


# ---------------------------------------------------------------- holding


def test_while_the_engine_is_away_new_requests_wait_for_it(world: World) -> None:
    world.control.publish(state="recovering", engine_up=False, reason="scheduler 0 died (SIGKILL)")
    wait_for(lambda: httpx.get(world.url + "/readyz").status_code == 503, 2)
    assert httpx.get(world.url + "/readyz").json()["reason"] == "scheduler 0 died (SIGKILL)"
    assert httpx.get(world.url + "/livez").status_code == 200
    held = [Background(world, max_tokens=5, stream=stream) for stream in (True, False)]
    wait_for(lambda: world.control.gauge("llmd_requests_held") == 2, 5)
    world.new_engine(2)
    world.control.publish(state="recovering", engine_up=False, epoch=2)
    world.control.publish(state="ready", engine_up=True, epoch=2)
    assert [request.result().status_code for request in held] == [200, 200]
    assert held[1].result().json()["choices"][0]["text"] == "hello"
    assert not any(request.resumed for request in world.engine.requests)
    wait_for(lambda: world.control.gauge("llmd_requests_held") == 0, 5)


def test_nobody_is_held_for_longer_than_the_hold_timeout(make_world: Callable[..., World]) -> None:
    world = make_world(supervision={"hold_timeout": 0.3}).up()
    world.control.publish(state="recovering", engine_up=False)
    wait_for(lambda: httpx.get(world.url + "/readyz").status_code == 503, 2)
    for stream in (True, False):
        began = time.monotonic()
        answer = comp(world, stream=stream)
        assert time.monotonic() - began >= 0.3
        assert (answer.status_code, error(answer)["code"]) == (503, "engine_unavailable")
        assert answer.headers["retry-after"]
    world.control.publish(state="failed")
    assert error(comp(world))["code"] == "engine_unavailable"


def test_nobody_waits_for_a_lost_engine_for_longer_than_the_recover_timeout(make_world: Callable[..., World]) -> None:
    world = make_world(supervision={"recover_timeout": 0.3}).up()
    slow(world)
    whole, stream = Background(world), Background(world, stream=True)
    running(world, 2)
    assert stream.begun.wait(5 * SLOW)
    world.control.publish(state="recovering", engine_up=False)
    answer = whole.result()
    assert (answer.status_code, error(answer)["code"]) == (503, "engine_unavailable")
    assert answer.headers["retry-after"]
    assert json.loads(stream.events[-2])["error"]["code"] == "engine_unavailable" and stream.events[-1] == "[DONE]"
    wait_for(lambda: world.outcomes() == {"error": 2}, 2)


def test_a_client_that_leaves_while_it_is_held_is_forgotten(world: World) -> None:
    world.control.publish(state="recovering", engine_up=False)
    wait_for(lambda: httpx.get(world.url + "/readyz").status_code == 503, 2)
    leaving = http.client.HTTPConnection("127.0.0.1", int(world.url.rsplit(":", 1)[1]), timeout=10 * SLOW)
    leaving.request("POST", "/v1/completions", json.dumps(COMP))
    wait_for(lambda: world.control.gauge("llmd_requests_held") == 1, 5)
    leaving.close()
    wait_for(lambda: world.outcomes() == {"client_disconnect": 1}, 5)
    wait_for(lambda: world.control.gauge("llmd_frontend_inflight") == 0, 5)


def test_a_scheduler_that_never_takes_a_request_is_an_error_too(make_world: Callable[..., World]) -> None:
    world = make_world(supervision={"recover_timeout": 0.3}).up()
    world.engine.stop()
    world.control.publish(epoch=3)
    answer = comp(world)
    assert (answer.status_code, error(answer)["code"]) == (503, "engine_unavailable")


# ---------------------------------------------------------------- drain and end


@pytest.mark.parametrize("by", ["command", "picture"])
def test_draining_refuses_new_work_and_finishes_the_old(world: World, by: str) -> None:
    slow(world, 100)
    kept = http.client.HTTPConnection("127.0.0.1", int(world.url.rsplit(":", 1)[1]), timeout=10 * SLOW)
    kept.request("GET", "/livez")
    kept.getresponse().read()
    old = Background(world, stream=True)
    running(world)
    if by == "command":
        assert world.control.command("drain").data == {"inflight": 1}
    else:
        world.control.publish(state="draining")
        wait_for(lambda: httpx.get(world.url + "/readyz").status_code == 503, 5)
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
    go_on(world)
    assert old.events[-1] == "[DONE]"
    assert json.loads(old.events[-2])["choices"][0]["finish_reason"] == "stop"
    wait_for(lambda: world.control.gauge("llmd_frontend_inflight") == 0, 2)
    if by == "command":
        assert world.control.command("resume").ok
        assert comp(world, max_tokens=5).status_code == 200


def test_shutting_down_ends_every_request_with_that_error(world: World) -> None:
    slow(world)
    whole, stream = Background(world), Background(world, stream=True)
    running(world, 2)
    assert stream.begun.wait(5 * SLOW)
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
    assert stream.begun.wait(5 * SLOW)
    world.process.send_signal(signal.SIGTERM)
    assert world.process.wait(5 * SLOW) == 0
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
    world.process.wait(5 * SLOW)
    world.process = world._spawn()
    assert world.process.wait(15 * SLOW) == 78
    assert "tokenizer.json" in world.stderr


def test_heartbeats_carry_a_living_pulse(world: World) -> None:
    wait_for(lambda: bool(world.control.beats), 5)
    steps, began = world.control.beats[-1].steps, len(world.control.beats)
    wait_for(lambda: world.control.beats[-1].steps > steps + 2, 5)
    assert min(beat.step_age_s for beat in world.control.beats[began:]) < 0.9, "of one, where the machine stood still, it may be more"


def test_the_access_log(world: World) -> None:
    httpx.get(world.url + "/livez")
    httpx.get(world.url + "/livezz")
    httpx.get(world.url + "/metrics")
    httpx.post(world.url + "/v1/completions", json={**COMP, "max_tokens": 5, "prompt": "SENTINEL"}, headers={"X-Request-Id": 'a "quoted" id'})
    world.control.publish(state="recovering", engine_up=False)
    wait_for(lambda: httpx.get(world.url + "/readyz").status_code == 503, 2)
    wait_for(lambda: (world.access_lines() or [{}])[-1].get("status") == 503, 2)
    lines = world.access_lines()
    while lines[0]["path"] == "/readyz":  # asked before it was ready
        lines.pop(0)
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
    assert streamed.begun.wait(5 * SLOW)
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
