"""Runs llmd's embedding with the processes of a JSON file, in place of a plan: `python embed.py FILE`."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

from llmd.config.server_args import RestartArgs
from llmd.errors import LlmdError
from llmd.observability import logs
from llmd.plan.ports import PortArgs
from llmd.plan.spec import ProcessSpec
from llmd.supervisor import environ, rundir, sockets
from llmd.supervisor.embedding import Embedding
from llmd.supervisor.facts import Report, Settings
from llmd.supervisor.logsink import SinkStream, sink_for
from llmd.supervisor.notify import Notifier
from llmd.supervisor.os_seam import Os


def main(file: str) -> int:
    given = json.loads(Path(file).read_text())
    os_ = Os()
    ports = PortArgs(given["run_dir"])
    sink = sink_for(Path(given["log_dir"]), os_)
    logs.setup("supervisor", "debug" if given.get("debug") else "info", "text")
    for handler in logging.getLogger().handlers:
        handler.setStream(SinkStream(sink, "supervisor"))
    notifier = Notifier(os.environ)
    rundir.prepare(ports, None)
    lock = rundir.Lock(ports.lock)
    rundir.clear_stale_sockets(ports, ports.admin_socket, 2)
    listener = sockets.listen(given.get("host", "127.0.0.1"), 0, 128, os.environ)
    lock.write({"pid": os.getpid(), "http": listener.url})
    settings = given["settings"]
    restart = RestartArgs(**settings.pop("restart", {}))
    specs = tuple(ProcessSpec(title="", env={}, **{**spec, "argv": tuple(spec["argv"])}) for spec in given["specs"])

    def on_ready(report: Report) -> None:
        logging.getLogger("embed").info("banner")

    embedding = Embedding(
        specs,
        Settings(start_id="test", restart=restart, **settings),
        ports=ports,
        listener=listener.socket,
        backlog=128,
        env=environ.cleaned(os.environ, failpoints=False),
        sink=sink,
        notifier=notifier,
        os_=os_,
        on_ready=on_ready,
    )
    status = embedding.run()
    for line in embedding.core.last_words:
        logging.error("%s", line)
    return status


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1]))
    except LlmdError as error:
        print(error.message, file=sys.stderr)
        sys.exit(error.exit_status)
