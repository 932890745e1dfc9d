"""Restart the engine and wait until it is ready again. In this version, requests that are running end with an error."""

from __future__ import annotations

import argparse

from llmctl.context import Context


def arguments(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def run(context: Context) -> int:
    reply = context.change("/v1/restart", {}, waits=True)
    data = reply.get("data") or reply
    return context.report(reply, f"restarted: engine epoch {data.get('epoch')}")
