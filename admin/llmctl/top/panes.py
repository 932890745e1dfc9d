"""The tabs, but for the events, which are in llmctl.top.events. Each takes a Picture and the Feed that keeps the history, and draws what concerns it."""

from __future__ import annotations

import math
from typing import Any, Final

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Container, Vertical
from textual.content import Content
from textual.widgets import Static

from llmctl.output import counted, duration, one_line, size
from llmctl.top import words
from llmctl.top.feed import Feed, Picture
from llmctl.top.style import STATES
from llmctl.top.widgets import MOST, Column, Detail, Lines, Painted, Rows, Tile


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
        life = words.life(picture.status)
        gap = " " * max(2, self.app.size.width - 3 - len(f"● {state}") - len(life))
        third = words.advice(picture) or words.news(picture)
        first = ((f"● {state}", f"bold {self.colour(hue)}"), gap, (life, muted))
        lines = Text.assemble(*first, "\n", words.reason(picture), "\n", (third, muted))
        self.update(lines)


class Overview(Pane):
    """State, speed, latencies, queue, memory."""

    def compose(self) -> ComposeResult:
        with Container(id="tiles"):
            yield Tile("tokens out", "primary", "out")
            yield Tile("tokens in", "secondary", "in")
            yield Tile("first token", "primary", "first_token")
            yield Tile("between tokens", "secondary", "gap")
            yield Tile("running", "primary", "running")
            yield Tile("waiting", "secondary", "waiting")
        yield Tile("KV cache", "accent", "memory")

    def show(self, picture: Picture, feed: Feed) -> None:
        now = feed.clock() if picture.at is None else picture.at
        throughput, requests = picture.status.get("throughput") or {}, picture.status.get("requests") or {}
        self._number("out", throughput.get("generation_tokens_s"), " /s", feed, now)
        self._number("in", throughput.get("prompt_tokens_s"), " /s", feed, now)
        self._times("first_token", picture.first_token, feed, now)
        self._times("gap", picture.gap, feed, now)
        self._number("running", requests.get("running"), "", feed, now)
        self._number("waiting", requests.get("waiting"), "", feed, now)
        self._memory(picture, feed, now)
        span = feed.history.window(now)
        for name in ("running", "waiting"):
            self.query_one(f"#{name}", Tile).border_subtitle = f"last {span / 60:.0f} min"

    def _number(self, name: str, value: Any, unit: str, feed: Feed, now: float) -> None:
        muted = self.colour("muted")
        peak = feed.history.peak(name)
        left = Text.assemble((words.number(value), "bold"), (unit, muted))
        right = Text(f"most {words.number(peak)}", muted) if peak else Text()
        self.query_one(f"#{name}", Tile).show(left, right, lambda width: feed.history.columns(name, width, now))

    def _times(self, name: str, values: tuple[float | None, ...], feed: Feed, now: float) -> None:
        muted = self.colour("muted")
        (name50, p50), *rest = words.percentiles(values)
        left = Text.assemble((p50, "bold"), (f" {name50}", muted))
        right = Text("  ").join(Text.assemble(text, (f" {name}", muted)) for name, text in rest)
        self.query_one(f"#{name}", Tile).show(left, right, lambda width: feed.history.columns(name, width, now))

    def _memory(self, picture: Picture, feed: Feed, now: float) -> None:
        kv = picture.status.get("kv") or {}
        tile, text = self.query_one("#memory", Tile), memory_text(self, kv)
        total = kv.get("pages_total") or 0
        tile.border_title = f"KV cache · {1 - (kv.get('pages_free') or 0) / total:.0%} in use" if total else "KV cache"
        short = self.screen.has_class("-short")  # no room for both
        bar = Text() if short else memory_bar(self, kv, max(4, tile.content_size.width - text.cell_len - 3))
        tile.show(bar, text, lambda width: feed.history.columns("kv", width, now), top=1.0)


#: How pages of each state are drawn.
PAGES: Final = (("active", "█", "primary"), ("cached", "▒", "secondary"), ("free", "·", "muted"))


def page_cells(kv: dict[str, Any], cells: int) -> list[int]:
    """How many of `cells` are active, cached and free; at least one for what is there."""
    total = kv.get("pages_total") or 0
    active = min(cells, _cells(kv.get("pages_active"), total, cells))
    cached = min(cells - active, _cells(kv.get("pages_cached"), total, cells))
    return [active, cached, cells - active - cached]


def memory_bar(painted: Painted, kv: dict[str, Any], width: int) -> Text:
    """The pages as parts of a line."""
    return Text.assemble(*((glyph * count, painted.colour(hue)) for (_, glyph, hue), count in zip(PAGES, page_cells(kv, width), strict=True)))


def memory_text(painted: Painted, kv: dict[str, Any]) -> Text:
    """The same in numbers."""
    text = Text()
    for number, (name, glyph, hue) in enumerate(PAGES):
        text.append(f"{'  ' * bool(number)}{glyph} ", painted.colour(hue)).append(words.number(kv.get(f"pages_{name}")), "bold")
        text.append(f" {name}", painted.colour("muted"))
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
            Column("PROCESS", name_of, 13),
            Column("STATE", lambda row: row.get("state"), 9),
            Column("PID", lambda row: row.get("pid") or None, 8, True, since="-medium"),
            Column("UP", lambda row: row.get("uptime_s"), 7, True, lambda row: duration(row.get("uptime_s")), since="-medium"),
            Column("RESTARTS", lambda row: row.get("restarts"), 8, True),
            Column("HEARD", lambda row: row.get("heartbeat_age_s"), 6, True, lambda row: duration(row.get("heartbeat_age_s")), since="-medium"),
            Column("CPU", lambda row: self._cpu.get(name_of(row)), 5, True, self._share),
            Column("MEMORY", lambda row: row.get("rss_bytes"), 8, True, lambda row: size(row.get("rss_bytes"))),
            Column("LAST EXIT", lambda row: (row.get("last_exit") or {}).get("age_s"), 0, False, words.exit_text, since="-wide"),
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
        detail.border_title = Content(one_line(name_of(row)))
        last = row.get("last_exit") or {}
        doing = " · ".join(str(part) for part in (row.get("stage"), row.get("phase"), f"{row['steps']:,} steps" if row.get("steps") else "") if part)
        ended = words.exit_text(row) if last else "none: it is in its first life"
        text = Text.assemble(("last exit  ", muted), ended, ("\nnow        ", muted), doing or str(row.get("state")))
        for line in str(last.get("stderr") or "").splitlines()[-2:]:
            text.append("\n" + one_line(line), muted)
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
        cells = min(width * rows, total)
        if not cells:
            return Text("no pages: the engine is not ready", self.colour("muted"))
        # Each state is one run of glyphs, broken where a row ends.
        runs = Text.assemble(*((glyph * count, self.colour(hue)) for (_, glyph, hue), count in zip(PAGES, page_cells(self.kv, cells), strict=True)))
        text = Text("\n").join([*runs.divide(range(width, cells, width)), *[Text()] * (rows - math.ceil(cells / width))])
        text.append("\n")
        each = total / cells
        scale = "a block is a page" if each == 1 else f"a block is about {each:.0f} pages"
        legend = memory_text(self, self.kv)
        if legend.cell_len + len(scale) + 3 <= width:
            legend.append(f"   {scale}", self.colour("muted"))
        return Text.assemble(text, legend, no_wrap=True)


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
            Column("CLIENT ID", lambda row: row.get("client_id"), 20, since="-wide"),
            Column("PHASE", lambda row: row.get("phase"), 9),
            Column("AGE", lambda row: row.get("age_s"), 7, True, lambda row: duration(row.get("age_s"))),
            Column("PROMPT", lambda row: row.get("prompt_tokens"), 7, True, since="-medium"),
            Column("TOKENS", lambda row: row.get("output_tokens"), 7, True),
            Column("TOK/S", lambda row: row.get("tokens_s"), 6, True, lambda row: f"{row.get('tokens_s') or 0:.1f}"),
            Column("SILENT", lambda row: row.get("silent_s"), 7, True, lambda row: words.short_time(row.get("silent_s")), since="-medium"),
            Column("PAGES", lambda row: row.get("pages"), 6, True, since="-medium"),
        )
        with Vertical(classes="box") as box:
            box.border_title = "requests in flight"
            yield Rows(columns, lambda row: str(row.get("rid")), sort=None, id="request-rows")
        yield Detail(id="request-detail")

    def show(self, picture: Picture, feed: Feed) -> None:
        rows = picture.requests.get("requests") or []
        total = picture.requests.get("total", len(rows))
        self.query_one(Rows).show(rows)
        self.query_one(".box").border_title = f"{counted(total, 'request')} in flight, oldest first" + (
            f"; {MOST} shown, / finds others" if len(rows) > MOST else ""
        )
        self.detail()

    def on_data_table_row_highlighted(self) -> None:
        self.detail()

    def detail(self) -> None:
        row, detail = self.query_one(Rows).marked, self.query_one(Detail)
        detail.display = row is not None
        if row is None:
            return
        muted = self.colour("muted")
        detail.border_title = Content(one_line(row.get("rid")))  # it may be a client's, and is no markup
        detail.border_subtitle = "a aborts it"
        first = row.get("first_token_s")
        got, most, prompt, known = (f"{row.get(name) or 0:,}" for name in ("output_tokens", "max_new_tokens", "prompt_tokens", "cached_tokens"))
        text = Text.assemble(
            ("client id  ", muted), one_line(row.get("client_id")),
            ("\ntokens     ", muted), f"{got} of {most} at most; prompt {prompt}, {known} of them known",
            ("\ntimes      ", muted), f"waited {duration(row.get('waited_s'))}, first token {f'after {duration(first)}' if first else 'not yet'}",
        )  # fmt: skip
        detail.update(text)
