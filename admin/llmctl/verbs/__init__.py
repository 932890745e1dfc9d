"""The verbs: one table, and one file each, whose docstring is the verb's help and whose `run` does it (the exit status).

A verb's module is imported only when it is used. `crashes`, `top` and `lora` are here like all others.
"""

from __future__ import annotations

from typing import Final

from llmctl.verb import Verb
from llmctl.verbs._changing import CHANGING
from llmctl.verbs._reading import READING

#: Verb -> what it is, in the order of `llmctl --help`.
VERBS: Final[dict[str, Verb]] = READING | CHANGING


def module_of(name: str) -> str:
    """The module of a verb."""
    return f"llmctl.verbs.{name.replace('-', '_')}"
