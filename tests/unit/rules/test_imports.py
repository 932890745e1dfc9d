"""No process but the engine ever loads torch or transformers, nor does the engine where the native kernels serve.

Checked in a fresh interpreter, after importing its main module.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from tests.daemon import SLOW

HEAVY = ("torch", "transformers")
MAINS = {
    "llmd.supervisor.main": (*HEAVY, "zmq", "pydantic", "starlette"),
    "llmd.frontend.main": (*HEAVY, "fastapi", "pydantic", "numpy"),
    "llmd.control.main": (*HEAVY, "fastapi", "pydantic", "numpy"),
    "llmd.control.admin": (*HEAVY, "fastapi", "pydantic", "numpy"),
    "llmd.detokenizer.main": HEAVY,
    "llmd.scheduler.main": (*HEAVY, "starlette", "pydantic"),
    "llmd.model.native_loader": HEAVY,
    "llmd.model.native_runner": HEAVY,
    "llmd.worker": (*HEAVY, "starlette"),
    "llmd": (*HEAVY, "zmq", "msgspec", "asyncio"),
    "llmd.engine.api": (*HEAVY, "starlette", "uvicorn"),
    "llmd.engine.child": (*HEAVY, "zmq", "pydantic", "starlette", "numpy"),
    "llmd.launch_server": (*HEAVY, "zmq", "pydantic", "starlette", "numpy"),
    "llmctl.main": (*HEAVY, "zmq", "yaml", "numpy", "llmd.config"),
    "llmd.config.load": (*HEAVY, "zmq", "pydantic", "numpy"),
}


@pytest.mark.parametrize("module", MAINS)
def test_a_process_stays_light(module: str) -> None:
    assert importlib.util.find_spec(module), f"{module} is gone"
    code = f"import sys, {module}; print(*sorted(name for name in {MAINS[module]!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60 * SLOW, check=True)
    assert done.stdout.split() == []
