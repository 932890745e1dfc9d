"""Free memory as the kernel tells it, cgroups included."""

from __future__ import annotations

from pathlib import Path

from llmd.memory.host import read_host_memory

GIB = 2**30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = {"proc/meminfo": f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable:   {8 * GIB // 1024} kB\n"}


def test_without_cgroups_it_is_what_the_machine_has(tmp_path: Path) -> None:
    assert read_host_memory(write(tmp_path, MEMINFO)).free == 8 * GIB


def test_v2_takes_the_tightest_of_all_ancestors_and_spares_page_cache(tmp_path: Path) -> None:
    top = "sys/fs/cgroup/system.slice"
    root = write(
        tmp_path,
        MEMINFO
        | {
            "proc/self/cgroup": "0::/system.slice/llmd.service\n",
            f"{top}/memory.max": f"{4 * GIB}\n",
            f"{top}/memory.current": f"{3 * GIB}\n",
            f"{top}/memory.stat": f"anon 5\ninactive_file {GIB}\n",
            f"{top}/llmd.service/memory.max": "max\n",
            f"{top}/llmd.service/memory.current": "100\n",
        },
    )
    assert read_host_memory(root).free == 2 * GIB


def test_v1_is_read_at_the_mount_where_the_path_is_another_namespaces(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        MEMINFO
        | {
            "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu:/docker/abc\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB // 4}\n",
        },
    )
    assert read_host_memory(root).free == GIB - GIB // 4


def test_no_limit_is_no_limit(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        MEMINFO
        | {
            "proc/self/cgroup": "4:memory:/\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "5\n",
        },
    )
    assert read_host_memory(root).free == 8 * GIB


def test_more_used_than_allowed_is_nothing_free(tmp_path: Path) -> None:
    root = write(tmp_path, MEMINFO | {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "10\n", "sys/fs/cgroup/memory.current": "20\n"})
    assert read_host_memory(root).free == 0


def test_this_machine_has_memory() -> None:
    assert read_host_memory().free > 0
