"""To the supervisor: reports, lines of JSON over a socket of their own; and XML-RPC: `llmd.kill`, `llmd.restartEngine`, `llmd.shutdown`, `llmd.giveUp`.

Every call has a deadline and carries JSON both ways. The connection for reports is kept, and no other call can hold them up:
the supervisor replaces a control whose reports stop. All other calls run in threads.
"""

from __future__ import annotations

import asyncio
import http.client
import os
import signal
import socket
import time
import xmlrpc.client
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from xml.parsers.expat import ExpatError

import msgspec

from llmd.control import snapshot
from llmd.control.snapshot import Report, Snapshot

#: Seconds for a call; the supervisor answers in milliseconds.
CALL_TIMEOUT = 3.0

#: Bytes of an answer to a report: it holds the last words of all processes.
LONGEST_ANSWER = 16 * 2**20


class SupervisorAway(Exception):
    """The supervisor did not answer, or refused."""


class OutcomeUnknown(SupervisorAway):
    """The call was sent and not answered: it may have been carried out, or may still be."""


class _Answer(msgspec.Struct):
    ok: bool
    message: str = ""
    epoch: int = 0


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def call(path: Path, method: str, *arguments: str, timeout: float = CALL_TIMEOUT) -> Any:
    """One XML-RPC call, blocking. Raises SupervisorAway; OutcomeUnknown once the call may have arrived."""
    connection = _UnixConnection(path, timeout)
    sent = False
    try:
        body = xmlrpc.client.dumps(arguments, method).encode()
        connection.connect()
        sent = True
        connection.request("POST", "/RPC2", body, {"Content-Type": "text/xml"})
        response = connection.getresponse()
        data = response.read()
        if response.status != 200:
            raise SupervisorAway(f"{method}: HTTP {response.status}")
        values, _ = xmlrpc.client.loads(data)
        return values[0]
    except xmlrpc.client.Fault as fault:
        raise SupervisorAway(f"{method}: {fault.faultString}") from None
    except (OSError, http.client.HTTPException, ExpatError, xmlrpc.client.Error, IndexError) as error:
        raise (OutcomeUnknown if sent else SupervisorAway)(f"{method}: {type(error).__name__}: {error}") from None
    finally:
        connection.close()


class _Line:
    """Reports over one kept connection, in the event loop. One may be sent twice: a kept connection may be at its end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def call(self, report: bytes) -> bytes:
        """The answer to one report, within CALL_TIMEOUT. Raises SupervisorAway."""
        try:
            async with asyncio.timeout(CALL_TIMEOUT):
                kept = self._streams is not None
                try:
                    return await self._exchange(report)
                except (OSError, EOFError):
                    self.close()
                    if not kept:
                        raise
                    return await self._exchange(report)
        except (OSError, EOFError, ValueError) as error:
            self.close()
            raise SupervisorAway(f"report: {type(error).__name__}: {error}") from None
        except asyncio.CancelledError:
            self.close()
            raise

    def close(self) -> None:
        """The next call connects anew."""
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None

    async def _exchange(self, report: bytes) -> bytes:
        if self._streams is None:
            self._streams = await asyncio.open_unix_connection(self._path, limit=LONGEST_ANSWER)
        reader, writer = self._streams
        writer.write(report + b"\n")
        answer = await reader.readline()
        if not answer.endswith(b"\n"):
            raise EOFError("the connection has ended")
        return answer


class SupervisorClient:
    """The supervisor, as control sees it."""

    def __init__(self, path: Path, reports: Path) -> None:
        """The sockets for XML-RPC and for reports."""
        self._path = path
        self._reports = _Line(reports)
        self._calls = ThreadPoolExecutor(2, thread_name_prefix="supervisor")

    async def report(self, report: Report) -> Snapshot:
        """Tell the state, get the snapshot. Raises SupervisorAway."""
        answer = await self._reports.call(msgspec.json.encode(report))
        try:
            return snapshot.decode(answer)
        except msgspec.DecodeError as error:
            raise SupervisorAway(f"report: {error}") from None

    async def kill(self, name: str, pid: int, why: str = "") -> None:
        """Have a hung child's stacks dumped and the child killed, if it is still that process."""
        await self._do("llmd.kill", {"name": name, "pid": pid, "reason": "hang", "why": why, "until": time.monotonic() + CALL_TIMEOUT})

    async def restart_engine(self, reason: str) -> int:
        """Restart the engine group as one; not counted in its budget. Returns the epoch of the engine that this ends."""
        return (await self._do("llmd.restartEngine", {"reason": reason, "until": time.monotonic() + CALL_TIMEOUT})).epoch

    async def configure(self, changed: dict[str, Any]) -> None:
        """Have the supervisor itself go by other values: `log_level`, `restart`, `drain_timeout`, `stop_timeout`, `control_timeout`."""
        await self._do("llmd.configure", changed)

    async def restart(self, unit: str, reason: str) -> None:
        """The same for one unit: `engine`, `detokenizer-0`, `frontend-N`."""
        await self._do("llmd.restart", {"unit": unit, "reason": reason, "until": time.monotonic() + CALL_TIMEOUT})

    async def restart_all(self) -> None:
        """Stop llmd as a whole, as on SIGTERM, and start it anew in the same process."""
        await self._do("llmd.restartAll", {"until": time.monotonic() + CALL_TIMEOUT})

    async def shutdown(self, status: int, why: str) -> None:
        """Stop everything in order, then exit with `status`."""
        await self._do("llmd.shutdown", {"status": status, "why": why})

    async def give_up(self, status: int, why: str) -> None:
        """End the daemon at once with `status`."""
        await self._do("llmd.giveUp", {"status": status, "why": why})

    def terminate(self, pid: int) -> None:
        """Ask the supervisor to stop as `systemctl stop` does, so that there is one way to stop. Raises SupervisorAway."""
        if pid != os.getppid():
            raise SupervisorAway(f"process {pid} is not the supervisor any more")
        os.kill(pid, signal.SIGTERM)

    def close(self) -> None:
        self._reports.close()
        self._calls.shutdown(wait=False, cancel_futures=True)

    async def _do(self, method: str, argument: Any) -> _Answer:
        text = str(await asyncio.get_running_loop().run_in_executor(self._calls, call, self._path, method, msgspec.json.encode(argument).decode()))
        try:
            answer = msgspec.json.decode(text, type=_Answer)
        except msgspec.DecodeError as error:
            raise SupervisorAway(f"{method}: {error}") from None
        if not answer.ok:
            raise SupervisorAway(f"{method}: {answer.message}")
        return answer
