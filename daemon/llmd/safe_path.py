"""Takes the working directory out of `sys.path`, where `python -m` puts it before all modules: what lies there is not ours to run.

For modules that people start with `python -m`, before their imports; our own children get `-P`. Imports nothing that is not loaded already.
"""

from __future__ import annotations

import os
import sys


def leave_directory() -> None:
    """Nothing to do where `-P` or PYTHONSAFEPATH has been given, or the working directory is gone."""
    try:
        if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
            del sys.path[0]
    except OSError:
        return
