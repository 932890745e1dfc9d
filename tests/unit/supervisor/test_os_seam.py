"""The seam's promises about real processes."""

from __future__ import annotations

import os
import signal

from llmd.supervisor.os_seam import Os


def test_a_child_that_does_not_lead_a_group_yet_is_killed_all_the_same() -> None:
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    assert Os().kill_group(pid, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert not Os().kill_group(pid, signal.SIGKILL)
