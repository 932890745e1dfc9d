"""Where a running llmd's configuration came from, so that it can be read again: the file, and the flags and variables that go before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from llmd.config.server_args import ServerArgs
from llmd.config.values import value_of

_PREFIX = "LLMD_"


class Change(Struct, frozen=True):
    """One key whose value is another one now. `before` and `after` as the file writes them, secrets left out."""

    key: str
    before: str
    after: str
    reload: str
    """`live`, `engine` or `restart`."""
    origin: str
    """Where the new value comes from."""


class ConfigSource(Struct, frozen=True, kw_only=True):
    """What one reading gave, before anything was resolved, and all that a second reading needs."""

    args: ServerArgs
    origins: dict[str, str]
    config_file: str | None = None
    overrides: tuple[str, ...] = ()
    environ: dict[str, str] = {}
    """The variables that begin with LLMD_."""

    def read_again(self, *, allow_failpoints: bool) -> ConfigSource:
        """The configuration as it would be if llmd were started now. Raises ConfigError with every fault."""
        return read(self.config_file, self.overrides, self.environ, allow_failpoints=allow_failpoints)

    def changes(self, other: ConfigSource) -> list[Change]:
        """What `other` has changed, in the order of the file."""
        from llmd.config.fields import FIELDS
        from llmd.config.show import value_text

        found = []
        for key, field in FIELDS.items():
            old, new = value_of(self.args, key), value_of(other.args, key)
            if old != new:
                found.append(Change(key, value_text(field, old), value_text(field, new), field.reload, other.origins[key]))
        return found


def read(config_file: str | None, overrides: tuple[str, ...], environ: Mapping[str, str], *, allow_failpoints: bool) -> ConfigSource:
    """Read all layers, and check them. Raises ConfigError."""
    from llmd.config.check import load_checked

    loaded = load_checked(config_file, list(overrides), environ, allow_failpoints=allow_failpoints)
    own = {name: value for name, value in environ.items() if name.startswith(_PREFIX)}
    return ConfigSource(args=loaded.args, origins=loaded.origins, config_file=loaded.config_file, overrides=overrides, environ=own)


def overlay(effective: ServerArgs, changed: ServerArgs, keys: list[str]) -> ServerArgs:
    """`effective` with the values of `keys` taken from `changed`."""
    from msgspec.structs import replace

    def put(node: Any, path: list[str], value: Any) -> Any:
        head, *rest = path
        return replace(node, **{head: put(getattr(node, head), rest, value) if rest else value})

    for key in keys:
        effective = put(effective, key.split("."), value_of(changed, key))
    return effective
