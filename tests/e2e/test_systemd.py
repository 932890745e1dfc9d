"""The shipped unit under a real systemd: start, status, stop, watchdog, socket activation, and what is never restarted."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon import SLOW
from tests.systemd_box import Box, why_not

ROOT = Path(__file__).parents[2]
UNIT = "/etc/systemd/system/llmd.service"
DROP_IN = "/etc/systemd/system/llmd.service.d/test.conf"
CONFIG = '{"model": {"path": "dummy"}, "http": {"port": 8000}}'
RUN = "[Service]\nExecStart=\nExecStart=/opt/llmd/bin/llmd run -c /etc/llmd/llmd.yaml --allow-failpoints\n"

#: Asks for so many tokens, for so many seconds at most, and prints the status, or what went wrong.
CLIENT = """
import json, sys, urllib.error, urllib.request
body = json.dumps({"prompt": "hello", "max_tokens": int(sys.argv[1]), "ignore_eos": True}).encode()
request = urllib.request.Request("http://127.0.0.1:8000/v1/completions", body, {"Content-Type": "application/json"})
try:
    print(urllib.request.urlopen(request, timeout=float(sys.argv[2]) if sys.argv[2:] else 180).status)
except urllib.error.HTTPError as error:
    print(error.code, json.load(error)["error"]["code"])
except OSError as error:
    print("failed", error)
"""


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with Box(tmp_path_factory.mktemp("box"), ROOT) as box:
        version = box.run("/usr/bin/python3", "-c", "import sys; print(*sys.version_info[:2])", check=False).split()
        if version != [str(number) for number in sys.version_info[:2]]:
            pytest.skip("/usr/bin/python3, which a service's user can run, is of another version than the tests' Python")
        install(box)
        as_llmd = ("setpriv", "--reuid=llmd", "--clear-groups", "/opt/llmd/bin/python3", "-c")
        if box.run(*as_llmd, "import llmd, zmq; print('fine')", check=False).strip() != "fine":
            pytest.skip("a service's user cannot read this checkout or its packages")
        yield box


def install(box: Box) -> None:
    """/opt/llmd with a Python that the unit's user may run, on the files of this checkout."""
    box.run("useradd", "--system", "--no-create-home", "llmd")
    box.run("/usr/bin/python3", "-m", "venv", "--without-pip", "/opt/llmd")
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    where = box.run("/opt/llmd/bin/python3", "-c", "import site; print(site.getsitepackages()[0])").strip()
    box.write(f"{where}/llmd.pth", f"{ROOT}/daemon\n{ROOT}/admin\n{packages}\n")
    for name, module in (("llmd", "llmd.cli"), ("llmctl", "llmctl.main")):
        box.write(f"/opt/llmd/bin/{name}", f"#!/opt/llmd/bin/python3\nimport sys\nfrom {module} import main\nsys.exit(main())\n", "755")
    box.write("/etc/llmd/llmd.yaml", CONFIG)
    box.write("/opt/client.py", CLIENT)
    box.write(UNIT, (ROOT / "systemd/llmd.service").read_text())
    box.write(DROP_IN, RUN)
    box.run("systemctl", "daemon-reload")


def show(box: Box, name: str) -> str:
    return box.run("systemctl", "show", "-P", name, "llmd").strip()


def until(box: Box, name: str, good: str, timeout: float = 20) -> None:
    deadline = time.monotonic() + timeout * SLOW
    while (value := show(box, name)) != good:
        assert time.monotonic() < deadline, f"{name} is {value}, not {good}\n{box.run('journalctl', '-u', 'llmd', '-o', 'cat', '-n', '30')}"
        time.sleep(0.1)


def test_the_unit_is_verified_in_silence(box: Box) -> None:
    assert box.run("systemd-analyze", "verify", "llmd.service") == ""


def test_it_is_active_when_it_answers_and_stops_cleanly(box: Box) -> None:
    box.run("systemctl", "start", "llmd")
    assert box.run("/usr/bin/python3", "/opt/client.py", "3").strip() == "200"
    assert show(box, "StatusText").startswith("ready: 0 running")
    status = json.loads(box.run("/opt/llmd/bin/llmctl", "status", "-o", "json"))
    assert status["state"] == "ready" and str(status["processes"][0]["pid"]) == show(box, "MainPID")
    assert "scheduler-0" in box.run("/opt/llmd/bin/llmctl", "logs", "scheduler-0", "-n", "3")
    doctor = box.run("/opt/llmd/bin/llmctl", "doctor", check=False)
    assert "(of the llmd that runs): llmd check finds no fault" in doctor, f"root looks as the user that llmd runs as:\n{doctor}"
    box.run("systemctl", "stop", "llmd")
    assert (show(box, "Result"), show(box, "ExecMainStatus")) == ("success", "0")
    lines = [json.loads(line) for line in box.run("journalctl", "-u", "llmd", "LLMD_PROCESS=control-0", "-o", "json").splitlines()]
    assert lines and all({"MESSAGE", "PRIORITY", "LLMD_PID", "SYSLOG_IDENTIFIER"} <= line.keys() for line in lines)
    assert any("-> ready" in line["MESSAGE"] and line["LLMD_EPOCH"] == "1" and line["PRIORITY"] == "6" for line in lines)


def test_reload_takes_a_changed_configuration(box: Box) -> None:
    box.write(DROP_IN, RUN)
    box.run("systemctl", "daemon-reload")
    box.run("systemctl", "start", "llmd")
    before = show(box, "MainPID")
    box.write("/etc/llmd/llmd.yaml", '{"model": {"path": "dummy"}, "http": {"port": 8000, "keep_alive": "9s"}}')
    try:
        box.run("systemctl", "reload", "llmd")
        shown = json.loads(box.run("/opt/llmd/bin/llmctl", "config", "show", "http.keep_alive", "-o", "json"))
        assert shown["values"][0]["text"] == "9s"
        box.write("/etc/llmd/llmd.yaml", '{"model": {"path": "dummy"}, "http": {"prot": 8000}}')
        box.run("systemctl", "reload", "llmd", check=False)
        assert (show(box, "ActiveState"), show(box, "MainPID")) == ("active", before)
        assert box.run("/usr/bin/python3", "/opt/client.py", "3").strip() == "200"
        assert json.loads(box.run("/opt/llmd/bin/llmctl", "audit", "-o", "json"))[0]["result"] == "failed"
    finally:
        box.write("/etc/llmd/llmd.yaml", CONFIG)
        box.run("systemctl", "stop", "llmd")


def test_a_restart_of_all_is_systemds(box: Box) -> None:
    box.write(DROP_IN, RUN)
    box.run("systemctl", "daemon-reload")
    box.run("systemctl", "start", "llmd")
    try:
        before = show(box, "MainPID")
        assert "systemctl restart llmd.service" in box.run("/opt/llmd/bin/llmctl", "restart", "--all", "--dry-run")
        assert box.run("/opt/llmd/bin/llmctl", "restart", "--all").strip() == "restarted"
        assert show(box, "ActiveState") == "active" and show(box, "MainPID") != before
        assert box.run("/usr/bin/python3", "/opt/client.py", "3").strip() == "200"
    finally:
        box.run("systemctl", "stop", "llmd")


def test_a_llmd_that_stands_still_is_replaced(box: Box) -> None:
    box.write(DROP_IN, RUN + "WatchdogSec=5s\nRestartSec=100ms\n")
    box.run("systemctl", "daemon-reload")
    box.run("systemctl", "start", "llmd")
    before, restarts = show(box, "MainPID"), int(show(box, "NRestarts"))
    box.run("kill", "-STOP", before)
    until(box, "NRestarts", str(restarts + 1))
    until(box, "ActiveState", "active")
    assert show(box, "MainPID") != before
    assert box.run("/usr/bin/python3", "/opt/client.py", "3").strip() == "200"
    box.run("systemctl", "stop", "llmd")


def test_what_can_never_work_is_not_tried_again(box: Box) -> None:
    box.write(DROP_IN, RUN + "RestartSec=100ms\n")
    box.write("/etc/llmd/llmd.yaml", '{"memory": {"max_runing_requests": 1}}')
    box.run("systemctl", "daemon-reload")
    try:
        box.run("systemctl", "start", "llmd", check=False)
        assert (show(box, "ExecMainStatus"), show(box, "ActiveState"), show(box, "NRestarts")) == ("78", "failed", "0")
    finally:
        box.write("/etc/llmd/llmd.yaml", CONFIG)
        box.run("systemctl", "reset-failed", "llmd")


#: One client is served while llmd is restarted; three more come once nobody accepts. What runs is let go when they are connected.
RESTART_UNDER_CLIENTS = r"""
python3 /opt/client.py 300 > /tmp/long &
until /opt/llmd/bin/llmctl status -o json | grep -q '"running": *1'; do sleep 0.1; done
systemctl restart --no-block llmd
until python3 /opt/client.py 3 2 | grep -q failed; do sleep 0.1; done
for n in 1 2 3; do python3 /opt/client.py 3 > /tmp/new$n & done
until [ "$(grep -c ' 0100007F:1F40 01 ' /proc/net/tcp)" -ge 4 ]; do sleep 0.1; done
rm /etc/llmd/brake
wait
cat /tmp/long /tmp/new1 /tmp/new2 /tmp/new3
"""


def test_with_socket_activation_nobody_is_refused_during_a_restart(box: Box) -> None:
    box.write("/etc/systemd/system/llmd.socket", "[Socket]\nListenStream=127.0.0.1:8000\n")
    box.write(DROP_IN, RUN + "Environment=LLMD_FAILPOINTS=scheduler.step=delay(200ms,/etc/llmd/brake)\n")
    box.write("/etc/llmd/brake", "")
    box.run("systemctl", "daemon-reload")
    box.run("systemctl", "start", "llmd.socket")
    box.run("systemctl", "start", "llmd")
    first, *others = box.run("bash", "-c", RESTART_UNDER_CLIENTS).splitlines()
    assert first == "200", "what ran was finished"
    assert all(answer == "200" or answer == "503 loading" for answer in others), "who came in the drain was answered by the next llmd"
    until(box, "ActiveState", "active")
    box.run("systemctl", "stop", "llmd.socket", "llmd")
