"""The short-lived checking child: `python -m llmd.store.check`.

Reads {"args": ServerArgs, "cache_dir": str, "places": [str]} as JSON on stdin (`places` as of `model_files`) and prints the `ModelFiles` as JSON on
stdout. Every fault is a line on stderr, then the exit status is the error's (78 for files that can never work). A child, so that a hostile file
cannot harm the supervisor.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import NoReturn

import msgspec

from llmd import failpoints
from llmd.config import ServerArgs
from llmd.errors import EXIT_OK, ConfigError, LlmdError
from llmd.store.model_files import model_files


class _Request(msgspec.Struct):
    args: ServerArgs
    cache_dir: str
    places: tuple[str, ...] = ()


def main() -> int:
    """Check one model; returns the exit status."""
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=_Request)
    failpoints.arm(os.environ.get(failpoints.ENV, ""))  # the supervisor takes it out of the environment unless it may be used
    try:
        failpoints.hit("store.check")
        files = model_files(request.args.model, Path(request.cache_dir), [Path(place) for place in request.places])
    except LlmdError as error:
        lines = error.faults if isinstance(error, ConfigError) else [error.message]
        hint = f" ({error.hint})" if error.hint else ""
        print("\n".join(line + hint for line in lines), file=sys.stderr)
        return error.exit_status
    sys.stdout.write(msgspec.json.encode(files).decode() + "\n")
    return EXIT_OK


def _leave(status: int) -> NoReturn:
    """End without taking a whole tokenizer apart first: the start waits for this process."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    gc.disable()  # what is read is needed to the end
    _leave(main())
