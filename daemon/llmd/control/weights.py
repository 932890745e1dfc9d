"""Other weights: may they be loaded from there, what is in them, and do they fit what runs?"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path
from typing import Any

import msgspec

from llmd.errors import EXIT_CONFIG, RequestError
from llmd.plan.spec import Boot, ModelFiles

#: Seconds that the checking child may take.
CHECK_TIMEOUT = 30.0

#: What must be equal, in the order in which it is named: of the files, then of the model's own config.json.
_OF_FILES = ("architecture", "vocab_size", "tokenizer_size")
_OF_CONFIG = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
_LAST = ("quantization", "context_length", "eos_token_ids", "bos_token_id")


def allowed_path(boot: Boot, path: str) -> str:
    """The real path to load from. Raises RequestError: 403 outside the allowed directories, 404 where nothing is, 400."""
    if path == "dummy" and boot.files.kind == "dummy":
        return path
    if not path.startswith("/"):
        raise RequestError("path must be absolute", param="path")
    try:
        real = Path(path).resolve()
        there = real.exists()
    except (OSError, RuntimeError, ValueError) as fault:  # a name too long, links in a circle, a character that no path has
        why = fault.strerror if isinstance(fault, OSError) else str(fault).partition(":")[0]
        raise RequestError(f"path cannot be followed: {why}", param="path") from None
    if not any(real.is_relative_to(directory) for directory in _allowed_dirs(boot)):
        error = RequestError("path is outside of reload.allowed_dirs", code="forbidden", param="path")
        error.hint = "add its directory to reload.allowed_dirs"
        raise error
    if not there:
        raise RequestError("there is nothing at this path", code="not_found", param="path")
    return str(real)


def _allowed_dirs(boot: Boot) -> list[Path]:
    allowed = boot.args.reload.allowed_dirs
    if allowed is not None:
        return [Path(directory).resolve() for directory in allowed]
    own = [Path(boot.cache_dir)] if boot.cache_dir else []
    if boot.files.path:
        model = Path(boot.files.path)
        own.append(model if model.is_dir() else model.parent)
    return [directory.resolve() for directory in own]


async def check(boot: Boot) -> ModelFiles:
    """Have the files of `boot.args.model.path` checked as at start, by a child. Raises RequestError."""
    request = msgspec.json.encode({"args": boot.args, "cache_dir": boot.cache_dir, "places": [boot.cache_dir, str(boot.ports.private)]})
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "llmd.store.check", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        output, faults = await asyncio.wait_for(child.communicate(request), CHECK_TIMEOUT)
    except TimeoutError:
        raise RequestError(f"checking the files took more than {CHECK_TIMEOUT:g} s", code="timeout", param="path") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            if child.returncode is None:
                child.kill()
    text = faults.decode(errors="replace").strip()
    if child.returncode == EXIT_CONFIG:
        raise RequestError(text or "these files cannot be loaded", param="path")
    if child.returncode != 0:
        raise RequestError(f"the files could not be checked (status {child.returncode}): {text[-500:]}", param="path")
    try:
        return msgspec.json.decode(output, type=ModelFiles)
    except msgspec.DecodeError as error:
        raise RequestError(f"the files could not be checked: {error}", code="internal_error", param="path") from None


def mismatch(running: ModelFiles, other: ModelFiles) -> str:
    """The first thing in which `other` differs where it must not; empty: they fit."""
    here, there = _config(running), _config(other)
    pairs = [(name, getattr(running, name), getattr(other, name)) for name in _OF_FILES]
    pairs += [(name, here.get(name), there.get(name)) for name in _OF_CONFIG]
    pairs += [(name, getattr(running, name), getattr(other, name)) for name in _LAST]
    return next((f"{name} is {new}, running {old}" for name, old, new in pairs if old != new), "")


def _config(files: ModelFiles) -> dict[str, Any]:
    """The model's config.json; empty where there is none to read."""
    try:
        config = msgspec.json.decode((Path(files.small_dir) / "config.json").read_bytes())
    except (OSError, msgspec.DecodeError):
        return {}
    return config if isinstance(config, dict) else {}
