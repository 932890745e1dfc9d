"""What a replaced control does about an operation that the one before it had begun: finish it, or say that it was not.

What is committed goes on to its end, and so does whatever may be done twice; an operation that had changed nothing yet fails, and leaves all as it was.
"""

from __future__ import annotations

from typing import Any

from llmd.control import config_reload, drain, reload, verbs
from llmd.control.core import Core
from llmd.control.operation import Operation
from llmd.control.params import convert
from llmd.control.reload import Save
from llmd.control.state_file import Began
from llmd.control.verbs import Keep
from llmd.errors import RequestError


async def finish(core: Core, operation: Operation, began: Began, keep: Keep, save: Save) -> dict[str, Any]:
    """Returns its `data`, or raises RequestError, as its first run would have. `began`: how things were then."""
    verb = operation.verb
    if verb in ("reload", "config/reload"):
        return await _finish_reload(core, verb, keep, save)
    if verb not in ("flush", "drain", "restart", "resume", "log-level"):
        operation.outcome = "unknown"
        raise RequestError("control was replaced while it ran; what it had begun may have taken effect", code="aborted")
    params: Any = convert(operation.params, verbs.VERBS[verb])
    match verb:
        case "flush":
            return await verbs.flush(core, params, keep, began)
        case "drain":
            return await verbs.drain(core, params, keep, began)
        case "restart":
            return await verbs.restart(core, params, keep, began)
        case _:
            return await verbs.RUN[verb](core, params, keep)


async def _finish_reload(core: Core, verb: str, keep: Keep, save: Save) -> dict[str, Any]:
    if core.remembered.previous_boot is not None:
        return await (reload.run(core, None, None, keep, save) if verb == "reload" else config_reload.run(core, None, keep, save))
    if core.machine.can("reloaded"):
        core.machine.fire("reloaded", "control was replaced")
    if core.machine.state != "draining":
        await drain.resume(core)  # it may have been draining for this
    raise RequestError("control was replaced before anything was changed", code="aborted")
