"""End a drain: take requests again."""

from __future__ import annotations

import argparse

from llmctl.context import Context


def arguments(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def run(context: Context) -> int:
    return context.report(context.change("/v1/resume", {}), "resumed: requests are taken again")
