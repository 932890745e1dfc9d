"""The third tab, the KV cache: pages, the biggest prefixes, who holds most."""

from __future__ import annotations

from typing import Any

from textual.app import ComposeResult
from textual.containers import Container, Vertical

from llmctl.output import duration
from llmctl.top import words
from llmctl.top.feed import Feed, Picture
from llmctl.top.pages import PageMap
from llmctl.top.pane import Pane
from llmctl.top.tables import Box, Column, Rows


def _plain(name: str, key: str, width: int, right: bool = True) -> Column:
    return Column(name, lambda row: row.get(key), width, right)


_PREFIXES = (
    _plain("PREFIX", "name", 0, False), _plain("FROM", "start", 7), _plain("TOKENS", "tokens", 7), _plain("PAGES", "pages", 6),
    _plain("BELOW", "below", 6), _plain("HITS", "hits", 6), _plain("USERS", "users", 6),
)  # fmt: skip
_HOLDERS = (
    _plain("HOLDER", "rid", 0, False), _plain("PHASE", "phase", 9, False),
    Column("AGE", lambda row: row.get("age_s"), 7, True, lambda row: duration(row.get("age_s"))), _plain("PAGES", "pages", 6),
)  # fmt: skip


def _prefix(row: dict[str, Any]) -> str:
    return f"{row.get('rank')} {row.get('name')}"


def _holder(row: dict[str, Any]) -> str:
    return str(row.get("rid"))


class Cache(Pane):
    """See the module."""

    def compose(self) -> ComposeResult:
        with Vertical(classes="box", id="map") as box:
            box.border_title = "pages"
            yield PageMap()
        with Container(id="cache-tables"):
            yield Box("biggest prefixes", Rows(_PREFIXES, _prefix, id="prefix-rows"), "no prefix is cached", id="prefixes")
            yield Box("who holds most", Rows(_HOLDERS, _holder, id="holder-rows"), "no request holds pages", id="holders")

    def show(self, picture: Picture, feed: Feed) -> None:
        kv = picture.kv or picture.status.get("kv") or {}
        self.query_one(PageMap).show(kv)
        cache = kv.get("prefix_cache") or {}
        rate = cache.get("hit_rate")
        box = self.query_one("#map")
        box.border_title = f"{words.number(kv.get('pages_total'))} pages of {kv.get('page_size') or '–'} tokens"
        box.border_subtitle = f"prefix cache: {rate:.1%} of {cache.get('queried_tokens'):,} prompt tokens were known" if rate is not None else ""
        self.query_one("#prefixes", Box).show(kv.get("prefixes") or [])
        self.query_one("#holders", Box).show(kv.get("holders") or [])
