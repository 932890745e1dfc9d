"""Logs that flood in: memory and drawing stay bounded, keys are answered, and nothing in a line is taken for a command or for markup."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from llmctl.logfiles import TAIL_BYTES, Logs
from llmctl.top.app import Top
from llmctl.top.events import LogLines
from llmctl.top.feed import KEPT, LONGEST, Feed
from llmctl.top.lines import KEPT as ROWS
from llmctl.top.lines import wrapped
from tests.daemon import SLOW
from tests.unit.llmctl.fake_daemon import FakeDaemon
from tests.unit.llmctl.test_top import seen, until

#: Lines of half a minute's flood in one look, and looks.
LINES, LOOKS = 8000, 60


def line(number: int) -> str:
    """Every hundredth is a nuisance of some kind."""
    nuisances = ("x" * 100_000, "[red]no colour[/red] [/]", "a\x1b[2J\x1b[31mb\x07", "日本語" * 5000, "", "\t" * 300)
    said = nuisances[number // 100 % len(nuisances)] if number % 100 == 0 else f"request {number} took {number % 97} ms"
    return f"2026-06-01T09:55:{number % 60:02}.000Z INFO    scheduler: {said}"


async def test_a_flood_of_log_lines_costs_neither_memory_nor_keys() -> None:
    made = 0

    def logs() -> list[str]:
        nonlocal made
        made += LINES
        return [line(number) for number in range(made - LINES, made)]

    app = Top(Feed(FakeDaemon(), logs=logs), every=None)
    process = psutil.Process(os.getpid())
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("5")
        before, slowest = 0, 0.0
        for look in range(LOOKS):
            app.take(app.feed.poll(5))
            began = time.monotonic()
            await pilot.press("down" if look % 2 else "up")
            slowest = max(slowest, time.monotonic() - began)
            if look == 5:
                before = process.memory_info().rss
        grown = process.memory_info().rss - before
        pane = app.query_one(LogLines)
        assert made == LINES * LOOKS and len(app.picture.logs) == KEPT and pane.virtual_size.height <= ROWS
        assert max(map(len, app.picture.logs)) <= LONGEST
        assert grown < 50 * 2**20, f"{grown / 2**20:.0f} MiB"
        assert slowest < 10 * SLOW, "a key waits for the flood"  # 0.1 s on a machine that has nothing else to do
        app.feed._logs = lambda: ["2026-06-01T09:56:00.000Z INFO    x: [red]no colour[/red] [/] a\x1b[2Jb"]
        app.take(app.feed.poll(5))
        await until(pilot, lambda: "[red]no colour[/red] [/] a [2Jb" in seen(app), "as it is")
        assert "\x1b" not in seen(app)


async def test_who_has_scrolled_back_is_left_there() -> None:
    feed = Feed(FakeDaemon(), logs=lambda: [line(number) for number in range(1, 90)])
    app = Top(feed, every=None)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("5", "tab")
        app.take(feed.poll(5))
        await until(pilot, lambda: "request 89 " in seen(app), "the newest")
        await pilot.press("home")
        await until(pilot, lambda: "request 1 " in seen(app), "the oldest")
        feed._logs = lambda: [line(201)]
        app.take(feed.poll(5))
        await pilot.pause(0.2)
        assert "request 1 " in seen(app) and "request 201 " not in seen(app)
        await pilot.press("end")
        await until(pilot, lambda: "request 201 " in seen(app), "the newest again")


@pytest.mark.parametrize(
    ("text", "width", "rows"),
    [
        ("", 10, [""]),
        ("one two three", 20, ["one two three"]),
        ("one two three", 8, ["one two", "three"]),
        ("abcdefghij", 4, ["abcd", "efgh", "ij"]),
        ("日本語", 4, ["日本", "語"]),
        ("  led by spaces", 20, ["  led by spaces"]),
        ("a" * 100, 10, ["a" * 10] * 5 + ["a" * 9 + "…"]),
        ("a" * 7, 1, ["a"] * 5 + ["…"]),
    ],
)
def test_a_line_takes_as_many_rows_as_it_has_to_but_no_more_than_six(text: str, width: int, rows: list[str]) -> None:
    assert wrapped(text, width) == rows


def test_a_reader_of_the_newest_lines_leaves_out_what_it_cannot_keep_up_with(tmp_path: Path) -> None:
    path = tmp_path / "scheduler-0.log"
    path.write_text("old\n")
    every, newest = Logs(tmp_path), Logs(tmp_path)
    assert every.last(10) == newest.last(10) == ["old"]
    with path.open("a") as stream:
        stream.writelines(f"line {number}\n" for number in range(3 * TAIL_BYTES // 10))
    assert every.more()[0] == "line 0"
    got = newest.more(newest=True)
    assert got[-1] == f"line {3 * TAIL_BYTES // 10 - 1}" and sum(map(len, got)) <= TAIL_BYTES
    assert newest.more(newest=True) == []


def test_a_line_without_end_holds_nobody_up(tmp_path: Path) -> None:
    path = tmp_path / "scheduler-0.log"
    path.write_text("old\n")
    logs = Logs(tmp_path)
    logs.last(1)
    with path.open("a") as stream:
        stream.write("x" * (TAIL_BYTES + 5) + "\nnext\n")
    pieces = [logs.more(), logs.more()]
    assert pieces == [["x" * TAIL_BYTES], ["xxxxx", "next"]]
