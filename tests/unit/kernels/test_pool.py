"""The thread pool, seen through the linears that it computes."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from llmd.kernels.shared_library import library
from tests.daemon import wait_for
from tests.unit.kernels import native

pytestmark = pytest.mark.skipif(library() is None, reason="the native kernels are not built")


def kernel_threads() -> dict[int, str]:
    """Name of each, by its id. One that has been joined may be here still for a moment: the kernel clears up after it has told."""
    names = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            names[int(task.name)] = (task / "comm").read_text().strip()
        except OSError:  # it has just ended
            continue
    return {id: name for id, name in names.items() if name.startswith("llmd-kernel")}


def problem() -> tuple[native.Bytes, native.Floats, native.Floats]:
    rng = np.random.default_rng(0)
    w, x = rng.standard_normal((500, 64)).astype(np.float32), rng.standard_normal((7, 64)).astype(np.float32)
    return native.packed("F32", 500, 64, w, "F32"), x, x @ w.T


@pytest.mark.parametrize("spin", [0, 1, 200, -1])
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_every_tile_is_computed_once_whether_workers_sleep_or_spin(threads: int, spin: int) -> None:
    weights, x, expected = problem()
    with native.pool(threads, spin) as handle:
        first = native.linear(weights, "F32", 500, x, handle, residual=np.ones_like(expected))  # adding twice would show
        assert np.allclose(first, expected + 1, atol=1e-4)
        for i in range(300):
            assert native.same_bits(native.linear(weights, "F32", 500, x, handle, residual=np.ones_like(expected)), first)
            if i % 100 == 50:
                time.sleep(0.01)  # long enough for workers to fall asleep


def test_threads_have_names_and_end_with_the_pool() -> None:
    before = kernel_threads()
    with native.pool(4) as handle:
        assert native.lib().llmd_pool_threads(handle) == 4
        made = kernel_threads().items() - before.items()
        assert sorted(name for _, name in made) == ["llmd-kernel-1", "llmd-kernel-2", "llmd-kernel-3"]
    wait_for("they are gone", lambda: not made & kernel_threads().items(), 10)


def test_pools_come_and_go() -> None:
    weights, x, expected = problem()
    before, threads = len(os.listdir("/proc/self/fd")), kernel_threads().keys()
    for _ in range(100):
        with native.pool(3) as handle:
            assert np.allclose(native.linear(weights, "F32", 500, x, handle), expected, atol=1e-4)
    for _ in range(100):
        with native.pool(3):  # never used
            pass
    assert len(os.listdir("/proc/self/fd")) == before
    wait_for("their threads are gone", lambda: kernel_threads().keys() <= threads, 10)


def test_workers_run_on_the_cpus_given() -> None:
    cpu = max(os.sched_getaffinity(0))
    cpus = np.array([cpu, cpu], dtype=np.int32)
    others = kernel_threads().keys()
    handle = native.lib().llmd_pool_new(2, cpus.ctypes.data, 2, -1)
    try:
        (worker,) = kernel_threads().keys() - others
        assert os.sched_getaffinity(worker) == {cpu}
        before, found = os.sched_getaffinity(0), []
        weights, x, _ = problem()

        def work() -> None:
            native.linear(weights, "F32", 500, x, handle)
            found.append(os.sched_getaffinity(0))

        caller = threading.Thread(target=work)
        caller.start()
        caller.join()
        assert (found, os.sched_getaffinity(0)) == ([{cpu}], before)
    finally:
        native.lib().llmd_pool_free(handle)


@pytest.mark.parametrize(("threads", "cpus"), [(0, []), (-1, []), (100_000, []), (2, [-1]), (2, [1 << 20])])
def test_pools_that_cannot_be_are_refused(threads: int, cpus: list[int]) -> None:
    array = np.array(cpus, dtype=np.int32)
    assert not native.lib().llmd_pool_new(threads, array.ctypes.data, len(cpus), -1)
