"""A real frontend process on a bound socket, between a control, a scheduler and a detokenizer that this file plays."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import tokenizers
import zmq
from tokenizers import decoders, models, pre_tokenizers

from llmd.config import ServerArgs
from llmd.config.server_args import HttpArgs, SchedulerArgs, SupervisionArgs
from llmd.plan.context import ENV_EPOCH, ENV_INCARNATION
from llmd.plan.ports import PortArgs
from llmd.plan.spec import Boot, ModelFiles, make_plan
from llmd.wire import sockets
from llmd.wire.codec import Decoder, encode
from llmd.wire.messages import (
    AbortReq,
    Ack,
    BatchEmbeddingOutput,
    BatchStrOutput,
    Command,
    ControlInput,
    Embedding,
    Finish,
    Heartbeat,
    Hello,
    Publish,
    Ready,
    Reply,
    Resend,
    SchedulerInput,
    TextChunk,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
    TokenLogprob,
)
from tests.beats import totals_of, whole
from tests.daemon import SLOW, whole_lines

EOS = 256
CONTEXT = 512
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'function' %}{{ raise_exception('only humans may speak here') }}{% endif %}"
    "{{ m.role }}:{{ m.content }}\n{% endfor %}assistant:"
)


def write_small_dir(path: Path, *, template: str | None = TEMPLATE) -> Path:
    """A byte-level tokenizer: id = byte, 256 = end of text."""
    path.mkdir(parents=True, exist_ok=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    byte_chars = _byte_chars()
    assert set(byte_chars) == set(alphabet)
    inner = tokenizers.Tokenizer(models.BPE(vocab={char: byte for byte, char in enumerate(byte_chars)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([tokenizers.AddedToken("<eos>", special=True)])
    (path / "tokenizer.json").write_text(inner.to_str())
    (path / "config.json").write_text(json.dumps({"eos_token_id": EOS}))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


def _byte_chars() -> list[str]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    extra = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(extra)) for byte in range(256)]


class FakeEngine(threading.Thread):
    """Scheduler and detokenizer in one: by default it echoes the prompt, byte by byte, round and round.

    `script(request)` gives the pieces of text; `pace` is the pause between steps; requests and aborts are kept.
    `hold_at`: no request goes beyond so many pieces, until it is None: what must be running still when a test goes on is held, for no pace is slow enough.
    """

    def __init__(self, ports: PortArgs, epoch: int) -> None:
        super().__init__(daemon=True)
        self.epoch = epoch
        self.requests: list[TokenizedGenerateReqInput] = []
        self.aborts: list[AbortReq] = []
        self.resends: list[Resend] = []
        self.acks: list[str] = []
        self.ended: list[str] = []
        """Requests whose last piece has been said."""
        self.pace = 0.0
        self.hold_at: int | None = None
        self.script: Callable[[TokenizedGenerateReqInput], list[str] | AbortReq | None] = echo
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._input = sockets.pull(self._context, ports.scheduler_input(epoch))
        self._output = sockets.push(self._context, ports.tokenizer(0))
        self._decoder: Decoder[Any] = Decoder(SchedulerInput)
        self._running: dict[str, tuple[TokenizedGenerateReqInput, list[str], int]] = {}
        self._whole: set[str] = set()
        """Requests whose next chunk has all of their output."""
        self._halt = threading.Event()
        self._next_step = 0.0

    def run(self) -> None:
        while not self._halt.is_set():
            if self._input.poll(5 if not self._running else 1):
                while (frame := sockets.receive(self._input)) is not None:
                    self._take(self._decoder.decode(frame))
            if self._running and time.monotonic() >= self._next_step:
                self._next_step = time.monotonic() + self.pace
                self._step()
        self._input.close()
        self._output.close()
        self._context.term()

    def stop(self) -> None:
        self._halt.set()
        self.join(timeout=5)

    def _take(self, message: Any) -> None:
        if isinstance(message, AbortReq):
            self.aborts.append(message)
            self._running.pop(message.rid, None)
            return
        if isinstance(message, Ack):
            self.acks.append(message.rid)
            return
        if isinstance(message, Resend):
            self.resends.append(message)
            if message.request.rid in self._running:
                self._whole.add(message.request.rid)
                return
            message = message.request
        self.requests.append(message)
        if isinstance(message, TokenizedEmbeddingReqInput):
            self.embed(message)
            return
        script = self.script(message)
        if isinstance(script, AbortReq):
            self.say(script)
        elif script is not None:
            self._running[message.rid] = (message, script, len(message.output_ids))
            if message.output_ids:
                self._whole.add(message.rid)

    def embed(self, message: TokenizedEmbeddingReqInput) -> None:
        """The vector of a text is its first and its last id, cut to `dimensions`."""
        vector = [float(message.input_ids[0]), float(message.input_ids[-1])][: message.dimensions or None]
        self.say(BatchEmbeddingOutput(epoch=self.epoch, embeddings=[Embedding(message.rid, struct.pack(f"<{len(vector)}f", *vector))]))

    def _step(self) -> None:
        chunks: list[TextChunk] = []
        for rid, (request, script, at) in list(self._running.items()):
            if self.hold_at is not None and at >= self.hold_at:
                continue
            last = at + 1 >= len(script)
            first = 0 if rid in self._whole else at
            self._whole.discard(rid)
            text = "".join(script[first : at + 1])
            ids = [piece.encode()[0] for piece in script[first : at + 1] if piece]
            finish = Finish("length" if len(script) >= request.sampling.max_new_tokens else "stop") if last else None
            logprobs = [logprob(i) for i in ids] if request.logprobs >= 0 else None
            prompt = None
            if at == 0 and request.prompt_logprobs:
                prompt = [logprob(i, None if n == 0 else -1.0) for n, i in enumerate(request.input_ids)]
            chars = len("".join(script[:first]))
            chunks.append(TextChunk(rid, first, text, ids, finish, logprobs, prompt, cached_tokens=3 if at == 0 else 0, at=chars))
            if last:
                del self._running[rid]
            else:
                self._running[rid] = (request, script, at + 1)
        if chunks:
            self.say(BatchStrOutput(epoch=self.epoch, chunks=chunks))
        self.ended += [chunk.rid for chunk in chunks if chunk.finish]

    def say(self, message: msgspec.Struct) -> None:
        """Send a message to the frontend."""
        end = time.monotonic() + 5 * SLOW
        while not sockets.send(self._output, message):
            if self._halt.is_set():
                return
            assert time.monotonic() < end
            time.sleep(0.001)

    def wait_abort(self, within: float = 2.0) -> AbortReq:
        """The first abort that has come or comes."""
        wait_for(lambda: bool(self.aborts), within)
        return self.aborts[0]


def echo(request: TokenizedGenerateReqInput) -> list[str]:
    n = min(request.sampling.max_new_tokens, 64)
    return [chr(request.input_ids[i % len(request.input_ids)]) for i in range(n)]


def logprob(token_id: int, value: float | None = -0.5) -> TokenLogprob:
    return TokenLogprob(token_id, value, ((token_id, -0.5), (65, -2.0)), bytes([token_id]), (bytes([token_id]), b"A"))


class FakeControl(threading.Thread):
    """ROUTER at ports.control; publishes `picture` when told, keeps what comes in."""

    def __init__(self, ports: PortArgs, picture: Publish) -> None:
        super().__init__(daemon=True)
        self.picture = picture
        self.hello = threading.Event()
        self.ready = threading.Event()
        self.beats: list[Heartbeat] = []
        self.replies: dict[int, Reply] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.bind(ports.control)
        self._decoder: Decoder[Any] = Decoder(ControlInput)
        self._peer = b""
        self._outbox: list[bytes] = []
        self._ids = 0
        self._lock = threading.Lock()
        self._halt = threading.Event()

    def run(self) -> None:
        while not self._halt.is_set():
            if self._router.poll(5):
                peer, frame = self._router.recv_multipart()
                self._take(peer, self._decoder.decode(frame))
            with self._lock:
                waiting, self._outbox = (self._outbox, []) if self._peer else ([], self._outbox)
            for frame in waiting:
                self._router.send_multipart([self._peer, frame])
        self._router.close()
        self._context.term()

    def stop(self) -> None:
        self._halt.set()
        self.join(timeout=5)

    def _take(self, peer: bytes, message: Any) -> None:
        if not self._peer:
            self._outbox.insert(0, encode(Command(id=0, verb="hello")))
        self._peer = peer
        match message:
            case Hello():
                self.hello.set()
            case Ready():
                self.ready.set()
            case Heartbeat():
                self.beats.append(whole(message, self.beats[-1] if self.beats else None))
            case Reply():
                self.replies[message.id] = message

    def publish(self, **changes: Any) -> None:
        """Send a picture like the last one with `changes`."""
        self.picture = msgspec.structs.replace(self.picture, **changes)
        with self._lock:
            self._outbox.append(encode(self.picture))

    def command(self, verb: str, within: float = 5.0, **params: Any) -> Reply:
        """Send a command and wait for its reply."""
        self._ids += 1
        with self._lock:
            self._outbox.append(encode(Command(id=self._ids, verb=verb, params=params)))
        wait_for(lambda: self._ids in self.replies, within)
        return self.replies[self._ids]

    def counter(self, name: str) -> float:
        """A counter of the last heartbeat."""
        return totals_of(self.beats[-1]).counters.get(name, 0.0) if self.beats else 0.0

    def gauge(self, name: str) -> float | None:
        """As the last heartbeat says, if there was one."""
        return totals_of(self.beats[-1]).gauges.get(name) if self.beats else None


def picture(**changes: Any) -> Publish:
    base = Publish(
        state="ready",
        stage="",
        reason="",
        degraded=(),
        progress=1.0,
        epoch=1,
        engine_up=True,
        detokenizer_incarnation=1,
        weights_version="toy@abc",
        model={"context_length": CONTEXT, "max_total_tokens": 4096},
        metrics="# TYPE llmd_state gauge\nllmd_state 1\n",
    )
    return msgspec.structs.replace(base, **changes)


def wait_for(condition: Callable[[], bool], within: float, what: str = "condition") -> None:
    end = time.monotonic() + within * SLOW
    while not condition():
        assert time.monotonic() < end, f"{what} not met within {within} s"
        time.sleep(0.005)


class World:
    """One frontend process and its fakes."""

    def __init__(
        self, tmp_path: Path, http: dict[str, Any], *, template: str | None = TEMPLATE, incarnation: int = 1, scheduler: Any = None, **supervision: Any
    ) -> None:
        self.dir = tmp_path
        ports = self.ports = PortArgs(run_dir=str(tmp_path / "r"))
        ports.private.mkdir(parents=True, mode=0o700)
        args = ServerArgs(
            http=HttpArgs(**http),
            scheduler=SchedulerArgs(**(scheduler or {})),
            supervision=SupervisionArgs(**{"heartbeat": 0.05, "control_timeout": 1.0, **supervision}),
        )
        files = ModelFiles(
            kind="dummy",
            path="",
            name="toy",
            small_dir=str(write_small_dir(tmp_path / "small", template=template)),
            weights_version="toy@file",
            weights_bytes=1,
            context_length=CONTEXT,
            vocab_size=257,
            tokenizer_size=257,
            eos_token_ids=(EOS,),
            bos_token_id=None,
            add_bos=False,
            has_chat_template=template is not None,
            architecture="dummy",
            quantization="none",
        )
        self.listener = socket.socket()
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen(128)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        boot = Boot(
            start_id="s1",
            started_at=time.time(),
            args=args,
            ports=ports,
            files=files,
            processes=make_plan(args, ports, threads=1),
            http_url=self.url,
            state_dir=str(tmp_path),
            cache_dir=str(tmp_path),
            log_dir=str(tmp_path / "log"),
        )
        ports.boot.write_bytes(boot.dump())
        self.control = FakeControl(ports, picture())
        self.control.start()
        self.engine = FakeEngine(ports, 1)
        self.engine.start()
        self._incarnation = incarnation
        self.process = self._spawn()

    def _spawn(self) -> subprocess.Popen[bytes]:
        env = {**os.environ, ENV_INCARNATION: str(self._incarnation), ENV_EPOCH: "1", "PYTHONWARNINGS": "error"}
        argv = [sys.executable, "-m", "llmd.worker", "frontend", "--boot", str(self.ports.boot), "--rank", "0"]
        with (self.dir / "stderr").open("ab") as stderr:
            return subprocess.Popen(argv, stdin=self.listener.fileno(), stderr=stderr, env=env)

    def up(self) -> World:
        """Wait until the frontend is ready and has the first picture."""
        assert self.control.ready.wait(20 * SLOW), self.stderr
        self.control.publish()
        wait_for(lambda: httpx.get(self.url + "/readyz").status_code == 200, 10, "ready")
        return self

    def new_engine(self, epoch: int) -> FakeEngine:
        """Replace the engine."""
        self.engine.stop()
        self.engine = FakeEngine(self.ports, epoch)
        self.engine.start()
        return self.engine

    @property
    def stderr(self) -> str:
        return (self.dir / "stderr").read_text()

    def access_lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in whole_lines(self.dir / "log" / "access.log")]

    def outcomes(self) -> dict[str, float]:
        """Outcome -> requests, over all endpoints, from the last heartbeat."""
        counts: dict[str, float] = {}
        wait_for(lambda: bool(self.control.beats), 5, "a heartbeat")
        for name, value in totals_of(self.control.beats[-1]).counters.items():
            if name.startswith("llmd_requests_total{"):
                outcome = name.split('outcome="')[1].split('"')[0]
                counts[outcome] = counts.get(outcome, 0) + value
        return counts

    def close(self) -> None:
        """End the frontend and the fakes."""
        try:
            self._end_process()
        finally:
            self.engine.stop()
            self.control.stop()

    def _end_process(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10 * SLOW)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(5 * SLOW)
        self.listener.close()


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def make(*, template: str | None = TEMPLATE, incarnation: int = 1, scheduler: Any = None, supervision: Any = None, **http: Any) -> World:
        world = World(tmp_path / f"w{len(worlds)}", http, template=template, incarnation=incarnation, scheduler=scheduler, **(supervision or {}))
        worlds.append(world)
        return world

    yield make
    for world in worlds:
        world.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A frontend that is ready, shared by tests that leave it as it was."""
    world = World(tmp_path_factory.mktemp("shared"), {"max_body": 2**20})
    try:
        yield world.up()
    finally:
        world.close()


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    """A frontend that is ready."""
    return make_world().up()
