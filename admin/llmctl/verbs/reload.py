"""Load other weights: `llmctl reload weights PATH`. The new ones are checked first; if they do not come up, the old ones come back.

Running requests finish first (`--mode drain`, for --timeout at most), or end with an error (`abort`, `now`). `llmctl reload` alone
will re-read the configuration file; this version cannot do that yet.
"""

from __future__ import annotations

import argparse
import os

from llmctl import exits
from llmctl.context import Context
from llmctl.exits import CtlError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", choices=("config", "weights"), default="config", help="what to reload; default: config")
    parser.add_argument("path", nargs="?", metavar="PATH", help="GGUF file or model directory")
    parser.add_argument("--mode", choices=("drain", "abort", "now"), help="what happens to running requests; default: reload.mode")
    parser.add_argument("--version", dest="weights_version", metavar="NAME", help="name of the new weights; default: derived from the files")


def run(context: Context) -> int:
    options = context.options
    if options.what == "config":
        raise CtlError(
            exits.FAILED,
            "re-reading the configuration is not there yet",
            "restart llmd for it (systemctl restart llmd, or llmctl stop and llmd run); llmctl reload weights PATH loads other weights",
        )
    if not options.path:
        raise CtlError(exits.USAGE, "reload weights needs a PATH", "llmctl reload weights PATH")
    path = os.path.abspath(options.path)
    try:
        os.stat(path)
    except FileNotFoundError:
        raise CtlError(exits.BAD_INPUT, f"{path}: there is no such file or directory") from None
    except OSError:
        pass  # the daemon may be allowed to look where we are not
    body = {"path": path, "mode": options.mode, "version": options.weights_version}
    reply = context.change("/v1/reload", {name: value for name, value in body.items() if value is not None}, waits=True)
    data = reply.get("data") or reply
    return context.report(reply, f"reloaded: weights {data.get('weights_version')}, engine epoch {data.get('epoch')}")
