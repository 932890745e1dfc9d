"""RUN/private/supervisord.conf: what supervisord and supervisorctl need to know, and nothing that its format could misread.

In that format ` #` and ` ;` cut a value, `%` expands (`%s` into the whole environment), and quotes do not protect. So only
fixed tokens and process names stand here; command lines, environments and paths stay in the plan, and `llmd.supervisor.options`
puts them in when a process is started. A plain supervisord that is given this file is refused by llmd's RPC factories.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from llmd.plan.spec import ProcessSpec

#: First word of every command; the second is the process's name in the plan.
COMMAND = "/llmd/plan"
#: Events buffered for control while it is busy. 10, supervisord's own figure, loses some when an engine of 8 ranks restarts.
BUFFER_SIZE = 4096
#: Enough for the supervisor; each child closes 3..MINFDS before exec.
MINFDS = 256

_NAME = re.compile(r"^[a-z]+-[0-9]+$")

_HEAD = f"""\
; Written by llmd at each start; changes are lost. For supervisorctl.
[unix_http_server]
file = %(here)s/supervisor.sock
chmod = 0600

[supervisorctl]
serverurl = unix://%(here)s/supervisor.sock

[rpcinterface:supervisor]
supervisor.rpcinterface_factory = llmd.supervisor.rpc:supervisor_namespace

[rpcinterface:llmd]
supervisor.rpcinterface_factory = llmd.supervisor.rpc:llmd_namespace

[supervisord]
nodaemon = true
silent = true
nocleanup = true
logfile = %(here)s/supervisord.log
pidfile = %(here)s/supervisord.pid
childlogdir = %(here)s
minfds = {MINFDS}
minprocs = 1
"""

_KINDS = {
    "control": ("eventlistener", f"events = PROCESS_STATE,REMOTE_COMMUNICATION,SUPERVISOR_STATE_CHANGE\nbuffer_size = {BUFFER_SIZE}\n"),
    # The address is a placeholder: the adopted socket takes its place.
    "frontend": ("fcgi-program", "socket = tcp://127.0.0.1:1\n"),
}


def render(specs: Iterable[ProcessSpec], stop_timeout: float) -> str:
    """The whole file."""
    specs = tuple(specs)
    engine = [spec.name for spec in specs if spec.group == "engine"]
    group = f"\n[group:engine]\nprograms = {','.join(engine)}\n" if engine else ""
    return _HEAD + "".join(_program(spec, stop_timeout) for spec in specs) + group


def _program(spec: ProcessSpec, stop_timeout: float) -> str:
    if not _NAME.match(spec.name):
        raise ValueError(f"{spec.name!r} cannot be a process name")
    kind, more = _KINDS.get(spec.role, ("program", ""))
    # autostart, autorestart, startsecs, startretries: llmd's policy starts and restarts, supervisord never does.
    return f"""
[{kind}:{spec.name}]
command = {COMMAND} {spec.name}
autostart = false
autorestart = false
startsecs = 0
startretries = 0
stopsignal = TERM
stopwaitsecs = {math.ceil(stop_timeout)}
killasgroup = true
stdout_logfile = NONE
stderr_logfile = NONE
{more}"""
