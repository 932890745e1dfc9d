"""`llmd pull hf:OWNER/NAME[@REVISION]`: a checkpoint from the Hugging Face hub, through its own client (an optional dependency).

Only what llmd reads is fetched: safetensors and small JSON or Jinja files, never pickles and never code.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from llmd.config.server_args import ModelArgs
from llmd.errors import ConfigError, ResourceError
from llmd.store.locks import locked
from llmd.store.model_files import model_files

PREFIX: Final = "hf:"
PATTERNS: Final = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja")

_KEPT: Final = "what has come so far is kept; the next try goes on from there"
_OFFLINE: Final = "is there a network? The client goes by HTTPS_PROXY, HF_ENDPOINT and HF_HUB_OFFLINE"

_REPOSITORY: Final = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")


def directory(repository: str, revision: str | None, cache_dir: Path) -> Path:
    """Where a pulled repository lies."""
    name = repository.replace("/", "--") + (f"@{revision.replace('/', '--')}" if revision else "")
    return cache_dir / "models" / f"hf--{name}"


def pull(name: str, cache_dir: Path, report: Callable[[str], None]) -> Path:
    """Directory of the repository `name` (hf:OWNER/NAME[@REVISION]), fetched and checked. Raises ConfigError, ResourceError."""
    match = _REPOSITORY.fullmatch(name.removeprefix(PREFIX))
    if match is None:
        raise ConfigError(f"{name}: expected hf:OWNER/NAME or hf:OWNER/NAME@REVISION")
    repository, revision = match[1], match[2]
    target = directory(repository, revision, cache_dir)
    if target.is_dir():
        report(f"{name} is in {target}")
        return target
    client = _client()
    work = target.with_name(f".pull-{target.name}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked(target.with_name(f".{target.name}.lock"), report):
            if not target.is_dir():
                report(f"downloading {repository}" + (f" at {revision}" if revision else ""))
                # A directory that was begun is gone on with; nobody sees it before it is whole.
                client.snapshot_download(repository, revision=revision, local_dir=str(work), allow_patterns=list(PATTERNS))
                report(f"checking {name}")
                model_files(ModelArgs(path=str(work)), cache_dir)
                os.replace(work, target)
    except OSError as error:
        why, hint = _why(error)
        raise ResourceError(f"cannot pull {name}: {why}", hint=_KEPT if work.exists() else hint) from None
    except (ConfigError, ResourceError):
        raise
    except Exception as error:  # the client's errors are its own
        raise ResourceError(f"cannot pull {name}: {_named(error)}") from None
    report(f"{name} is in {target}: set model.path to that")
    return target


def _why(error: OSError) -> tuple[str, str]:
    """In one line, and what to do. Of a hub that it could not ask the client raises an error that speaks of its own cache; why is that error's cause."""
    cause = error.__cause__
    if isinstance(error, FileNotFoundError) and cause is not None:
        return f"the hub cannot be asked: {_named(cause)}", _OFFLINE
    return _line(error) or type(error).__name__, ""


def _named(error: BaseException) -> str:
    return ": ".join(filter(None, (type(error).__name__, _line(error))))


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _client() -> Any:
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError:
        raise ResourceError("pulling from the hub needs huggingface_hub", hint="pip install 'llmd[hub]'") from None
