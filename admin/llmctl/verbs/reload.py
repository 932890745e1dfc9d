"""Take the changed configuration file, or load other weights: `llmctl reload weights PATH`.

`reload` alone (also `llmctl config reload`, `systemctl reload llmd`, SIGHUP) reads the configuration again, from the same file, variables and flags.
All faults are told and nothing is changed; a key that needs a restart of llmd is refused by name, and nothing is changed either. Keys marked `live`
take effect at once; keys marked `engine` restart the engine with requests held, and if it does not come up, the old values are back.

`reload weights`: the new ones are checked first; if they do not come up, the old ones come back. Running requests finish first (`--mode drain`, for --timeout
at most), or end with an error (`abort`; `now`: only those that have begun to answer).
"""

from __future__ import annotations

import os

from llmctl import exits
from llmctl.context import Context
from llmctl.exits import CtlError
from llmctl.output import counted


def run(context: Context) -> int:
    options = context.options
    if options.what == "config":
        if options.path or options.mode or options.weights_version:
            raise CtlError(exits.USAGE, "PATH, --mode and --version go with `reload weights`", "llmctl reload weights PATH")
        return configuration(context)
    if not options.path:
        raise CtlError(exits.USAGE, "reload weights needs a PATH", "llmctl reload weights PATH")
    path = options.path if options.path == "dummy" else os.path.abspath(options.path)
    try:
        os.stat(path)
    except FileNotFoundError:
        if path != "dummy":
            raise CtlError(exits.BAD_INPUT, f"{path}: there is no such file or directory") from None
    except OSError:
        pass  # the daemon may be allowed to look where we are not
    reply = context.change("/v1/reload", {"path": path, "mode": options.mode, "version": options.weights_version}, waits=True)
    data = (reply or {}).get("data") or {}
    return context.report(reply, f"reloaded: weights {data.get('weights_version')}, engine epoch {data.get('epoch')}")


def configuration(context: Context) -> int:
    """`reload` without more."""
    reply = context.change("/v1/config/reload", {}, waits=True)
    changed = ((reply or {}).get("data") or {}).get("changed") or []
    done = f"reloaded: {counted(len(changed), 'key')} changed: {', '.join(changed)}" if changed else "reloaded: nothing has changed"
    return context.report(reply, done)
