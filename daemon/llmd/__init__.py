"""llmd: an LLM server that an operator runs the way they run a database.

From Python: `from llmd import Engine, launch_server, ServerArgs`. Importing llmd itself imports nothing else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmd.config import ServerArgs as ServerArgs
    from llmd.engine.api import Engine as Engine
    from llmd.engine.foreground import launch_server as launch_server

__version__ = "0.1.0"

#: Public name -> the module it is in. By name, so that no process of llmd gets more than it asks for.
_PUBLIC = {"Engine": "llmd.engine.api", "ServerArgs": "llmd.config", "launch_server": "llmd.engine.foreground"}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'llmd' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_PUBLIC[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
