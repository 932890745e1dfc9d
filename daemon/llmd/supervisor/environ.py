"""The environment of children: ours, without what is meant for the supervisor alone."""

from __future__ import annotations

from collections.abc import Mapping

from llmd.failpoints import ENV as ENV_FAILPOINTS
from llmd.plan.context import ENV_CRASHED, ENV_EPOCH, ENV_INCARNATION, ENV_PARENT

_SYSTEMD = frozenset({"NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "WATCHDOG_USEC", "WATCHDOG_PID"})
_PRIVATE = _SYSTEMD | {ENV_EPOCH, ENV_INCARNATION, ENV_PARENT, ENV_CRASHED}


def cleaned(environ: Mapping[str, str], *, failpoints: bool) -> dict[str, str]:
    """What every child inherits."""
    hidden = _PRIVATE if failpoints else _PRIVATE | {ENV_FAILPOINTS}
    return {name: value for name, value in environ.items() if name not in hidden and not name.startswith("SUPERVISOR_")}


def child_env(base: Mapping[str, str], own: Mapping[str, str], *, incarnation: int, epoch: int, parent: int, crashed: bool) -> dict[str, str]:
    """One start of one child. `crashed`: its last end was nobody's wish."""
    return {**base, **own, ENV_INCARNATION: str(incarnation), ENV_EPOCH: str(epoch), ENV_PARENT: str(parent), ENV_CRASHED: str(int(crashed))}
