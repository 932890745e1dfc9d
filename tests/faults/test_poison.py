"""One request that kills the engine whenever it is computed, among others: only it fails, and llmd goes on."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.daemon import SLOW, Brake, Daemon, wait_for

CONFIG: dict[str, Any] = {"model": {"path": "dummy"}, "supervision": {"restart": {"max": 5, "backoff": ["0s", "100ms", "200ms"]}}}


def test_a_poison_request_among_sixteen_others_fails_alone(tmp_path: Path) -> None:
    brake = Brake(tmp_path)
    with Daemon(tmp_path, config=CONFIG, failpoints=f"scheduler.prompt(CRASHME)=kill;{brake.steps}").start() as daemon:
        texts: dict[int, str] = {}

        def run(number: int) -> None:
            prompt = f"innocent {number:02} "
            if number % 2:
                texts[number] = daemon.text(prompt, max_tokens=300, ignore_eos=True)
            else:
                texts[number] = "".join(event["choices"][0]["text"] for event in daemon.stream(prompt, max_tokens=300, ignore_eos=True))

        threads = [threading.Thread(target=run, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        wait_for("all run", lambda: daemon.requests()[0] == 16, 60)
        poison = daemon.complete("please CRASHME now", max_tokens=20)
        assert poison.status_code == 500 and poison.json()["error"]["code"] == "engine_crash", poison.text
        assert "CRASHME" not in poison.text
        brake.release()
        for thread in threads:
            thread.join(60 * SLOW)
        assert texts == {number: (f"innocent {number:02} " * 30)[:300] for number in range(16)}
        wait_for("four engines have died of it", lambda: daemon.status()["epoch"] == 5, 60)
        wait_for("it is counted", lambda: daemon.metric("llmd_requests_isolated_total") == 1, 60)
        again = daemon.complete("please CRASHME now", max_tokens=20, seed=5)
        assert again.status_code == 500 and again.json()["error"]["code"] == "engine_crash"
        assert daemon.status()["epoch"] == 5, "it was not even tried"
        other = daemon.complete("do not CRASHME now, either", max_tokens=20)
        assert other.status_code == 500, "another one that kills is found out within the same budget"
        assert daemon.text() == "hellohel"
        assert "CRASHME" not in daemon.log_text()
        assert daemon.stop() == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_that_makes_its_step_fail_costs_nobody_else(tmp_path: Path, overlap: bool) -> None:
    config = {**CONFIG, "scheduler": {"overlap": overlap}}
    brake = Brake(tmp_path)
    with Daemon(tmp_path, config=config, failpoints=f"scheduler.prompt(RAISEME)=raise;{brake.steps}").start() as daemon:
        texts: list[str] = []
        threads = [threading.Thread(target=lambda: texts.append(daemon.text("hello", max_tokens=200, ignore_eos=True))) for _ in range(8)]
        for thread in threads:
            thread.start()
        wait_for("all run", lambda: daemon.requests()[0] == 8, 60)
        failed = daemon.complete("please RAISEME now")
        assert failed.status_code == 500 and failed.json()["error"]["code"] == "internal_error"
        brake.release()
        for thread in threads:
            thread.join(60 * SLOW)
        assert texts == ["hello" * 40] * 8
        assert daemon.status()["epoch"] == 1
        assert daemon.stop() == 0
