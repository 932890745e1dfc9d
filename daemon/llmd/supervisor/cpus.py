"""How many compute threads one scheduler rank gets: the CPUs this process may use, and may use in full."""

from __future__ import annotations

import math
import os
from pathlib import Path


def available(cgroup_root: Path = Path("/sys/fs/cgroup"), self_cgroup: Path = Path("/proc/self/cgroup")) -> int:
    """CPUs of our affinity mask, fewer where a cgroup quota (v2 or v1) allows fewer. At least 1."""
    count = len(os.sched_getaffinity(0))
    quotas = [quota for path in _groups(cgroup_root, self_cgroup) if (quota := _quota(path)) is not None]
    return max(1, min([count, *(math.ceil(quota) for quota in quotas)]))


def _groups(root: Path, self_cgroup: Path) -> list[Path]:
    """Directories of our cgroup and all above it, in the v2 tree and in v1's cpu tree."""
    try:
        lines = self_cgroup.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base = root
        elif "cpu" in controllers.split(","):
            base = root / "cpu"
        else:
            continue
        here = base / path.lstrip("/")
        found += [here, *(parent for parent in here.parents if parent.is_relative_to(base))]
    return found


def _quota(path: Path) -> float | None:
    """CPUs worth of time, None where there is no limit."""
    try:
        if (path / "cpu.max").exists():
            limit, period = (path / "cpu.max").read_text(encoding="ascii").split()
            return None if limit == "max" else int(limit) / int(period)
        quota = int((path / "cpu.cfs_quota_us").read_text(encoding="ascii"))
        return quota / int((path / "cpu.cfs_period_us").read_text(encoding="ascii")) if quota > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
