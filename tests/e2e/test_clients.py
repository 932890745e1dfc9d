"""Public clients, unmodified, against the whole daemon: plain, streamed, and one error each."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.clients import CLIENTS, PROMPT, TOKENS
from tests.daemon import Daemon


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("clients"), config={"model": {"path": "dummy"}}, failpoints="").start() as running:
        yield running


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CLIENTS)
def test_a_public_client_works_as_it_is(daemon: Daemon, name: str) -> None:
    env = os.environ | {"NO_PROXY": "*", "no_proxy": "*", "ANONYMIZED_TELEMETRY": "False"}
    done = subprocess.run([sys.executable, "-m", "tests.clients", name, daemon.url + "/v1"], capture_output=True, text=True, timeout=280, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    if name == "instructor":
        assert json.loads(said["plain"]) == json.loads(said["streamed"]) == {"name": "Ann", "age": 7}
    else:
        assert said["plain"] == said["streamed"] == "".join(itertools.islice(itertools.cycle(PROMPT), TOKENS))
    assert "absent" in said["error"], said["error"]
    assert "this server has: dummy" in said["error"], said["error"]
