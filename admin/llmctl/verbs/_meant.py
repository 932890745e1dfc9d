"""With what llmd was started, or would be: the configuration that `doctor` has looked at, as whom, and what `llmd check` says of it."""

from __future__ import annotations

import os
import pwd
import re
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any, Final

from llmctl import find
from llmctl.context import Context
from llmctl.exits import CtlError

#: What the unit's command line names.
UNIT_CONFIG: Final = "/etc/llmd/llmd.yaml"
#: Variables that set a key.
_VARIABLE: Final = re.compile(r"LLMD_[A-Z0-9_]+")
#: How systemd names the directories of a service, and how the lock file does.
_PLACES: Final = (("STATE_DIRECTORY", "state_dir"), ("LOGS_DIRECTORY", "log_dir"), ("CACHE_DIRECTORY", "cache_dir"))
PATIENCE: Final = 60.0


@dataclass(frozen=True)
class Meant:
    """One way to start llmd."""

    file: str | None
    overrides: tuple[str, ...] = ()
    environ: dict[str, str] = field(default_factory=dict)
    directory: str | None = None
    failpoints: bool = False
    whose: str = ""
    """Of which daemon this is known; empty: of none."""
    places: dict[str, str] = field(default_factory=dict)
    """As systemd would name its directories: where it found itself then is not to be guessed from here."""
    uid: int | None = None
    """As whom it runs; None: as we do."""

    @property
    def name(self) -> str:
        parts = [self.file or os.environ.get("LLMD_CONFIG") or "the defaults", *(f"--set {each}" for each in self.overrides)]
        parts += [f"{name}={value}" for name, value in self.environ.items()]
        return " ".join(parts) + (f" ({self.whose})" if self.whose else "")

    @property
    def out_of_reach(self) -> bool:
        """Whether only another user could tell what llmd may do."""
        return self.uid not in (None, os.geteuid()) and os.geteuid() != 0

    def check(self) -> subprocess.CompletedProcess[str]:
        """`llmd check` with all that, as the user that llmd runs as. Raises OSError where that one may not even start it."""
        command = [sys.executable, "-P", "-m", "llmd.cli", "check", *(["-c", self.file] if self.file else []), *(f"--set={each}" for each in self.overrides)]
        command += ["--allow-failpoints"] if self.failpoints else []
        ours = {name: value for name, value in os.environ.items() if not self.whose or not name.startswith("LLMD_")}
        more: dict[str, Any] = {}
        if self.uid not in (None, os.geteuid()):
            user = pwd.getpwuid(self.uid or 0)
            ours["HOME"] = user.pw_dir
            more = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": os.getgrouplist(user.pw_name, user.pw_gid)}
        env = ours | self.places | self.environ
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False, env=env, cwd=self.directory or "/", **more)


def meant(context: Context, status: dict[str, Any]) -> Meant:
    """What `-c` names; else what the daemon, or the last one that was started here, has written down; else what the unit would take.

    `status`: the daemon's, empty where none answers."""
    place = find.choose(context.client.candidates)
    places = _places(place) if place is not None else {}
    if (file := getattr(context.options, "config", None)) is not None:
        running = place is not None and place.pid is not None
        return Meant(os.path.abspath(file), failpoints=bool(status.get("failpoints")), places=places if running else {})
    known = place.lock.get("config") if place is not None else None
    if place is not None and isinstance(known, dict):
        environ = {str(name): str(value) for name, value in (known.get("environ") or {}).items() if _VARIABLE.fullmatch(str(name))}
        directory = str(known.get("directory") or "")
        return Meant(
            str(known["file"]) if known.get("file") else None,
            tuple(str(each) for each in known.get("overrides") or []),
            environ,
            directory if os.path.isdir(directory) else None,
            bool(known.get("failpoints")),
            "of the llmd that runs" if place.pid is not None else "of the last start",
            places,
            place.run_dir.stat().st_uid,
        )
    usual = os.environ.get("LLMD_CONFIG") is None and os.path.exists(UNIT_CONFIG)
    return Meant(_running_config(context) or (UNIT_CONFIG if usual else None), directory=os.getcwd())


def _places(place: find.Place) -> dict[str, str]:
    return {"RUNTIME_DIRECTORY": str(place.run_dir), **{name: str(place.lock[key]) for name, key in _PLACES if place.lock.get(key)}}


def _running_config(context: Context) -> str | None:
    try:
        answer: dict[str, Any] = context.get("/v1/config")
    except CtlError:
        return None
    file = answer.get("config_file")
    return str(file) if file else None
