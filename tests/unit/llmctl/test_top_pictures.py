"""What the dashboard looks like, at each size, without colour, and in the moments that matter."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from textual.pilot import Pilot

from llmctl.top.app import Top
from tests.unit.llmctl import pictures
from tests.unit.llmctl.fake_daemon import ABSENT, FakeDaemon, feed_of

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Times of day are those of UTC; nothing of the environment is seen."""
    for name in ("NO_COLOR", "TEXTUAL_THEME", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


async def settled(app: Top, pilot: Pilot[None]) -> str:
    """The picture once it has not changed for a second."""
    drawn, quiet = app.export_screenshot(), 0
    while quiet < 20:
        await pilot.pause(0.05)
        before, drawn = drawn, app.export_screenshot()
        quiet = quiet + 1 if pictures.runs(before) == pictures.runs(drawn) else 0
    return drawn


async def compare(app: Top, pilot: Pilot[None], name: str, directory: Path) -> None:
    """Wait until the screen looks like the picture `name`. With DRAW_TOP it becomes the picture."""
    path = ROOT / name
    if os.environ.get("DRAW_TOP"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(await settled(app, pilot))
    deadline = time.monotonic() + 60
    while said := pictures.differs(app.export_screenshot(), path, directory):
        if time.monotonic() > deadline:
            pytest.fail(said)
        await pilot.pause(0.05)


@pytest.mark.parametrize(
    ("name", "size", "keys"),
    [
        ("docs/top.svg", (100, 30), ()),
        ("tests/data/top/overview-80x24.svg", (80, 24), ()),
        ("tests/data/top/overview-120x40.svg", (120, 40), ()),
        ("tests/data/top/overview-60x20.svg", (60, 20), ()),
        ("tests/data/top/overview-80x24-no-colour.svg", (80, 24), ()),
        ("tests/data/top/processes-120x40.svg", (120, 40), ("2", *["down"] * 4)),
        ("tests/data/top/kv-80x24.svg", (80, 24), ("3",)),
        ("tests/data/top/kv-120x40.svg", (120, 40), ("3",)),
        ("tests/data/top/requests-80x24.svg", (80, 24), ("4",)),
        ("tests/data/top/requests-80x24-no-colour.svg", (80, 24), ("4",)),
        ("tests/data/top/events-80x24.svg", (80, 24), ("5",)),
        ("tests/data/top/help-80x24.svg", (80, 24), ("question_mark",)),
        ("tests/data/top/restart-80x24.svg", (80, 24), ("r",)),
        ("tests/data/top/weights-80x24.svg", (80, 24), ("w", "down")),
        ("tests/data/top/tiny-30x6.svg", (30, 6), ()),
    ],
)
async def test_it_looks_as_it_did(name: str, size: tuple[int, int], keys: tuple[str, ...], tmp_path: Path) -> None:
    app = Top(feed_of(FakeDaemon()), every=None, colour="no-colour" not in name)
    async with app.run_test(size=size) as pilot:
        while "ready" not in "".join(pictures.lines(app.export_screenshot())):
            await pilot.pause(0.05)  # the overview stands
        await pilot.press(*keys)
        await compare(app, pilot, name, tmp_path)


async def test_nothing_to_show_is_said(tmp_path: Path) -> None:
    daemon = FakeDaemon()
    daemon.requests = []
    app = Top(feed_of(daemon, seconds=5), every=None)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("4")
        await compare(app, pilot, "tests/data/top/idle-80x24.svg", tmp_path)


async def test_what_is_old_is_grey_and_says_how_old(tmp_path: Path) -> None:
    daemon = FakeDaemon()
    app = Top(feed_of(daemon), every=None)
    async with app.run_test(size=(80, 24)) as pilot:
        daemon.error = ABSENT
        daemon.now += 20
        app.take(app.feed.poll())
        await compare(app, pilot, "tests/data/top/gone-80x24.svg", tmp_path)


async def test_a_picture_that_differs_is_noticed(tmp_path: Path) -> None:
    """The comparison itself: another number, and another colour alone."""
    app = Top(feed_of(FakeDaemon()), every=None)
    async with app.run_test(size=(80, 24)) as pilot:
        drawn = await settled(app, pilot)
    kept = tmp_path / "kept.svg"
    (there := tmp_path / "there").mkdir()
    said = []
    for other in (drawn.replace("281", "282"), drawn.replace("#83b88c", "#dc7f83"), drawn):
        kept.write_text(other)
        said.append(pictures.differs(drawn, kept, there))
    assert "+ " in said[0] and "281" in said[0] and "in other colours" in said[1] and said[2] == ""
