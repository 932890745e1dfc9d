"""The dashboard on any screen: no size and no change of size ends it; what matters is seen wherever there is room."""

from __future__ import annotations

import random

import pytest

from llmctl.top.app import Top, foot
from llmctl.top.keys import CHANGING, TABS
from tests.unit.llmctl.fake_daemon import FakeDaemon, feed_of
from tests.unit.llmctl.test_top import seen, until

SIZES = [(1, 1), (2, 1), (10, 3), (30, 8), (40, 10), (60, 20), (80, 24), (120, 40), (300, 100)]


@pytest.mark.parametrize("size", SIZES)
async def test_every_tab_and_dialog_is_drawn_at_any_size(size: tuple[int, int]) -> None:
    app = Top(feed_of(FakeDaemon(), seconds=5), every=None)
    async with app.run_test(size=size) as pilot:
        for number in range(1, len(TABS) + 1):
            await pilot.press(str(number))
            await pilot.pause()
        for key in ("question_mark", "r", "w", "slash"):
            await pilot.press(key)
            await pilot.pause()
            await pilot.press("escape")
        await pilot.press("1")
        await pilot.pause()
        if size >= (10, 3):
            await until(pilot, lambda: "ready" in seen(app), "the state")
    assert app.return_code is None and app._exception is None


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (300, 100)])
async def test_from_80_by_24_on_all_that_matters_is_on_the_first_tab(size: tuple[int, int]) -> None:
    app = Top(feed_of(FakeDaemon(), seconds=5), every=None)
    async with app.run_test(size=size) as pilot:
        for text in ("ready", "running", "12", "waiting", "2", "KV cache · 25% in use", "tokens out", "281 /s"):
            await until(pilot, lambda text=text: text in seen(app), text)  # type: ignore[misc]


async def test_fifty_changes_of_size_in_a_row() -> None:
    chance = random.Random(126)
    app = Top(feed_of(FakeDaemon(), seconds=5), every=None)
    async with app.run_test(size=(80, 24)) as pilot:
        for number in range(50):
            await pilot.resize_terminal(chance.randint(1, 300), chance.randint(1, 100))
            if number % 5 == 0:
                await pilot.press(str(chance.randint(1, 5)))
        await pilot.press("1")
        await pilot.resize_terminal(80, 24)
        await until(pilot, lambda: "281 /s" in seen(app) and "KV cache" in seen(app), "it is whole again")


@pytest.mark.parametrize("width", range(1, 200))
def test_the_footer_fits_and_always_says_how_to_get_help_and_out(width: int) -> None:
    for tab in range(1, 6):
        keys = foot(width, tab, draining=False)
        assert {"?", "q"} <= {key.label for key in keys}
        if width >= 40:
            assert sum(len(f"{key.label} {key.footer}  ") for key in keys) - 2 <= width
        assert ("a" in [key.label for key in keys]) == (tab == 4)
    assert len([key for key in foot(200, 1, draining=True) if key in CHANGING]) == len(CHANGING) - 2
