"""Shared by all tests: nothing of the caller's llmd or proxies leaks in, GPU and soak tests are left out where they cannot run."""

from __future__ import annotations

import os
import shutil

import hypothesis
import pytest

# A machine that is busy with something else is no fault of what is tested.
hypothesis.settings.register_profile("llmd", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("llmd")


def pytest_configure(config: pytest.Config) -> None:
    """A developer's own LLMD_ settings and proxies must not decide a test."""
    for name in list(os.environ):
        if (name.startswith("LLMD_") and not name.startswith("LLMD_TEST_")) or name.lower() in ("http_proxy", "https_proxy", "all_proxy"):
            del os.environ[name]
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")  # as in the plan; MKL reads it once


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Soak tests only with `-m soak`, CUDA tests only where there is a driver."""
    wanted = config.getoption("-m", default="") or ""
    has_gpu = shutil.which("nvidia-smi") is not None
    for item in items:
        if item.get_closest_marker("soak") and "soak" not in wanted:
            item.add_marker(pytest.mark.skip(reason="runs for minutes: make soak"))
        if item.get_closest_marker("cuda") and not has_gpu:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))
