"""How much memory this process may still take: /proc/meminfo and the cgroups it is in, v1 and v2.

`root` stands in for `/` in tests. A file that is missing or cannot be read sets no limit.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

#: cgroup v1 writes "no limit" as a number near 2**63 rounded to pages.
_UNLIMITED = 2**60


#: One of these is there where torch's `cuda` can be: NVIDIA's driver, WSL's, AMD's, Tegra's.
_GPU_DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd", "/dev/nvhost-gpu")


def may_have_gpu() -> bool:
    """Whether the driver of a GPU is there; whether it works is for the engine to find out."""
    return any(os.path.exists(path) for path in _GPU_DEVICES)


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes. `cgroup_left` is the least that any cgroup above this process leaves, None without a limit."""

    available: int
    cgroup_left: int | None = None

    @property
    def free(self) -> int:
        return self.available if self.cgroup_left is None else max(0, min(self.available, self.cgroup_left))


def read_host_memory(root: Path = Path("/")) -> HostMemory:
    """What the kernel says now."""
    available = _fields(root / "proc/meminfo").get("MemAvailable:", 0) * 1024
    left = [value for directory in _cgroups(root) if (value := _left(directory)) is not None]
    return HostMemory(available, min(left) if left else None)


def _cgroups(root: Path) -> list[Path]:
    """Directories of this process's memory cgroup and its ancestors, as far as this mount shows them (a container sees only its own top)."""
    directories = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        parts = Path(path.lstrip("/")).parts
        directories += [top.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return [directory for directory in directories if directory.is_dir()]


def _left(directory: Path) -> int | None:
    """Limit minus usage, the usage without the page cache that the kernel gives up first (as MemAvailable counts it)."""
    for limit_name, usage_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, usage = _text(directory / limit_name).strip(), _text(directory / usage_name).strip()
        if limit.isdigit() and usage.isdigit() and int(limit) < _UNLIMITED:
            cache = _fields(directory / "memory.stat").get(cache_name, 0)
            return int(limit) - max(0, int(usage) - cache)
    return None


def _fields(path: Path) -> dict[str, int]:
    """`name number ...` lines as a dictionary."""
    words = [line.split() for line in _text(path).splitlines()]
    return {w[0]: int(w[1]) for w in words if len(w) >= 2 and w[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
