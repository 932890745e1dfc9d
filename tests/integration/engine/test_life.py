"""A start of an Engine that is overtaken in its first moments: by an interrupt before the Engine's thread has got to its loop, or by want of descriptors."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from llmd import ServerArgs
from llmd.engine.life import Life
from llmd.errors import EXIT_RESOURCE, StartupError


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory whose path leaves room for sockets."""
    with tempfile.TemporaryDirectory(prefix="e", dir="/tmp") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


class Overtaken(Life):
    """The caller is interrupted before the thread has a loop, or is known to have begun."""

    def __init__(self, *, as_the_thread_starts: bool) -> None:
        super().__init__(ServerArgs.from_kwargs(model_path="dummy"), allow_failpoints=True)
        self.may_go_on = threading.Event()
        begun = self._thread.start if as_the_thread_starts else self._ready.result

        def interrupted() -> None:
            if as_the_thread_starts:
                begun()
            threading.Timer(0.1, self.may_go_on.set).start()  # while the caller waits for the end
            signal.raise_signal(signal.SIGINT)

        if as_the_thread_starts:
            self._thread.start = interrupted  # type: ignore[method-assign]
        else:
            self._ready.result = lambda timeout=None: interrupted()  # type: ignore[method-assign]

    def _run(self) -> None:
        self.may_go_on.wait()
        super()._run()


@pytest.mark.parametrize("as_the_thread_starts", [True, False])
def test_an_interrupt_before_the_thread_has_a_loop_ends_the_start(short: Path, as_the_thread_starts: bool) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    life = Overtaken(as_the_thread_starts=as_the_thread_starts)
    with pytest.raises(KeyboardInterrupt):
        life.start()
    assert not life._thread.is_alive()
    assert list(short.iterdir()) == []
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_without_descriptors_for_a_loop_the_start_fails_and_does_not_hang(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> asyncio.AbstractEventLoop:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(asyncio, "new_event_loop", refused)
    life = Life(ServerArgs.from_kwargs(model_path="dummy"), allow_failpoints=True)
    with pytest.raises(StartupError) as caught:
        life.start()
    assert (caught.value.exit_code, caught.value.stage) == (EXIT_RESOURCE, "spawn")
    life.stop()
    assert list(short.iterdir()) == []
