"""What an operation has changed, for its record and the audit: the facts that its verb is about, before and after."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from llmd.control.core import Core

#: Verb -> the facts that it is about. What a config reload changes stands in its plan, too.
ABOUT: Final[dict[str, tuple[str, ...]]] = {
    "drain": ("state",),
    "resume": ("state",),
    "restart": ("engine epoch",),
    "reload": ("weights", "engine epoch"),
    "config/reload": ("engine epoch",),
    "log-level": ("log level",),
}


class Effect(Struct, frozen=True):
    """One thing that was one way and is another, both as operators read them."""

    key: str
    """A key of the configuration, or words."""
    before: str
    after: str


Facts = dict[str, str]


def facts(core: Core, verb: str) -> Facts:
    """What `verb` may change, as it is now."""
    about = ABOUT.get(verb, ())
    found = {"state": core.machine.state, "weights": core.boot.files.weights_version, "engine epoch": str(core.epoch)}
    kept = {name: value for name, value in found.items() if name in about}
    return kept | (_log_levels(core) if "log level" in about else {})


def effects(before: Facts, after: Facts) -> list[Effect]:
    """What differs; log levels that changed alike together."""
    changed = [(name, before[name], after[name]) for name in before if before[name] != after.get(name, before[name])]
    levels = [entry for entry in changed if entry[0].startswith(_LEVEL)]
    alike: dict[tuple[str, str], list[str]] = {}
    for name, old, new in levels:
        alike.setdefault((old, new), []).append(name.removeprefix(_LEVEL))
    everybody = sum(name.startswith(_LEVEL) for name in before)
    told = [Effect("log level" + (f" of {', '.join(names)}" if len(names) < everybody else ""), *values) for values, names in alike.items()]
    return [Effect(*entry) for entry in changed if entry not in levels] + told


_LEVEL: Final = "log level of "


def _log_levels(core: Core) -> Facts:
    configured, by_hand = core.boot.args.observability.log_level, core.remembered.log_levels
    return {f"{_LEVEL}{name}": by_hand.get(name, configured) for name in ("supervisor-0", *(spec.name for spec in core.boot.processes))}
