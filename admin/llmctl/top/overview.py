"""The banner over all tabs, and the first tab: state, speed, latencies, queue, memory."""

from __future__ import annotations

from typing import Any

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Container
from textual.widgets import Static

from llmctl.top import words
from llmctl.top.charts import Tile
from llmctl.top.feed import Feed, Picture
from llmctl.top.pages import memory_bar, memory_text
from llmctl.top.pane import Pane
from llmctl.top.style import Painted

_UNKNOWN = (None, None, None)


class Banner(Static, Painted):
    """The state, why, and what to do."""

    def show(self, picture: Picture) -> None:
        hue, muted = words.hue(picture), self.colour("muted")
        for name in ("success", "warning", "error"):
            self.set_class(hue == name, f"-{name}")
        state, life = f"● {words.state(picture)}", words.life(picture.status) if picture.error is None else ""
        gap = self.app.size.width - 3 - len(state) - len(life)
        first = Text.assemble((state, f"bold {self.colour(hue)}"), (" " * gap + life, muted) if gap > 1 else "")
        news = Text(words.news(picture), muted)
        news.truncate(max(0, self.app.size.width - 3), overflow="ellipsis")
        advice = words.advice(picture)
        self.update(Text("\n").join([first, Text(words.reason(picture)), Text(advice, muted) if advice else news]))


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
        yield Tile("KV cache", "primary", "memory")

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
        span = f"last {feed.history.window(now) / 60:.0f} min" if feed.history.since is not None else ""
        for name in ("running", "waiting"):
            self.query_one(f"#{name}", Tile).border_subtitle = span

    def _number(self, name: str, value: Any, unit: str, feed: Feed, now: float) -> None:
        muted = self.colour("muted")
        peak = feed.history.peak(name)
        left = Text.assemble((words.number(value), "bold"), (unit if value is not None else "", muted))
        right = Text(f"most {words.number(peak)}", muted) if peak else Text()
        self.query_one(f"#{name}", Tile).show(left, right, lambda width: feed.history.columns(name, width, now))

    def _times(self, name: str, values: tuple[float | None, ...], feed: Feed, now: float) -> None:
        muted = self.colour("muted")
        (name50, p50), *rest = words.percentiles(values)
        left, right = Text.assemble((p50, "bold"), (f" {name50}", muted)), Text("  ").join(Text.assemble(text, (f" {name}", muted)) for name, text in rest)
        if values == _UNKNOWN:
            # What was counted before the first look, only the daemon knows.
            recalled = feed.history.last(name, now)
            left = Text.assemble((words.short_time(recalled), "bold"), (f" {name50}" if recalled is not None else "", muted))
            right = Text("none in the last minute" if recalled is None and feed.picture.at is not None else "", muted)
        self.query_one(f"#{name}", Tile).show(left, right, lambda width: feed.history.columns(name, width, now))

    def _memory(self, picture: Picture, feed: Feed, now: float) -> None:
        kv = picture.status.get("kv") or {}
        tile, text = self.query_one("#memory", Tile), memory_text(self, kv)
        total = kv.get("pages_total") or 0
        tile.border_title = f"KV cache · {1 - (kv.get('pages_free') or 0) / total:.0%} in use" if total else "KV cache"
        if not total:
            text = Text("no pages: the engine is not ready" if picture.at is not None else "–", self.colour("muted"))
        left, right = text, Text()
        if total and self.screen.has_class("-short"):  # no room for a frame that says it
            left, right = Text(f"{1 - (kv.get('pages_free') or 0) / total:.0%}", "bold"), text
        elif total:
            left, right = memory_bar(self, kv, max(4, tile.content_size.width - text.cell_len - 3)), text
        tile.show(left, right, lambda width: feed.history.columns("kv", width, now), top=1.0)
