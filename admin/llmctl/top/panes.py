"""The five tabs. Each takes a Picture and the Feed that keeps the history, and draws what concerns it."""

from __future__ import annotations

import time
from typing import Any, Final

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Container, Vertical
from textual.widgets import Static

from llmctl.output import duration, one_line, size
from llmctl.top import words
from llmctl.top.feed import Feed, Picture
from llmctl.top.style import STATES
from llmctl.top.widgets import Column, Detail, Lines, Painted, Rows, Tile


class Pane(Vertical, Painted):
    """One tab."""

    def show(self, picture: Picture, feed: Feed) -> None:
        """Draw it."""
        raise NotImplementedError

    @property
    def tables(self) -> list[Rows | Lines]:
        """What `/` filters."""
        return [*self.query(Rows), *self.query(Lines)]


class Banner(Static, Painted):
    """The state, why, and what to do."""

    def show(self, picture: Picture) -> None:
        state, muted = words.state(picture), self.colour("muted")
        hue = STATES.get(state, "muted")
        if picture.error is None and picture.status.get("degraded"):
            hue = "warning"
        for name in ("success", "warning", "error"):
            self.set_class(hue == name, f"-{name}")
        first = Text("● ", self.colour(hue)) + Text(state, f"bold {self.colour(hue)}")
        life = Text(words.life(picture.status), muted)
        gap = self.content_size.width - first.cell_len - life.cell_len
        lines = Text("\n").join([first + " " * max(2, gap) + life, Text(words.reason(picture)), Text(words.advice(picture), muted)])
        lines.no_wrap, lines.overflow = True, "ellipsis"
        self.update(lines)


class Overview(Pane):
    """State, speed, latencies, queue, memory."""

    def compose(self) -> ComposeResult:
        yield Banner(id="banner")
        with Container(id="tiles"):
            yield Tile("tokens out", "primary", "out")
            yield Tile("tokens in", "secondary", "in")
            yield Tile("time to first token", "primary", "first_token")
            yield Tile("between tokens", "secondary", "gap")
            yield Tile("running", "primary", "running")
            yield Tile("waiting", "secondary", "waiting")
        yield Tile("KV cache", "accent", "memory")

    def show(self, picture: Picture, feed: Feed) -> None:
        self.query_one(Banner).show(picture)
        now = feed.clock() if picture.at is None else picture.at
        throughput, requests = picture.status.get("throughput") or {}, picture.status.get("requests") or {}
        self._number("out", throughput.get("generation_tokens_s"), " /s", feed, now)
        self._number("in", throughput.get("prompt_tokens_s"), " /s", feed, now)
        self._times("first_token", picture.first_token, feed, now)
        self._times("gap", picture.gap, feed, now)
        self._number("running", requests.get("running"), "", feed, now)
        self._number("waiting", requests.get("waiting"), "", feed, now)
        self._memory(picture, feed, now)
        self.query_one("#waiting", Tile).border_subtitle = self.query_one("#running", Tile).border_subtitle = ""
        span = feed.history.window(now)
        for name in ("running", "waiting"):
            self.query_one(f"#{name}", Tile).border_subtitle = f"last {span / 60:.0f} min"

    def _number(self, name: str, value: Any, unit: str, feed: Feed, now: float) -> None:
        muted = self.colour("muted")
        peak = max((v for v in feed.history.columns(name, 60, now) if v is not None), default=None)
        right = Text(f"most {words.number(peak)}", muted) if peak else Text()
        self.query_one(f"#{name}", Tile).show(
            Text(words.number(value), "bold") + Text(unit, muted), right, lambda width: feed.history.columns(name, width, now)
        )

    def _times(self, name: str, values: tuple[float | None, ...], feed: Feed, now: float) -> None:
        muted = self.colour("muted")
        left = Text()
        for number, (label, text) in enumerate(words.percentiles(values)):
            left += Text(f"{'  ' * bool(number)}{label} ", muted) + Text(text, "" if number else "bold")
        self.query_one(f"#{name}", Tile).show(left, Text(), lambda width: feed.history.columns(name, width, now))

    def _memory(self, picture: Picture, feed: Feed, now: float) -> None:
        kv = picture.status.get("kv") or {}
        tile = self.query_one("#memory", Tile)
        left, right = memory_bar(self, kv, max(10, tile.content_size.width - 50)), memory_text(self, kv)
        tile.show(left, right, lambda width: feed.history.columns("kv", width, now), top=1.0)


def memory_bar(painted: Painted, kv: dict[str, Any], width: int) -> Text:
    """Active, cached and free pages as parts of a line."""
    total = kv.get("pages_total") or 0
    active = _cells(kv.get("pages_active"), total, width)
    cached = min(width - active, _cells(kv.get("pages_cached"), total, width))
    return (
        Text("█" * active, painted.colour("primary"))
        + Text("▒" * cached, painted.colour("secondary"))
        + Text("─" * (width - active - cached), painted.colour("line"))
    )


def memory_text(painted: Painted, kv: dict[str, Any]) -> Text:
    """The same in numbers."""
    text = Text()
    for glyph, name, hue in (("█", "active", "primary"), ("▒", "cached", "secondary"), ("─", "free", "muted")):
        text += Text(f"  {glyph} ", painted.colour(hue)) + Text(words.number(kv.get(f"pages_{name}")), "bold") + Text(f" {name}", painted.colour("muted"))
    return text


def _cells(pages: Any, total: int, cells: int) -> int:
    """How many of `cells` stand for them; at least one for what is there."""
    return max(1, round(cells * pages / total)) if total and pages else 0


def name_of(process: dict[str, Any]) -> str:
    return f"{process.get('role')}-{process.get('rank')}"


class Processes(Pane):
    """Every process, and how the one under the cursor ended last."""

    _cpu: dict[str, float] = {}  # noqa: RUF012 - replaced, never changed

    def compose(self) -> ComposeResult:
        columns = (
            Column("PROCESS", name_of, 14),
            Column("STATE", lambda row: row.get("state"), 9),
            Column("PID", lambda row: row.get("pid") or None, 8, True),
            Column("UP", lambda row: row.get("uptime_s"), 7, True, lambda row: duration(row.get("uptime_s"))),
            Column("RESTARTS", lambda row: row.get("restarts"), 8, True),
            Column("HEARD", lambda row: row.get("heartbeat_age_s"), 6, True, lambda row: duration(row.get("heartbeat_age_s"))),
            Column("CPU", lambda row: self._cpu.get(name_of(row)), 5, True, self._share),
            Column("MEMORY", lambda row: row.get("rss_bytes"), 8, True, lambda row: size(row.get("rss_bytes"))),
            Column("LAST EXIT", lambda row: (row.get("last_exit") or {}).get("age_s"), 0, False, words.exit_text, wide=True),
        )
        with Vertical(classes="box") as box:
            box.border_title = "processes"
            yield Rows(columns, name_of, id="process-rows")
        yield Detail(id="process-detail")

    def _share(self, row: dict[str, Any]) -> str:
        share = self._cpu.get(name_of(row))
        return "–" if share is None else f"{share:.0%}"

    def show(self, picture: Picture, feed: Feed) -> None:
        self._cpu = picture.cpu
        self.query_one(Rows).show(picture.status.get("processes") or [])
        self.detail()

    def on_data_table_row_highlighted(self) -> None:
        self.detail()

    def detail(self) -> None:
        row, detail = self.query_one(Rows).marked, self.query_one(Detail)
        detail.display = row is not None
        if row is None:
            return
        muted = self.colour("muted")
        detail.border_title = name_of(row)
        last = row.get("last_exit") or {}
        doing = " · ".join(str(part) for part in (row.get("stage"), row.get("phase"), f"{row['steps']:,} steps" if row.get("steps") else "") if part)
        text = Text("last exit  ", muted) + Text(words.exit_text(row) if last else "none: it is its first life")
        text += Text("\nnow        ", muted) + Text(doing or str(row.get("state")))
        for line in str(last.get("stderr") or "").splitlines()[-2:]:
            text += Text("\n" + one_line(line), muted)
        text.no_wrap, text.overflow = True, "ellipsis"
        detail.update(text)


class PageMap(Painted):
    """KV pages as blocks, each for as many pages as there have to be; by state, not by place."""

    kv: dict[str, Any] = {}  # noqa: RUF012 - replaced, never changed

    def show(self, kv: dict[str, Any]) -> None:
        self.kv = kv
        self.refresh()

    def render(self) -> Text:
        width, height = self.size
        rows = max(1, height - 1)
        total = self.kv.get("pages_total") or 0
        cells = min(width * rows, total) if total else 0
        if not cells:
            return Text("no pages: the engine is not ready", self.colour("muted"))
        active = _cells(self.kv.get("pages_active"), total, cells)
        cached = min(cells - active, _cells(self.kv.get("pages_cached"), total, cells))
        kinds = [("█", "primary")] * active + [("▒", "secondary")] * cached + [("·", "muted")] * (cells - active - cached)
        text = Text(no_wrap=True)
        for start in range(0, len(kinds), width):
            for glyph, hue in kinds[start : start + width]:
                text.append(glyph, self.colour(hue))
            text.append("\n")
        each = total / cells
        scale = "a block is a page" if each == 1 else f"a block is about {each:.0f} pages"
        return text + memory_text(self, self.kv) + Text(f"   {scale}", self.colour("muted"))


class Cache(Pane):
    """The KV cache: pages, prefixes, who holds most."""

    def compose(self) -> ComposeResult:
        def plain(name: str, key: str, width: int, right: bool = True) -> Column:
            return Column(name, lambda row: row.get(key), width, right)

        prefixes = (plain("PREFIX", "name", 0, False), plain("FROM", "start", 7), plain("TOKENS", "tokens", 7), plain("PAGES", "pages", 6),
                    plain("BELOW", "below", 6), plain("HITS", "hits", 6), plain("USERS", "users", 6))  # fmt: skip
        holders = (plain("HOLDER", "rid", 0, False), plain("PHASE", "phase", 9, False),
                   Column("AGE", lambda row: row.get("age_s"), 7, True, lambda row: duration(row.get("age_s"))), plain("PAGES", "pages", 6))  # fmt: skip
        with Vertical(classes="box", id="map") as box:
            box.border_title = "pages"
            yield PageMap()
        with Container(id="cache-tables"):
            with Vertical(classes="box", id="prefixes") as box:
                box.border_title = "biggest prefixes"
                yield Rows(prefixes, lambda row: f"{row.get('rank')} {row.get('name')}", id="prefix-rows")
            with Vertical(classes="box", id="holders") as box:
                box.border_title = "who holds most"
                yield Rows(holders, lambda row: str(row.get("rid")), id="holder-rows")

    def show(self, picture: Picture, feed: Feed) -> None:
        kv = picture.kv or picture.status.get("kv") or {}
        self.query_one(PageMap).show(kv)
        cache = kv.get("prefix_cache") or {}
        rate = cache.get("hit_rate")
        box = self.query_one("#map")
        box.border_title = f"{words.number(kv.get('pages_total'))} pages of {kv.get('page_size') or '–'} tokens"
        box.border_subtitle = f"prefix cache: {rate:.1%} of {cache.get('queried_tokens'):,} prompt tokens were known" if rate is not None else ""
        self.query_one("#prefix-rows", Rows).show(kv.get("prefixes") or [])
        self.query_one("#holder-rows", Rows).show(kv.get("holders") or [])


class Requests(Pane):
    """The requests in flight."""

    def compose(self) -> ComposeResult:
        columns = (
            Column("RID", lambda row: row.get("rid"), 0),
            Column("CLIENT ID", lambda row: row.get("client_id"), 20, wide=True),
            Column("PHASE", lambda row: row.get("phase"), 9),
            Column("AGE", lambda row: row.get("age_s"), 7, True, lambda row: duration(row.get("age_s"))),
            Column("PROMPT", lambda row: row.get("prompt_tokens"), 7, True),
            Column("TOKENS", lambda row: row.get("output_tokens"), 7, True),
            Column("TOK/S", lambda row: row.get("tokens_s"), 6, True, lambda row: f"{row.get('tokens_s') or 0:.1f}"),
            Column("SILENT", lambda row: row.get("silent_s"), 7, True, lambda row: duration(row.get("silent_s"))),
            Column("PAGES", lambda row: row.get("pages"), 6, True),
        )
        with Vertical(classes="box") as box:
            box.border_title = "requests in flight"
            yield Rows(columns, lambda row: str(row.get("rid")), sort=None, id="request-rows")
        yield Detail(id="request-detail")

    def show(self, picture: Picture, feed: Feed) -> None:
        rows = picture.requests.get("requests") or []
        total = picture.requests.get("total", len(rows))
        self.query_one(Rows).show(rows[:500])
        self.query_one(".box").border_title = f"{total:,} request{'s' * (total != 1)} in flight, oldest first"
        self.detail()

    def on_data_table_row_highlighted(self) -> None:
        self.detail()

    def detail(self) -> None:
        row, detail = self.query_one(Rows).marked, self.query_one(Detail)
        detail.display = row is not None
        if row is None:
            return
        muted = self.colour("muted")
        detail.border_title = one_line(row.get("rid"))
        detail.border_subtitle = "a aborts it"
        first = row.get("first_token_s")
        text = Text("client id  ", muted) + Text(one_line(row.get("client_id")))
        text += Text("\ntokens     ", muted) + Text(
            f"{row.get('output_tokens') or 0:,} of {row.get('max_new_tokens') or 0:,} at most; prompt {row.get('prompt_tokens') or 0:,}, "
        )
        text += Text(f"{row.get('cached_tokens') or 0:,} of them known\n")
        text += Text("times      ", muted) + Text(f"waited {duration(row.get('waited_s'))}, first token {f'after {duration(first)}' if first else 'not yet'}")
        text.no_wrap, text.overflow = True, "ellipsis"
        detail.update(text)


class EventLines(Lines):
    """What has happened."""

    def line_text(self, line: dict[str, Any]) -> Text:
        hue = {"error": "error", "warning": "warning"}.get(str(line.get("severity")), "foreground")
        at = time.strftime("%H:%M:%S", time.localtime(line.get("at") or 0))
        muted = self.colour("muted")
        return Text(f"{at}  ", muted) + Text(f"{one_line(line.get('kind')):<9}  ", muted) + Text(one_line(line.get("message")), self.colour(hue))


class LogLines(Lines):
    """Log lines of all processes."""

    def line_text(self, line: str) -> Text:
        hue = "error" if " ERROR " in line[:60] else "warning" if " WARNING " in line[:60] else "foreground"
        return Text(one_line(line), self.colour(hue))


class Events(Pane):
    """Events above, the log below."""

    _EMPTY: Final = "no log can be read from here: llmctl logs says why"

    def compose(self) -> ComposeResult:
        with Vertical(classes="box") as box:
            box.border_title = "events"
            yield EventLines(id="event-lines")
        with Vertical(classes="box") as box:
            box.border_title = "log"
            yield LogLines(id="log-lines")

    def show(self, picture: Picture, feed: Feed) -> None:
        self.query_one(EventLines).show(picture.events)
        self.query_one(LogLines).show(picture.logs)
