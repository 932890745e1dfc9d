"""Outputs to the detokenizer, vectors and errors to the frontends: sends that never block, in order, kept in memory while a peer is away."""

from __future__ import annotations

from collections import deque

import zmq

from llmd.plan.ports import PortArgs
from llmd.wire import sockets
from llmd.wire.messages import AbortReq, BatchEmbeddingOutput, BatchTokenIDOutput, Embedding, Message, TokenChunk

#: Tokens kept for a detokenizer that is away; beyond, no step runs until it takes them.
MAX_BACKLOG_TOKENS = 65_536
#: Errors and vectors kept for a frontend that is away; the oldest go first (a new frontend knows none of those requests).
MAX_BACKLOG_ERRORS = 4096
#: Messages that ZMQ itself may hold for a peer that does not read; few, since they are lost with the peer and not in our count.
_HIGH_WATER = 256


class _Channel:
    """A PUSH socket and the messages that its peer has not taken yet."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, limit: int | None) -> None:
        self.socket = sockets.push(context, endpoint, high_water=_HIGH_WATER)
        self.waiting: deque[Message] = deque(maxlen=limit)

    def put(self, message: Message) -> None:
        self.waiting.append(message)
        self.flush()

    def flush(self) -> int:
        """Send what the peer takes; returns how many messages went."""
        sent = 0
        while self.waiting and sockets.send(self.socket, self.waiting[0]):
            self.waiting.popleft()
            sent += 1
        return sent


class Output:
    """Everything that leaves the scheduler on the data plane."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], ports: PortArgs, frontends: int, epoch: int) -> None:
        self._epoch = epoch
        self._detokenizer = _Channel(context, ports.detokenizer, None)
        self._frontends = [_Channel(context, ports.tokenizer(n), MAX_BACKLOG_ERRORS) for n in range(frontends)]
        self._backlog_tokens: deque[int] = deque()
        self._backlog = 0

    @property
    def blocked(self) -> bool:
        """The detokenizer has been away for so long that nothing more may be generated."""
        return self._backlog > MAX_BACKLOG_TOKENS

    @property
    def channels(self) -> list[zmq.Socket[bytes]]:
        """Sockets whose peers have something to take: to be polled for POLLOUT."""
        return [channel.socket for channel in (self._detokenizer, *self._frontends) if channel.waiting]

    def chunks(self, chunks: list[TokenChunk]) -> None:
        """What one step brought."""
        if chunks:
            self._put(BatchTokenIDOutput(epoch=self._epoch, chunks=chunks), sum(len(chunk.token_ids) for chunk in chunks) + len(chunks))

    def forget(self, rid: str) -> None:
        """The detokenizer may drop what it holds of `rid`."""
        self._put(AbortReq(rid=rid, epoch=self._epoch), 1)

    def refuse(self, rid: str, frontend: int, code: str | None, message: str, param: str | None = None) -> None:
        """`rid` is refused or ended, with the error that its client gets."""
        if 0 <= frontend < len(self._frontends):
            self._frontends[frontend].put(AbortReq(rid=rid, epoch=self._epoch, code=code, message=message, param=param))

    def embeddings(self, found: list[tuple[int, Embedding]]) -> None:
        """Vectors, each with the frontend it goes to."""
        for number, frontend in enumerate(self._frontends):
            mine = [embedding for owner, embedding in found if owner == number]
            if mine:
                frontend.put(BatchEmbeddingOutput(epoch=self._epoch, embeddings=mine))

    def flush(self) -> None:
        """Send what peers take now."""
        for _ in range(self._detokenizer.flush()):
            self._backlog -= self._backlog_tokens.popleft()
        for channel in self._frontends:
            channel.flush()

    def close(self) -> None:
        for channel in (self._detokenizer, *self._frontends):
            channel.socket.close()

    def _put(self, message: Message, weight: int) -> None:
        self._detokenizer.waiting.append(message)
        self._backlog_tokens.append(weight)
        self._backlog += weight
        self.flush()
