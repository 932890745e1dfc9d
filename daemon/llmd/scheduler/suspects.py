"""`Suspects`: which requests may be what ends engines, so that one that does costs itself only.

A scheduler that starts after a death reads what its predecessor was computing. Who was in that step, and had been in such a step before
without getting on since, is a suspect: it runs alone until it is past the place where the engine died, and is cleared. One
with which the engine dies alone `CONDEMNED` times is refused with `engine_crash`, and so is, for a while, whatever asks for the same.
The same serves steps that fail without killing anybody: all of their requests run alone once.

What has to outlive an engine is in RUN/private/suspects.RANK: marks and hashes, no prompts.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from pathlib import Path

import msgspec
from msgspec import Struct

from llmd.scheduler import journal
from llmd.scheduler.req import Req, mark_of
from llmd.wire.messages import TokenizedEmbeddingReqInput, TokenizedGenerateReqInput

log = logging.getLogger(__name__)

#: Engines that died with a request in their step, without its getting on, before it has to run alone; and that died with it alone.
SUSPECTED, CONDEMNED = 2, 2
#: Seconds for which what asks for the same is refused, and after which a request that has not come back is forgotten.
REMEMBERED_S = 600.0
#: The oldest go beyond these numbers.
MAX_CASES, MAX_BLOCKED = 8192, 256

_Source = TokenizedGenerateReqInput | TokenizedEmbeddingReqInput


class Case(Struct):
    """What speaks against one request."""

    tokens: int
    """It is cleared when so many of its tokens are computed."""
    deaths: int = 0
    alone: int = 0
    at: float = 0.0
    """Monotonic, of the last."""


class Memory(Struct):
    """The file."""

    start_id: str
    cases: dict[bytes, Case] = {}
    blocked: dict[bytes, float] = {}
    """Hash of a request -> monotonic time until which it is refused."""


class Suspects:
    """Of one scheduler. `path` None: nothing is kept."""

    def __init__(self, path: Path | None, start_id: str = "") -> None:
        self._path = path
        self._memory = _load(path, start_id) if path is not None else Memory(start_id)
        self._dirty = False

    def learn(self, last: journal.Last | None) -> None:
        """The engine before this one died; `last`: the step it was in."""
        now = time.monotonic()
        memory = self._memory
        memory.cases = {mark: case for mark, case in memory.cases.items() if now - case.at < REMEMBERED_S}
        memory.blocked = {key: until for key, until in memory.blocked.items() if until > now}
        for mark, tokens in (last.requests if last is not None else {}).items():
            case = memory.cases.setdefault(mark, Case(tokens))
            case.tokens, case.at = max(case.tokens, tokens), now
            case.deaths += 1
            case.alone += last is not None and last.alone
        while len(memory.cases) > MAX_CASES:
            del memory.cases[next(iter(memory.cases))]
        suspected = [case for case in memory.cases.values() if case.deaths >= SUSPECTED]
        if last is not None:
            level = logging.WARNING if suspected else logging.INFO
            log.log(level, "the engine before this one died in a step; requests in it: %d, suspected, and to run alone: %d", len(last.requests), len(suspected))
        self._dirty = True
        self.save()

    # ------------------------------------------------------------ arrivals

    def refuses(self, source: _Source) -> bool:
        """Whether a request that arrives is not to be run any more."""
        memory = self._memory
        case = memory.cases.get(mark_of(source.rid)) if memory.cases else None
        if case is not None and case.alone >= CONDEMNED:
            log.error("a request has ended the engine %d times, %d times alone; it is refused", case.deaths, case.alone, extra={"rid": source.rid})
            while len(memory.blocked) >= MAX_BLOCKED:
                del memory.blocked[next(iter(memory.blocked))]
            memory.blocked[_hash(source)] = time.monotonic() + REMEMBERED_S
            self.forget(source.rid)
            self.save()
            return True
        return bool(memory.blocked) and memory.blocked.get(_hash(source), 0.0) > time.monotonic()

    # ------------------------------------------------------------ while they run

    @property
    def any(self) -> bool:
        """Whether anything speaks against anybody."""
        return bool(self._memory.cases)

    def suspected(self, req: Req) -> bool:
        """Whether it has to run alone."""
        case = self._memory.cases.get(req.mark)
        return case is not None and case.deaths >= SUSPECTED

    def accuse(self, req: Req, tokens: int) -> None:
        """A step with it, which would have computed so many of its tokens, has failed."""
        self._memory.cases[req.mark] = Case(tokens, deaths=SUSPECTED, at=time.monotonic())
        self._dirty = True

    def got_on(self, req: Req) -> None:
        """More of it is computed."""
        case = self._memory.cases.get(req.mark)
        if case is not None and (req.settled >= case.tokens or req.done):
            self.forget(req.rid)

    def forget(self, rid: str) -> None:
        """It is over, or cleared."""
        if self._memory.cases.pop(mark_of(rid), None) is not None:
            self._dirty = True

    def save(self) -> None:
        """Write what has changed. A disk that refuses costs the memory, never the engine."""
        if not self._dirty or self._path is None:
            return
        self._dirty = False
        aside = self._path.with_name(f"{self._path.name}.new")
        try:
            with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
                file.write(msgspec.msgpack.encode(self._memory))
            os.replace(aside, self._path)
        except OSError as error:
            log.warning("cannot write %s: %s", self._path, error.strerror)


def _hash(source: _Source) -> bytes:
    """The same for two requests that ask for the same, whoever asks; a seed may be chance, so it does not count."""
    what = msgspec.structs.replace(source, rid="", frontend=0, incarnation=0, epoch=0, priority=0, resumed=False, debug_text="")
    if isinstance(what, TokenizedGenerateReqInput):
        what = msgspec.structs.replace(what, output_ids=[], sampling=msgspec.structs.replace(what.sampling, seed=0))
    return hashlib.blake2b(msgspec.msgpack.encode(what), digest_size=16).digest()


def _load(path: Path, start_id: str) -> Memory:
    try:
        memory = msgspec.msgpack.decode(path.read_bytes(), type=Memory)
    except (OSError, msgspec.DecodeError, RecursionError):
        return Memory(start_id)
    return memory if memory.start_id == start_id else Memory(start_id)
