"""The verbs that change something."""

from __future__ import annotations

from typing import Final

from llmctl.verb import Verb, arg

_NO_WAIT: Final = arg("--no-wait", help="return as soon as it has begun", kind="flag")

CHANGING: Final[dict[str, Verb]] = {
    "flush": Verb(
        "forget cached prefixes",
        "safe",
        examples=(("flush", "now, refused while requests run"), ("flush --timeout 30s", "as soon as none runs")),
    ),
    "reload": Verb(
        "take the changed configuration file; `reload weights PATH` loads other weights",
        "disrupts",
        args=(
            arg("what", help="what to reload; default: config", many="?", choices=("config", "weights"), default="config"),
            arg("path", help="GGUF file or model directory", metavar="PATH", many="?", complete="path"),
            arg("--mode", help="what happens to running requests; default: reload.mode", choices=("drain", "abort", "now")),
            arg("--version", help="name of the new weights; default: derived from the files", metavar="NAME", dest="weights_version"),
            _NO_WAIT,
        ),
        examples=(
            ("reload --dry-run", "what would change, and what it costs"),
            ("reload weights /models/v2 --version v2", "other weights of the same shape"),
        ),
    ),
    "drain": Verb(
        "take no new requests, finish the running ones",
        "disrupts",
        examples=(("drain --wait", "until nothing runs"), ("drain --timeout 1min", "for a minute at most")),
    ),
    "resume": Verb("end a drain", "safe"),
    "abort": Verb(
        "end a request, a client's requests, or all",
        "ends",
        args=(
            arg(
                "rid",
                help="llmd's own id of the request: `id` in the answer, X-Llmd-Rid, `rid` in the log",
                metavar="RID",
                many="?",
                one_of="which",
                complete="rid",
            ),
            arg("--client-id", help="the X-Request-Id that the client sent", metavar="X", one_of="which", complete="client"),
            arg("--all", help="all requests that run or wait", kind="flag", one_of="which"),
        ),
        examples=(("abort cmpl-1234", "exactly this one"), ("abort --client-id job-7 --dry-run", "what would it end")),
    ),
    "lora": Verb(
        "adapters: list, load, unload (not there yet)",
        "safe",
        args=(
            arg("what", help="default: list", many="?", choices=("list", "load", "unload"), default="list"),
            arg("name", help="name of the adapter", metavar="NAME", many="?"),
            arg("path", help="its directory", metavar="PATH", many="?", complete="path"),
        ),
    ),
    "restart": Verb(
        "restart the engine; running requests pause and go on",
        "disrupts",
        args=(_NO_WAIT, arg("--all", help="the whole daemon", kind="flag")),
        examples=(("restart --dry-run", "what would this action break"), ("restart --reason 'new driver'", "with a word for the audit")),
    ),
    "stop": Verb(
        "stop the daemon",
        "ends",
        args=(arg("--no-wait", help="return as soon as it has begun", kind="flag", dest="leave"),),
        examples=(("stop", "finish what runs, then end"),),
    ),
    "log-level": Verb(
        "set what is logged, of all processes or one, until it restarts",
        "safe",
        args=(
            arg("level", help="least severe level; `default`: what the configuration says", choices=("debug", "info", "warning", "error", "default")),
            arg("process", help="only this process or role", many="?", complete="process"),
        ),
        examples=(("log-level debug scheduler", "see what the engine does"), ("log-level default", "back to the configuration")),
    ),
}
