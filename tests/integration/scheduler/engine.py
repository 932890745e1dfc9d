"""A real scheduler process with the scripted model, and the test as its control, detokenizer and frontends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import zmq
from msgspec import convert

from llmd.config import ServerArgs
from llmd.plan.context import ENV_EPOCH, ENV_INCARNATION
from llmd.plan.ports import PortArgs
from llmd.plan.spec import Boot, ModelFiles, make_plan
from llmd.wire import sockets
from llmd.wire.codec import Decoder, encode
from llmd.wire.messages import (
    AbortReq,
    BatchTokenIDOutput,
    Command,
    ControlInput,
    DetokenizerInput,
    Finish,
    Heartbeat,
    Ready,
    Reply,
    SamplingParams,
    TokenChunk,
    TokenizedGenerateReqInput,
)
from tests.beats import totals_of, whole

SLOW = float(os.environ.get("LLMD_TEST_SLOWNESS", "1"))
EOS = 257
T = TypeVar("T")


@dataclass
class Answer:
    """What came for one rid."""

    tokens: list[int] = field(default_factory=list)
    finish: Finish | None = None
    error: AbortReq | None = None
    chunks: list[TokenChunk] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return self.finish is not None or self.error is not None


class Engine:
    """Context manager. `frontends` PULL sockets are bound at once, the detokenizer's unless told otherwise."""

    def __init__(self, run_dir: Path, *, args: dict[str, Any] | None = None, failpoints: str = "", epoch: int = 1, detokenizer: bool = True) -> None:
        self.epoch = epoch
        self.ports = PortArgs(run_dir=str(run_dir))
        self.ports.private.mkdir(parents=True, exist_ok=True)
        self.answers: dict[str, Answer] = defaultdict(Answer)
        self.forgotten: list[str] = []
        self.heartbeats: list[Heartbeat] = []
        self.replies: dict[int, Reply] = {}
        self.ready: Ready | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._control = self._context.socket(zmq.ROUTER)
        self._control.setsockopt(zmq.LINGER, 0)
        self._control.bind(self.ports.control)
        self._peer = b""
        settings = {"model": {"path": "dummy", "context_length": 1024}, "supervision": {"heartbeat": 0.05}, "http": {"workers": 2}} | (args or {})
        self.args = convert(settings, ServerArgs)
        self._frontends = [sockets.pull(self._context, self.ports.tokenizer(n)) for n in range(2)]
        self._detokenizer: zmq.Socket[bytes] | None = None
        if detokenizer:
            self.open_detokenizer()
        self._input = sockets.push(self._context, self.ports.scheduler_input(epoch))
        self._commands = 0
        boot = self._boot(bool(failpoints))
        self.ports.boot.write_bytes(boot.dump())
        env = {**os.environ, ENV_EPOCH: str(epoch), ENV_INCARNATION: str(epoch), "LLMD_FAILPOINTS": failpoints}
        self.log = run_dir / "scheduler.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "llmd.worker", "scheduler", "--boot", str(self.ports.boot), "--rank", "0"], env=env, stdout=log, stderr=log
            )

    def _boot(self, failpoints: bool) -> Boot:
        files = ModelFiles(
            kind="dummy", path="", name="dummy", small_dir="", weights_version="dummy@0", weights_bytes=0, context_length=8192, vocab_size=258,
            tokenizer_size=258, eos_token_ids=(EOS,), bos_token_id=256, add_bos=False, has_chat_template=True, architecture="dummy", quantization="none",
        )  # fmt: skip
        plan = make_plan(self.args, self.ports, threads=1)
        return Boot(
            start_id="test", started_at=0.0, args=self.args, ports=self.ports, files=files, processes=plan, http_url="", state_dir="", cache_dir="",
            log_dir="", failpoints=failpoints,
        )  # fmt: skip

    def __enter__(self) -> Engine:
        self.until("ready", lambda: self.ready, 15)
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        self._context.destroy(linger=0)

    # ------------------------------------------------------------ towards the scheduler

    def send(self, rid: str, prompt: list[int], max_new_tokens: int = 8, *, frontend: int = 0, epoch: int | None = None, **more: Any) -> None:
        sampling = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, **more.pop("sampling", {}))
        message = TokenizedGenerateReqInput(
            rid=rid, frontend=frontend, epoch=self.epoch if epoch is None else epoch, input_ids=prompt, sampling=sampling, **more
        )
        self.until("the scheduler takes input", lambda: sockets.send(self._input, message), 5)

    def send_frame(self, frame: bytes) -> None:
        self._input.send(frame)

    def abort(self, rid: str) -> None:
        assert sockets.send(self._input, AbortReq(rid=rid, epoch=self.epoch))

    def command(self, verb: str, **params: Any) -> Reply:
        self._commands += 1
        number = self._commands
        self._control.send_multipart([self._peer, encode(Command(id=number, verb=verb, params=params))])
        self.until(f"reply to {verb}", lambda: number in self.replies, 5)
        return self.replies[number]

    def open_detokenizer(self) -> None:
        self._detokenizer = sockets.pull(self._context, self.ports.detokenizer)

    def close_detokenizer(self) -> None:
        assert self._detokenizer is not None
        self._detokenizer.close()
        self._detokenizer = None

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(10 * SLOW)

    # ------------------------------------------------------------ from the scheduler

    def until(self, what: str, check: Callable[[], T], timeout: float) -> T:
        """Take in messages until `check` gives something true."""
        deadline = time.monotonic() + timeout * SLOW
        while not (value := check()):
            if self.process.poll() is not None:
                raise AssertionError(f"the scheduler ended with {self.process.returncode} before: {what}\n{self.log.read_text()}")
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {timeout} s: {what}\n{self.log.read_text()}")
            self.pump(0.02)
        return value

    def pump(self, seconds: float) -> None:
        """Wait for messages for so long at most, and take in all that are there."""
        poller = zmq.Poller()
        for socket in (self._control, self._detokenizer, *self._frontends):
            if socket is not None:
                poller.register(socket, zmq.POLLIN)
        poller.poll(int(seconds * 1000))
        self._pump_control()
        for socket in (self._detokenizer, *self._frontends):
            while socket is not None and (frame := sockets.receive(socket)) is not None:
                self._take(Decoder(DetokenizerInput).decode(frame), socket is self._detokenizer)

    def _pump_control(self) -> None:
        while self._control.poll(0):
            self._peer, frame = self._control.recv_multipart()
            message: Any = Decoder(ControlInput).decode(frame)
            if isinstance(message, Ready):
                self.ready = message
            elif isinstance(message, Heartbeat):
                self.heartbeats.append(whole(message, self.heartbeats[-1] if self.heartbeats else None))
                if self.ready is None:  # what it said before its line stood is lost; control asks again
                    self._control.send_multipart([self._peer, encode(Command(id=0, verb="hello"))])
            elif isinstance(message, Reply):
                self.replies[message.id] = message

    def _take(self, message: Any, detokenizer: bool) -> None:
        if isinstance(message, AbortReq):
            if detokenizer:
                self.forgotten.append(message.rid)
            else:
                self.answers[message.rid].error = message
            return
        assert isinstance(message, BatchTokenIDOutput) and message.epoch == self.epoch
        for chunk in message.chunks:
            answer = self.answers[chunk.rid]
            if chunk.start is not None and not answer.chunks:
                answer.tokens = [-1] * chunk.first
            assert (chunk.start is not None) == (not answer.chunks), "exactly the first chunk has `start`"
            assert chunk.first == len(answer.tokens), "no token lost or doubled"
            answer.chunks.append(chunk)
            answer.tokens += chunk.token_ids
            answer.finish = chunk.finish

    def wait_over(self, *rids: str, timeout: float = 20) -> list[Answer]:
        """All answers, once each has finished or failed."""
        self.until(f"end of {len(rids)} requests", lambda: all(self.answers[rid].over for rid in rids), timeout)
        return [self.answers[rid] for rid in rids]

    def gauge(self, name: str) -> float:
        """From a heartbeat that is sent after this call."""
        seen = len(self.heartbeats)
        self.until("heartbeat", lambda: len(self.heartbeats) > seen + 1, 5)
        totals = totals_of(self.heartbeats[-1])
        return (totals.gauges | totals.counters).get(name, 0.0)


def echo(prompt: list[int], count: int) -> list[int]:
    """What the scripted model answers."""
    return [prompt[i % len(prompt)] for i in range(count)]
