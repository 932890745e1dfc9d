"""The dashboard: keys, changes with their plan, a daemon that is slow, away or another one. What it looks like is in test_top_pictures."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from textual.events import Key
from textual.pilot import Pilot
from textual.widgets import Input

from llmctl import exits
from llmctl.exits import CtlError
from llmctl.main import main
from llmctl.top import words
from llmctl.top.actions import ACTIONS
from llmctl.top.app import Top
from llmctl.top.dialogs import Ask
from llmctl.top.feed import Feed, Picture
from llmctl.top.keys import CHANGING, LOOKING
from llmctl.top.tables import Rows
from llmctl.verbs import VERBS, top
from tests.unit.llmctl.fake_daemon import ABSENT, FakeDaemon, feed_of
from tests.unit.llmctl.pictures import lines


def seen(app: Top) -> str:
    """The screen as text."""
    return "\n".join(lines(app.export_screenshot()))


async def until(pilot: Pilot[None], check: Callable[[], object], what: str) -> None:
    """Let it run until `check` holds."""
    deadline = time.monotonic() + 60
    while not check():
        assert time.monotonic() < deadline, f"never: {what}"
        await pilot.pause(0.02)


def dashboard(daemon: FakeDaemon, every: float | None = None) -> Top:
    return Top(feed_of(daemon, seconds=5), every=every)


def test_llmctl_starts_without_textual() -> None:
    code = "import sys, llmctl.main, llmctl.verbs.top, llmctl.verbs.status; sys.exit('textual' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_key_is_in_the_manuals() -> None:
    keys = [key for key in (*LOOKING, *CHANGING) if not key.action.startswith("tab(")]
    page = (Path(__file__).parents[3] / "docs/operations.md").read_text()
    assert [key.label for key in keys if f"`{key.label}`" not in (top.__doc__ or "")] == []
    assert [key.label for key in keys if f"| `{key.label}` | {key.what} |\n" not in page] == []


def test_what_changes_something_is_no_reading_verb() -> None:
    assert all(VERBS[action.verb].risk != "read" for action in ACTIONS.values())
    assert ACTIONS["abort all"].line == "llmctl abort --all"


async def test_keys_lead_to_tabs_and_the_mark_stays_on_its_row() -> None:
    daemon = FakeDaemon()
    app = dashboard(daemon)
    async with app.run_test(size=(80, 24)) as pilot:
        for key, text in (("2", "scheduler-0"), ("3", "biggest prefixes"), ("5", "scheduler-0 is back"), ("1", "first token"), ("4", "14 requests")):
            await pilot.press(key)
            await until(pilot, lambda text=text: text in seen(app), f"{text!r} after {key}")  # type: ignore[misc]
        await pilot.press("down", "down")
        marked = daemon.requests[2]["rid"]
        await until(pilot, lambda: (app.query_one("#request-rows", Rows).marked or {}).get("rid") == marked, "the third row is marked")
        daemon.requests = daemon.requests[1:]
        app.take(app.feed.poll(4))
        await until(pilot, lambda: "13 requests" in seen(app), "the first has ended")
        assert (app.query_one("#request-rows", Rows).marked or {})["rid"] == marked


async def test_a_filter_shows_what_holds_the_text_until_escape_and_s_sorts() -> None:
    app = dashboard(FakeDaemon())
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("4", "slash", *"JOB-2", "enter")
        await until(pilot, lambda: "job-2" in seen(app) and "job-1" not in seen(app), "only job-2")
        await pilot.press("2", "4")  # digits are keys again
        await until(pilot, lambda: "job-2" in seen(app) and "job-1" not in seen(app), "the filter stays")
        await pilot.press("escape")
        await until(pilot, lambda: "job-1" in seen(app), "all again")
        assert app.query_one("#filter", Input).value == ""
        rows = app.query_one("#request-rows", Rows)
        rids = [row["rid"] for row in app.picture.requests["requests"]]
        await pilot.press("s")
        await until(pilot, lambda: (rows.marked or {}).get("rid") is not None and "RID▴" in seen(app), "sorted by rid")
        text = seen(app)
        places = [text.index(rid) for rid in sorted(rids)]
        assert places == sorted(places)


async def test_a_change_shows_the_plan_and_the_command_and_runs_only_after_a_yes() -> None:
    daemon = FakeDaemon()
    app = dashboard(daemon)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("r")
        await until(pilot, lambda: "12 requests held" in seen(app), "the plan")
        assert "$ llmctl restart" in seen(app)
        await pilot.press("n")
        await until(pilot, lambda: not isinstance(app.screen, Ask), "it is closed")
        assert daemon.posted == [("/v1/restart", {"dry_run": True})]
        results = [{"role": "scheduler", "rank": 0, "ok": True, "message": ""}, {"role": "scheduler", "rank": 1, "ok": False, "message": "does not load"}]
        daemon.operations += [
            {"id": "op-1", "state": "running"},
            {"id": "op-1", "state": "partial", "results": results, "message": "rank 1 is away", "data": {}},
        ]
        await pilot.press("r")
        await until(pilot, lambda: "12 requests held" in seen(app), "the plan again")
        await pilot.press("y")
        await until(pilot, lambda: "partial  rank 1 is away" in seen(app), "how it ended")
        await until(pilot, lambda: "scheduler-0  ok" in seen(app) and "scheduler-1  failed  does not load" in seen(app), "what each rank said")
        assert [path for path, body in daemon.posted if not body.get("dry_run")] == ["/v1/restart"]
        await pilot.press("y")  # nothing is asked any more
        await pilot.pause()
        assert len(daemon.posted) == 3


async def test_what_the_daemon_refuses_cannot_be_confirmed() -> None:
    daemon = FakeDaemon()
    daemon.plan = {"steps": [], "refused": {"code": "busy", "message": "a reload runs", "hint": "try again when it is done"}}
    app = dashboard(daemon)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("d")
        await until(pilot, lambda: "a reload runs" in seen(app), "the refusal")
        await pilot.press("y")
        await pilot.pause()
        assert [body for _, body in daemon.posted] == [{"dry_run": True}]


async def test_abort_ends_exactly_the_marked_request() -> None:
    daemon = FakeDaemon()
    app = dashboard(daemon)
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await pilot.press("a")  # on another tab nothing is marked
        await until(pilot, lambda: "mark a request" in seen(app), "it says so")
        assert daemon.posted == []
        await pilot.press("4")
        await until(pilot, lambda: "14 requests" in seen(app), "the requests")
        rid = daemon.requests[1]["rid"]
        await pilot.press("down", "a")
        await until(pilot, lambda: f"$ llmctl abort {rid}" in seen(app), "the command")
        assert daemon.posted == [("/v1/abort", {"rid": rid, "dry_run": True})]


async def test_what_clients_send_is_no_markup_and_no_command_for_the_terminal() -> None:
    daemon = FakeDaemon()
    daemon.requests = [{**daemon.requests[0], "rid": "[/b] [red]x", "request": "[/b] [red]x\x1b[2J", "client_id": "日本\x1b[31m[/]"}]
    daemon.status = {**daemon.status, "model": "[/]m", "reason": "[/red]", "degraded": ["[b"]}
    app = dashboard(daemon)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("4")
        await until(pilot, lambda: "[/b] [red]x" in seen(app) and "[/]m" in seen(app), "as it is")
        await pilot.press("a")
        await until(pilot, lambda: "$ llmctl abort '[/b] [red]x [2J'" in seen(app), "the command")
        assert "\x1b" not in seen(app)
        assert daemon.posted[0][1]["rid"] == "[/b] [red]x\x1b[2J", "and the daemon is asked for exactly it"


async def test_of_thousands_the_first_are_drawn_and_the_filter_finds_the_others() -> None:
    daemon = FakeDaemon()
    daemon.requests = [{**daemon.requests[0], "rid": f"r{number:04}"} for number in range(1000)]
    app = dashboard(daemon)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("4")
        await until(pilot, lambda: "1000 requests" in seen(app) and "200 shown" in seen(app), "how many")
        await pilot.press("slash", *"r0999", "enter")
        await until(pilot, lambda: "r0999" in seen(app) and "r0000" not in seen(app), "the last one")


async def test_the_palette_has_every_verb() -> None:
    app = dashboard(FakeDaemon())
    async with app.run_test(size=(80, 40)) as pilot:
        await pilot.press("ctrl+p", *"drain")
        await until(pilot, lambda: "take no new requests" in seen(app), "drain is found")
        await pilot.press("enter")
        await until(pilot, lambda: "$ llmctl drain" in seen(app), "its dialog")
        await pilot.press("escape", "ctrl+p", *"doctor")
        await until(pilot, lambda: "llmctl doctor" in seen(app), "doctor is found")


async def test_a_daemon_that_is_away_is_waited_for_and_another_one_is_taken_up() -> None:
    daemon = FakeDaemon()
    daemon.error = ABSENT
    app = Top(Feed(daemon, clock=lambda: daemon.now), every=0.02)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "not running" in seen(app), "it says so")
        assert "start it with" in seen(app) and "no answer yet" in seen(app)
        daemon.error = None
        await until(pilot, lambda: "ready" in seen(app) and "live" in seen(app), "it is there")
        daemon.error = CtlError(exits.NOT_ANSWERING, "llmd did not answer", "ask again")
        daemon.now += 75
        await pilot.press("4")
        await until(pilot, lambda: "not answering" in seen(app) and "1m 15s old" in seen(app), "on every tab: what is wrong, and how old all is")
        daemon.error, daemon.events = None, [{"seq": 1, "at": daemon.now, "kind": "state", "severity": "info", "message": "a new life"}]
        daemon.status = {**daemon.status, "start_id": "two"}
        await pilot.press("5")
        await until(pilot, lambda: "a new life" in seen(app), "its events count from 1 again")
        assert "scheduler-0 is back" in seen(app)


async def test_a_slow_daemon_holds_up_no_key_and_not_the_end() -> None:
    class Slow(FakeDaemon):
        gate = threading.Event()

        def get(self, path: str, timeout: float, **query: Any) -> Any:
            self.gate.wait(60)
            return super().get(path, timeout, **query)

    daemon = Slow()
    app = Top(Feed(daemon), every=0.01)
    try:
        async with app.run_test(size=(80, 24)) as pilot:
            await pilot.press("2")
            await until(pilot, lambda: "processes" in seen(app), "the tab")
            assert "waiting for the first answer" in seen(app)
            await pilot.press("question_mark")
            await until(pilot, lambda: "end the dashboard" in seen(app), "the help")
            await pilot.press("escape", "q")
        assert not Slow.gate.is_set() and app.return_code == 0
    finally:
        Slow.gate.set()


async def test_without_colour_nothing_is_coloured() -> None:
    app = Top(feed_of(FakeDaemon(), seconds=5), every=None, colour=False)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("4")
        await until(pilot, lambda: "14 requests" in seen(app), "the requests")
        strips = app.screen._compositor.render_strips()
        styles = {segment.style for strip in strips for segment in strip.apply_filter(app.get_line_filters()[0], app.screen.background_colors[1])}
        assert styles and all(style is None or (style.color is None and style.bgcolor is None) for style in styles)
        assert any(style is not None and style.reverse for style in styles), "what is marked is still seen"


def test_an_answer_that_is_not_understood_is_told() -> None:
    daemon = FakeDaemon()
    feed = feed_of(daemon, seconds=1)
    daemon.status = []  # type: ignore[assignment]
    picture = feed.poll()
    assert words.state(picture) == "not understood" and "llmctl version" in words.advice(picture)
    assert picture.status["state"] == "ready", "what was known is kept"


def test_degraded_and_draining_say_what_to_do() -> None:
    daemon = FakeDaemon()
    daemon.status = {**daemon.status, "degraded": ["frontend-1 is away"]}
    picture = feed_of(daemon, seconds=1).picture
    assert words.reason(picture) == "degraded: frontend-1 is away" and "doctor" in words.advice(picture)
    daemon.status = {**daemon.status, "degraded": [], "state": "draining", "reason": "asked to"}
    picture = feed_of(daemon, seconds=1).picture
    assert words.reason(picture) == "asked to" and "llmctl resume" in words.advice(picture)


def left(**known: Any) -> Picture:
    """A daemon that does not answer, and what it has left behind."""
    daemon = FakeDaemon()
    feed = Feed(daemon, clock=lambda: daemon.now, left=lambda error: known)
    feed.poll()
    daemon.error = (
        ABSENT if known.get("state") not in ("starting", "loading") else CtlError(exits.NOT_ANSWERING, "nobody listens", "try again in a few seconds")
    )
    return feed.poll()


def test_a_daemon_that_stops_is_not_said_to_be_resumable() -> None:
    daemon = FakeDaemon()
    processes = [{**row, "state": "stopping"} if row["role"] == "supervisor" else row for row in daemon.status["processes"]]
    daemon.status = {**daemon.status, "state": "draining", "reason": "stopping", "processes": processes, "in_flight": 3}
    picture = feed_of(daemon, seconds=1).picture
    assert words.state(picture) == "stopping" and "3 requests in flight" in words.reason(picture)
    assert "resume" not in words.advice(picture) and "ends" in words.advice(picture)


def test_a_daemon_that_is_gone_is_told_by_how_it_ended() -> None:
    for state, hue in (("stopped", "muted"), ("died", "error"), ("failed", "error"), ("starting", "warning"), ("loading", "warning")):
        picture = left(state=state, reason="for a reason")
        assert (words.state(picture), words.reason(picture), words.hue(picture)) == (state, "for a reason", hue)
        assert "again in a few seconds" not in words.advice(picture), "it asks again by itself"
    assert words.state(left()) == "not running" and "llmd run" in words.advice(left())
    daemon = FakeDaemon()
    feed = feed_of(daemon, seconds=1)
    daemon.error = CtlError(exits.NOT_ANSWERING, "no answer within 2 s", "ask again then")
    feed._left = lambda error: {"state": "ready", "reason": ""}
    picture = feed.poll()
    assert words.state(picture) == "not answering" and words.reason(picture) == "no answer within 2 s" and "every second" in words.advice(picture)


def test_a_process_that_says_nothing_is_told_before_llmd_acts() -> None:
    daemon = FakeDaemon()
    daemon.status["processes"] = [{**row, "heartbeat_age_s": 9.7} if row["role"] == "scheduler" else row for row in daemon.status["processes"]]
    picture = feed_of(daemon, seconds=1).picture
    assert words.reason(picture) == "scheduler-0 has not been heard for 9.7s" and words.hue(picture) == "warning" and "2:" in words.advice(picture)


def test_times_are_utc_wherever_the_terminal_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Pacific/Auckland")
    time.tzset()
    try:
        assert words.clock_time(1780308000.0) == "10:00:00" and "09:59:30Z" in words.news(feed_of(FakeDaemon(), seconds=1).picture)
    finally:
        monkeypatch.undo()
        time.tzset()


async def test_weights_are_asked_for_before_their_plan_is_shown() -> None:
    daemon = FakeDaemon()
    app = dashboard(daemon)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("w")
        await until(pilot, lambda: "/models/" in seen(app), "where those that run are")
        await pilot.press(*"v2", "slash", *"m", "tab", *"two", "down", "down", "enter")
        await until(pilot, lambda: "12 requests held" in seen(app), "the plan")
        assert "$ llmctl reload weights /models/v2/m --version two --mode abort" in seen(app)
        asked = {"path": "/models/v2/m", "version": "two", "mode": "abort"}
        assert daemon.posted == [("/v1/reload", {**asked, "dry_run": True})]
        await pilot.press("n", "w")
        await until(pilot, lambda: "show the plan" in seen(app), "the fields again")
        await pilot.press("escape")
        await until(pilot, lambda: app.screen_stack == [app.screen], "it is left")
        assert len(daemon.posted) == 1


async def test_what_is_typed_right_after_the_slash_is_the_filter() -> None:
    app = dashboard(FakeDaemon())
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("2")
        for key, character in (("slash", "/"), *zip("sched", "sched", strict=True)):
            app.post_message(Key(key, character))  # as fast as a terminal sends what was pasted
        await until(pilot, lambda: app.query_one("#filter", Input).value == "sched", "all of it")
        await until(pilot, lambda: "scheduler-0" in seen(app) and "control-0" not in seen(app), "only that row")


async def test_a_filter_that_finds_nothing_says_so() -> None:
    app = dashboard(FakeDaemon())
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("4", "slash", *"nobody", "enter")
        await until(pilot, lambda: "no row holds “nobody”" in seen(app), "it says so")


async def test_tabs_and_keys_can_be_clicked() -> None:
    app = dashboard(FakeDaemon())
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.click("#tabs", offset=(18, 0))
        await until(pilot, lambda: "processes" in seen(app), "the second tab")
        await pilot.click("#foot", offset=(seen(app).splitlines()[-1].index("help"), 0))
        await until(pilot, lambda: "end the dashboard" in seen(app), "the help")


def test_without_a_terminal_it_says_what_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top"]) == exits.USAGE
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and "llmctl status -o json" in said.err


@pytest.mark.parametrize("terminal", ["dumb", "", None])
def test_a_terminal_that_cannot_be_drawn_on_is_none(terminal: str | None) -> None:
    """On a real one, so that only its name is to blame."""
    outer, inner = pty.openpty()
    env = {name: value for name, value in os.environ.items() if name != "TERM"} | ({} if terminal is None else {"TERM": terminal})
    try:
        argv = [sys.executable, "-m", "llmctl.main", "top"]
        assert subprocess.run(argv, stdin=inner, stdout=inner, stderr=inner, env=env, timeout=60, check=False).returncode == exits.USAGE
        said = os.read(outer, 65536)
    finally:
        os.close(inner)
        os.close(outer)
    assert b"\x1b" not in said and said.count(b"\n") == 1 and b"llmctl status -o json" in said
