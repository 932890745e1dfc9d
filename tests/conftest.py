"""Shared by all tests: nothing of the caller's llmd or proxies leaks in, GPU and soak tests are left out where they cannot run."""

from __future__ import annotations

import functools
import inspect
import os
import shutil
import signal
import ssl
from pathlib import Path
from typing import Any

import certifi
import httpx
import hypothesis
import pytest

from tests.daemon import SLOW

# A machine that is busy with something else is no fault of what is tested.
hypothesis.settings.register_profile("llmd", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("llmd")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """A developer's own LLMD_ settings and proxies must not decide a test; nor does whether it runs beside others."""
    worker = getattr(config, "workerinput", {}).get("workerid")
    if worker and config.option.basetemp:
        # Of pytest-xdist: `popen-gw2`. The path of a socket has 107 bytes, and a test's directory is most of them.
        config.option.basetemp = str(Path(config.option.basetemp).with_name(worker.removeprefix("gw")))
    for name in list(os.environ):
        if (name.startswith("LLMD_") and not name.startswith("LLMD_TEST_")) or name.lower() in ("http_proxy", "https_proxy", "all_proxy"):
            del os.environ[name]
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Of a shell that has put the tests in the background: processes that they interrupt would inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")  # as in the plan; MKL reads it once
    _read_public_certificates_once()
    _be_patient()


def _be_patient() -> None:
    """httpx waits for 5 s where a test says nothing else; that is a time bound of a test too, and a machine may stand still for as long."""
    everywhere = inspect.signature(httpx.get).parameters["timeout"].default
    everywhere.connect = everywhere.read = everywhere.write = everywhere.pool = 20 * SLOW


def _read_public_certificates_once() -> None:
    """Each call of httpx reads all public certificates, which takes 25 ms; no test needs them, and tests make thousands of calls."""
    make = ssl.create_default_context
    shared = functools.cache(lambda file: make(cafile=file))
    public = {certifi.where(), os.environ.get("SSL_CERT_FILE")}

    def make_or_share(*args: Any, **how: Any) -> ssl.SSLContext:
        return shared(how["cafile"]) if not args and how.keys() == {"cafile"} and how["cafile"] in public else make(*args, **how)

    ssl.create_default_context = make_or_share


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Soak tests only with `-m soak`, CUDA tests only where there is a driver."""
    wanted = config.getoption("-m", default="") or ""
    has_gpu = shutil.which("nvidia-smi") is not None
    for item in items:
        if item.get_closest_marker("soak") and "soak" not in wanted:
            item.add_marker(pytest.mark.skip(reason="runs for minutes: make soak"))
        if item.get_closest_marker("cuda") and not has_gpu:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))
