"""The real detokenizer process between a scheduler, frontends and a control that the test plays."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from llmd.config.server_args import HttpArgs, ServerArgs, SupervisionArgs
from llmd.plan.context import ENV_EPOCH, ENV_INCARNATION, ENV_PARENT
from llmd.plan.ports import PortArgs
from llmd.plan.spec import Boot, ModelFiles, make_plan
from llmd.wire import sockets
from llmd.wire.codec import Decoder, encode
from llmd.wire.messages import (
    BatchStrOutput,
    BatchTokenIDOutput,
    Command,
    ControlInput,
    DetokenizeParams,
    Detokenizer404,
    Finish,
    FrontendInput,
    Heartbeat,
    Hello,
    Ready,
    Reply,
    TextChunk,
    TokenChunk,
)
from tests.beats import totals_of, whole
from tests.daemon import SLOW, signal_another_thread, wait_for
from tests.unit.tokenizer import samples

EMOJI = "\U0001f468\u200d\U0001f469\u200d\U0001f467"


class World:
    """Everything around one detokenizer."""

    def __init__(self, directory: Path, failpoints: str = "") -> None:
        (directory / "run" / "private").mkdir(parents=True, mode=0o700)
        (directory / "small").mkdir()
        (directory / "small" / "tokenizer.json").write_text(samples.byte_level())
        args = ServerArgs(http=HttpArgs(workers=2), supervision=SupervisionArgs(heartbeat=0.05))
        self.ports = PortArgs(run_dir=str(directory / "run"))
        self.boot = Boot(
            start_id="test", started_at=0.0, args=args, ports=self.ports, files=model_files(directory / "small"),
            processes=make_plan(args, self.ports, threads=1), http_url="", state_dir="", cache_dir="", log_dir="", failpoints=bool(failpoints),
        )  # fmt: skip
        self.ports.boot.write_bytes(self.boot.dump())
        self.failpoints = failpoints
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.scheduler = sockets.push(self.context, self.ports.detokenizer)
        self.frontends = [sockets.pull(self.context, self.ports.tokenizer(n)) for n in range(2)]
        self.control = self.context.socket(zmq.ROUTER)
        self.control.setsockopt(zmq.LINGER, 0)
        self.control.bind(self.ports.control)
        self.last: dict[type, Any] = {}
        self.beat: Heartbeat | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.incarnation = 1

    def start(self, incarnation: int = 1) -> subprocess.Popen[bytes]:
        """Start the process and wait until it is ready."""
        spec = next(process for process in self.boot.processes if process.role == "detokenizer")
        env = {**os.environ, **spec.env, ENV_INCARNATION: str(incarnation), ENV_EPOCH: "1", ENV_PARENT: str(os.getpid())}
        if self.failpoints:
            env["LLMD_FAILPOINTS"] = self.failpoints
        self.last.clear()
        self.incarnation = incarnation
        self.process = subprocess.Popen(spec.argv, env=env)
        wait_for("Ready of the detokenizer", lambda: self.hear() and {Hello, Ready} <= self.last.keys(), 20)
        return self.process

    def hear(self) -> bool:
        """Take in what the process told control; ask who it is where its first words were lost."""
        decoder: Decoder[Any] = Decoder(ControlInput)
        with contextlib.suppress(zmq.Again):
            while True:
                self.identity, frame = self.control.recv_multipart(zmq.NOBLOCK)
                message = decoder.decode(frame)
                stale = isinstance(message, Hello) and message.incarnation != self.incarnation
                if stale or (isinstance(message, Ready) and Hello not in self.last):
                    continue  # the last words of one that was killed
                self.last[type(message)] = message
                if isinstance(message, Heartbeat):
                    self.last[Heartbeat] = self.beat = whole(message, self.beat)
                if isinstance(message, Heartbeat) and not {Hello, Ready} <= self.last.keys():
                    self.control.send_multipart([self.identity, encode(Command(id=0, verb="hello"))])
        return True

    def command(self, verb: str) -> Reply:
        self.last.pop(Reply, None)
        self.control.send_multipart([self.identity, encode(Command(id=7, verb=verb))])
        wait_for(f"reply to {verb}", lambda: self.hear() and Reply in self.last, 5)
        reply = self.last[Reply]
        assert isinstance(reply, Reply) and reply.id == 7
        return reply

    def heartbeat(self) -> Heartbeat:
        """The first heartbeat that knows what has been until now: the next one may be on its way."""
        self.hear()
        for _ in range(2):
            self.last.pop(Heartbeat, None)
            wait_for("a heartbeat", lambda: self.hear() and Heartbeat in self.last, 5)
        beat = self.last[Heartbeat]
        assert isinstance(beat, Heartbeat)
        return beat

    def states(self) -> float:
        return totals_of(self.heartbeat()).gauges["llmd_detokenizer_states"]

    def send(self, *chunks: TokenChunk, epoch: int = 1) -> None:
        message = BatchTokenIDOutput(epoch=epoch, chunks=list(chunks))
        wait_for("room to the detokenizer", lambda: sockets.send(self.scheduler, message), 10, interval=0.001)

    def receive(self, frontend: int, timeout: float = 10) -> Any:
        assert self.frontends[frontend].poll(int(timeout * SLOW * 1000)), f"nothing for frontend {frontend} within {timeout} s"
        frame = sockets.receive(self.frontends[frontend])
        assert frame is not None
        decoder: Decoder[Any] = Decoder(FrontendInput)
        return decoder.decode(frame)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(10 * SLOW)
        for socket in (self.scheduler, self.control, *self.frontends):
            socket.close()
        self.context.term()


def model_files(small_dir: Path) -> ModelFiles:
    return ModelFiles(
        kind="dummy", path="", name="dummy", small_dir=str(small_dir), weights_version="dummy@0", weights_bytes=0, context_length=8192, vocab_size=263,
        tokenizer_size=263, eos_token_ids=(261,), bos_token_id=None, add_bos=False, has_chat_template=False, architecture="dummy", quantization="none",
    )  # fmt: skip


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()


def first(rid: str, text: str, frontend: int = 0, stop: tuple[str, ...] = ()) -> TokenChunk:
    return TokenChunk(rid, frontend, 0, list(text.encode()), start=DetokenizeParams(stop=stop))


def test_600_streams_at_once_each_get_their_text_and_one_finish(world: World) -> None:
    process = world.start()
    dice = random.Random(7)
    texts = {f"r{n}": f"{n} {EMOJI} 日本 " + "x" * dice.randrange(20) + ("STOP" if n % 3 == 0 else "") for n in range(600)}
    left = {rid: list(text.encode()) for rid, text in texts.items()}
    position = dict.fromkeys(texts, 0)
    got: dict[str, list[TextChunk]] = {rid: [] for rid in texts}
    while left:
        chunks = []
        for rid in list(left):
            size = dice.choice([1, 1, 1, 2, 5])
            ids, left[rid] = left[rid][:size], left[rid][size:]
            start = DetokenizeParams(stop=("STOP",)) if position[rid] == 0 else None
            chunks.append(TokenChunk(rid, int(rid[1:]) % 2, position[rid], ids, finish=None if left[rid] else Finish("length"), start=start))
            position[rid] += len(ids)
            if not left[rid]:
                del left[rid]
        world.send(*chunks)
    while not all(received and received[-1].finish for received in got.values()):
        frontend = 0 if any(not (c and c[-1].finish) for rid, c in got.items() if int(rid[1:]) % 2 == 0) else 1
        batch = world.receive(frontend)
        assert isinstance(batch, BatchStrOutput)
        for chunk in batch.chunks:
            assert int(chunk.rid[1:]) % 2 == frontend
            got[chunk.rid].append(chunk)
    for rid, received in got.items():
        stopped = texts[rid].endswith("STOP")
        assert "".join(chunk.text for chunk in received) == texts[rid].removesuffix("STOP")
        assert [chunk.finish for chunk in received if chunk.finish] == [Finish("stop", "STOP") if stopped else Finish("length")]
        assert all("\ufffd" not in chunk.text and (chunk.text or chunk.finish) for chunk in received)
        assert [id for chunk in received for id in chunk.token_ids] == list(texts[rid].encode())
    assert world.states() == 0
    assert process.poll() is None
    assert psutil.Process(process.pid).memory_info().rss < 150e6


def test_killed_and_started_again_it_reports_what_it_does_not_know(world: World) -> None:
    process = world.start()
    world.send(first("a", "hello"))
    assert world.receive(0).chunks == [TextChunk("a", 0, "hello", list(b"hello"))]
    process.kill()
    process.wait(10 * SLOW)
    world.start(incarnation=2)

    def answered() -> bool:
        world.send(TokenChunk("a", 0, 5, [97]))  # what goes into the dead one's pipe is lost
        return bool(world.frontends[0].poll(500))

    wait_for("the new one answers", answered, 20)
    assert world.receive(0) == Detokenizer404(rid="a", epoch=1)
    world.send(first("b", "new"))
    while (answer := world.receive(0)) == Detokenizer404(rid="a", epoch=1):
        pass
    assert answer.chunks == [TextChunk("b", 0, "new", list(b"new"))]


def test_sigterm_ends_it_at_once_with_status_0(world: World) -> None:
    process = world.start()
    process.terminate()
    assert process.wait(5 * SLOW) == 0


def test_sigterm_ends_it_whichever_thread_gets_it(world: World) -> None:
    process = world.start()
    wait_for("it is idle", lambda: world.heartbeat().phase == "idle", 10)
    signal_another_thread(process.pid, signal.SIGTERM)
    assert process.wait(5 * SLOW) == 0


def test_idle_it_uses_no_cpu_and_says_idle(world: World) -> None:
    process = world.start()
    world.send(first("a", "x"))
    world.receive(0)
    before = wait_for("it is idle", lambda: (beat := world.heartbeat()).phase == "idle" and beat, 10)
    assert before
    switches, began = psutil.Process(process.pid).num_ctx_switches().voluntary, time.monotonic()
    while time.monotonic() < began + 1:
        beat = world.heartbeat()
    assert (beat.phase, beat.step_age_s) == ("idle", 0.0)
    assert beat.steps == before.steps
    assert beat.cpu_s - before.cpu_s < 0.3
    assert psutil.Process(process.pid).num_ctx_switches().voluntary - switches < 500 * (time.monotonic() - began)


def test_bad_and_stale_frames_are_counted_and_harmless(world: World) -> None:
    world.start()
    world.scheduler.send(b"\xc1 not a message")
    world.send(first("a", "x"), epoch=2)
    assert world.receive(0).epoch == 2
    world.send(first("old", "x"), epoch=1)
    world.send(first("b", "y"), epoch=2)
    assert [chunk.rid for chunk in world.receive(0).chunks] == ["b"]
    counters = totals_of(world.heartbeat()).counters
    assert counters['llmd_wire_bad_frames_total{channel="detokenizer"}'] == 1
    assert counters['llmd_wire_stale_messages_total{channel="detokenizer"}'] == 1


def test_a_frontend_that_is_away_costs_bounded_memory_and_nobody_else(world: World) -> None:
    process = world.start()
    world.frontends[1].close()
    rss = psutil.Process(process.pid).memory_info().rss
    text = "x" * 50_000
    for n in range(600):
        world.send(first(f"gone{n}", text, frontend=1))
        world.send(first(f"here{n}", "y"))
        assert world.receive(0).chunks[0].rid == f"here{n}"
    assert psutil.Process(process.pid).memory_info().rss - rss < 100e6
    assert wait_for("a dropped backlog", lambda: totals_of(world.heartbeat()).counters.get("llmd_detokenizer_dropped_backlogs_total"), 5)
    world.frontends[1] = sockets.pull(world.context, world.ports.tokenizer(1))
    world.send(first("back", "z", frontend=1))
    wait_for("output for the frontend that came back", lambda: any(chunk.rid == "back" for chunk in getattr(world.receive(1), "chunks", [])), 10)


def test_a_hang_shows_in_the_heartbeat(tmp_path: Path) -> None:
    world = World(tmp_path, failpoints="detokenizer.batch=hang")
    try:
        process = world.start()
        world.send(first("a", "x"))
        wait_for("a step that goes on and on", lambda: world.heartbeat().step_age_s > 0.3, 10)
        assert world.last[Heartbeat].phase == "busy"
        process.send_signal(signal.SIGKILL)
        assert process.wait(5 * SLOW) == -signal.SIGKILL
    finally:
        world.close()


def test_commands(world: World) -> None:
    world.start()
    assert world.command("freeze").ok
    refused = world.command("dance")
    assert (refused.ok, refused.code) == (False, "unknown_verb")


def test_broken_tokenizer_ends_it_with_status_78(world: World) -> None:
    (Path(world.boot.files.small_dir) / "tokenizer.json").write_text("{")
    spec = next(process for process in world.boot.processes if process.role == "detokenizer")
    done = subprocess.run(spec.argv, env={**os.environ, **spec.env}, stderr=subprocess.PIPE, timeout=20 * SLOW, check=False)
    assert done.returncode == 78
    assert b"tokenizer.json" in done.stderr


def test_it_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, llmd.detokenizer.main; print([m for m in ('torch', 'transformers', 'numpy', 'tokenizers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=20 * SLOW).stdout.strip() == "[]"
