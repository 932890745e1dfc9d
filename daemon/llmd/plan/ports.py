"""`PortArgs`: the name of every endpoint, derived from the run directory alone."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from llmd.errors import ResourceError

#: sockaddr_un.sun_path holds 108 bytes with its terminating zero (man 7 unix).
SOCKET_PATH_LIMIT = 107


def check_socket_path(path: Path) -> Path:
    """Return `path`; raise ResourceError where the kernel could not bind it."""
    size = len(str(path).encode())
    if size > SOCKET_PATH_LIMIT:
        raise ResourceError(f"socket path is {size} bytes, the limit is {SOCKET_PATH_LIMIT}: {path}", hint="set a shorter run_dir")
    return path


class PortArgs(Struct, frozen=True):
    """Endpoints under RUN/private (0700), and the public files of RUN."""

    run_dir: str

    @property
    def private(self) -> Path:
        return Path(self.run_dir) / "private"

    def _ipc(self, name: str) -> str:
        return f"ipc://{check_socket_path(self.private / name)}"

    def scheduler_input(self, epoch: int) -> str:
        """PUSH frontend -> PULL entry rank; a new one for each epoch of the engine."""
        return self._ipc(f"scheduler_input.{epoch}")

    @property
    def detokenizer(self) -> str:
        """PUSH scheduler -> PULL detokenizer."""
        return self._ipc("detokenizer")

    def tokenizer(self, frontend: int) -> str:
        """PUSH detokenizer, scheduler -> PULL frontend N."""
        return self._ipc(f"tokenizer.{frontend}")

    @property
    def control(self) -> str:
        """DEALER every worker <-> ROUTER control."""
        return self._ipc("control")

    @property
    def supervisor_socket(self) -> Path:
        """supervisord's XML-RPC."""
        return check_socket_path(self.private / "supervisor.sock")

    @property
    def reports(self) -> Path:
        """control's reports to the supervisor."""
        return check_socket_path(self.private / "reports.sock")

    @property
    def supervisord_conf(self) -> Path:
        return self.private / "supervisord.conf"

    @property
    def boot(self) -> Path:
        return self.private / "boot.msgpack"

    @property
    def small(self) -> Path:
        """Directory of the model's small files where cache_dir cannot be written; gone with this life."""
        return self.private / "small"

    @property
    def control_state(self) -> Path:
        return self.private / "control.state"

    def journal(self, rank: int) -> Path:
        """What the step that runs on a scheduler works on (llmd.plan.journal)."""
        return self.private / f"step.{rank}"

    def suspects(self, rank: int) -> Path:
        """What speaks against requests, across engines (llmd.scheduler.suspects)."""
        return self.private / f"suspects.{rank}"

    @property
    def connections(self) -> Path:
        """How many connections each frontend has (llmd.frontend.accepting)."""
        return self.private / "connections"

    @property
    def admin_socket(self) -> Path:
        return Path(self.run_dir) / "admin.sock"

    @property
    def lock(self) -> Path:
        """flock held by the supervisor; holds JSON {pid, start_id, started_at, version, http, admin_socket}."""
        return Path(self.run_dir) / "llmd.lock"

    @property
    def last_state(self) -> Path:
        """JSON {state, stage, reason, at}, written by the supervisor on each change: what llmctl shows when nobody answers."""
        return Path(self.run_dir) / "state.json"

    def check(self, frontends: int) -> None:
        """Raise ResourceError if any socket path of this run directory is too long."""
        for name in ("control", "detokenizer", f"tokenizer.{frontends}", "scheduler_input.1000000", "supervisor.sock.1000000"):
            check_socket_path(self.private / name)
