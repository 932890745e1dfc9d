"""What llmd starts never takes a module from the working directory: every interpreter of ours gets -P."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
#: A developer's tools, which run in the checkout.
TOOLS = {"daemon/llmd/kernels/build.py"}


def test_every_child_is_started_with_a_safe_path() -> None:
    calls = []
    for path in sorted([*(ROOT / "daemon").rglob("*.py"), *(ROOT / "admin").rglob("*.py")]):
        if str(path.relative_to(ROOT)) not in TOOLS:
            calls += [(path.name, call) for call in re.findall(r"sys\.executable,\s*\S+", path.read_text())]
    assert len(calls) >= 8
    again = ("main.py", "sys.executable, sys.orig_argv)")  # llmd itself, with the options it has
    assert [call for call in calls if call != again and not call[1].endswith('"-P",')] == []
