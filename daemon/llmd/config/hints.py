"""What somebody who wrote an unknown key most likely meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Final

from llmd.config.fields import FIELDS, SECTIONS

#: How alike a name must be to be the one that was meant: 0 to 1. More is asked of one in another section.
CUTOFF: Final = 0.7
FAR_CUTOFF: Final = 0.8
_PREFIX: Final = "LLMD_"


def unknown_key(section: str, name: str) -> tuple[str, str | None]:
    """The complaint about `name` in `section` ("" is the top), and the section that was meant, if it was one."""
    here = f"in section {section!r}" if section else "at the top level"
    kind = "key" if section else "key or section"
    plain = name.replace("-", "_").lower()
    siblings = _children(section)
    if plain != name and plain in siblings:
        key = _join(section, plain)
        return f"unknown {kind} {name!r} {here}: write it {plain!r}", key if key in SECTIONS else None
    homes = [f.key for f in FIELDS.values() if f.leaf == plain] + [s for s in SECTIONS if s.rpartition(".")[2] == plain]
    if homes:
        places = " or ".join(f"{home.rpartition('.')[0]!r}" if "." in home else "the top level" for home in homes)
        return f"unknown {kind} {name!r} {here}: {plain!r} belongs under {places}", next((h for h in homes if h in SECTIONS), None)
    close = get_close_matches(plain, siblings, 1, CUTOFF)
    if close:
        key = _join(section, close[0])
        return f"unknown {kind} {name!r} {here}: did you mean {close[0]!r}?", key if key in SECTIONS else None
    leaves = {f.leaf: f.key for f in FIELDS.values()}
    far = get_close_matches(plain, leaves, 1, FAR_CUTOFF)
    if far:
        return f"unknown {kind} {name!r} {here}: did you mean {leaves[far[0]]!r}?", None
    return f"unknown {kind} {name!r} {here}: known are {', '.join(siblings)}", None


def unknown_path(key: str) -> str:
    """The complaint about a dotted key that does not exist: about its first part that does not."""
    section = ""
    *parents, leaf = key.split(".")
    for part in parents:
        if _join(section, part) in FIELDS:
            return f"{_join(section, part)} is a key, there is nothing below it"
        if _join(section, part) not in SECTIONS:
            return unknown_key(section, part)[0]
        section = _join(section, part)
    return unknown_key(section, leaf)[0]


def nearest_env(name: str, known: Iterable[str]) -> str:
    """`: did you mean ...?`, or nothing."""
    tails = {env.removeprefix(_PREFIX): env for env in known}
    close = get_close_matches(name.removeprefix(_PREFIX), tails, 1, CUTOFF)
    return f": did you mean {tails[close[0]]}?" if close else " (a key is LLMD_SECTION__KEY, with two underscores)"


def _join(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name


def _children(section: str) -> list[str]:
    """Keys and sections directly below `section`; for an unknown one, the sections."""
    keys = [*FIELDS, *SECTIONS]
    below = [key.rpartition(".")[2] for key in keys if key.rpartition(".")[0] == section]
    return below or list(SECTIONS)
