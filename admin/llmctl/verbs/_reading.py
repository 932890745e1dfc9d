"""The verbs that look and wait."""

from __future__ import annotations

from typing import Final

from llmctl.verb import Arg, Verb, arg

_WATCH: Final[Arg] = arg("-w", "--watch", help="show it again every 2 seconds, or every TIME", metavar="TIME", kind="seconds", many="?", const=2.0)
_AUDITED: Final = ("flush", "reload", "config/reload", "drain", "resume", "abort", "restart", "stop", "log-level", "lora/load", "lora/unload")
_LINES: Final[Arg] = arg("-n", "--lines", help="how many; default: 50", metavar="N", kind="number", default=50)

READING: Final[dict[str, Verb]] = {
    "status": Verb(
        "state, processes, requests, memory",
        args=(_WATCH,),
        examples=(("status", "is it up, and if not, why"), ("status -w", "keep looking"), ("status -o json", "for programs; the same keys in every state")),
    ),
    "health": Verb(
        "exit 0 if ready, 1 if up but not ready, 3 if not running, 4 if not answering",
        examples=(("health && curl ...", "in scripts"),),
    ),
    "wait": Verb(
        "wait until llmd is ready, drained, has stopped, or serves other weights",
        args=(
            arg(
                "--for",
                help="ready, drained, stopped or version=NAME; default: ready",
                metavar="WHAT",
                dest="what",
                default="ready",
                suggest=("ready", "drained", "stopped", "version="),
            ),
            arg("--operation", help="wait for the end of this operation instead", metavar="ID", complete="operation"),
        ),
        examples=(("wait --timeout 10min", "until it is ready"), ("wait --for=version=v2", "until these weights are served")),
    ),
    "ps": Verb("processes", args=(_WATCH,), examples=(("ps -o wide", "with heartbeats and incarnations"),)),
    "requests": Verb(
        "requests in flight: who, how old, where they stand, how fast",
        args=(
            _WATCH,
            arg("--sort", help="by what; default: age", choices=("age", "tokens", "rate", "pages", "prompt"), default="age"),
            arg("--phase", help="only these", choices=("submitted", "waiting", "prefill", "decode", "held")),
            arg("--client-id", help="only those whose client sent this X-Request-Id", metavar="X", complete="client"),
            _LINES,
        ),
        examples=(("requests", "what is running and who is slow"), ("requests --sort pages", "who holds the KV cache")),
    ),
    "kv": Verb("KV cache: pages, hit rate, biggest prefixes, who holds most", args=(_WATCH,), examples=(("kv", "who holds the KV cache"),)),
    "weights": Verb("the weights that are served", examples=(("weights", "which version answers"),)),
    "config": Verb(
        "the configuration: show, diff, explain, schema, reload",
        args=(
            arg("what", help="default: show", many="?", choices=("show", "diff", "explain", "keys", "schema", "reload"), default="show"),
            arg("key", help="a key like http.port, or a section", metavar="KEY", many="?", complete="key"),
            arg("--origin", help="show: where each value was written", kind="flag"),
            arg("--all", help="show: defaults too", kind="flag"),
        ),
        examples=(
            ("config show --origin", "what is in effect, and where it was written"),
            ("config diff", "what a reload would change"),
            ("config explain http.drain_timeout", "what a key means"),
            ("config reload", "take the changed file; the same as `reload`"),
        ),
    ),
    "events": Verb(
        "what has happened: states, deaths, operations",
        args=(
            arg("-f", "--follow", help="go on with new ones until interrupted", kind="flag"),
            arg("--since", help="only those after this number", metavar="SEQ", kind="number", default=0),
            arg("--kind", help="only this kind", choices=("state", "process", "operation", "config", "degraded")),
            _LINES,
        ),
        examples=(("events", "what happened lately"), ("events -f", "watch")),
    ),
    "logs": Verb(
        "log lines of all processes",
        args=(
            arg("process", help="only these processes, e.g. control-0, or all of a role, e.g. scheduler", many="*", complete="process"),
            _LINES,
            arg("-f", "--follow", help="go on with new lines until interrupted", kind="flag"),
            arg("--dir", help="where the log files are; default: the daemon's log_dir", complete="path"),
        ),
        examples=(("logs -f scheduler", "the engine's lines as they come"),),
    ),
    "audit": Verb(
        "who changed what, when, why, and how it ended",
        args=(_LINES, arg("--verb", help="only this verb", metavar="VERB", dest="verb_name", suggest=_AUDITED)),
        examples=(("audit", "who did it"), ("audit --verb restart -n 5", "the last five restarts")),
    ),
    "crashes": Verb(
        "which processes ended by themselves or hung, how, and what they were doing",
        args=(_LINES, arg("id", help="one of them, by its ID or the beginning of it", metavar="ID", many="?", complete="crash")),
        examples=(("crashes", "what has crashed"), ("crashes 20260101T", "all that is known of one")),
    ),
    "top": Verb(
        "a full screen that lives: state, processes, KV cache, requests, events",
        args=(arg("--once", help="print the overview as text, once", kind="flag"),),
        examples=(("top", "watch, and act"), ("top --once", "for a ticket or a pipe")),
    ),
    "doctor": Verb(
        "look for what is wrong or will be: permissions, disk, memory, limits, files, versions",
        args=(arg("-c", "--config", help="the configuration to look at; default: that of the daemon or of the last start", metavar="FILE", complete="path"),),
        examples=(("doctor", "before the first start, and when something is odd"),),
    ),
    "report": Verb(
        "a bundle for support: state, configuration, logs; no prompts, no secrets",
        args=(arg("--output-file", help="default: llmd-report-TIME.tar.gz here", metavar="FILE", dest="file", complete="path"),),
        examples=(("report", "to attach to a question"),),
    ),
    "version": Verb("versions of llmctl and of the daemon"),
    "bench": Verb(
        "measure a server under load",
        args=(
            arg("server", help="the server, as http://HOST:PORT or with its path; default: this llmd", metavar="URL", many="?"),
            arg("--model", help="model to ask for; default: the first that it serves", metavar="NAME"),
            arg("--api-key-file", help="file with the key; else $OPENAI_API_KEY", metavar="FILE", complete="path"),
            arg(
                "--work",
                help="short: 128 in, 128 out; shared: 1,024 shared + 32 in, 64 out; long: 1,500 in, 16 out",
                choices=("short", "shared", "long"),
                default="short",
            ),
            arg("--streams", help="requests in flight; default: 1,4,16,64", metavar="N,...", kind="numbers", default=(1, 4, 16, 64)),
            arg("--requests", help="requests of each run; default: as many as streams", metavar="N", kind="number"),
            arg("--input-len", help="length of prompts, in words", metavar="N", kind="number"),
            arg("--output-len", help="tokens to generate", metavar="N", kind="number"),
            arg("--seed", help="of the prompts; default: other prompts each time", metavar="N", kind="number"),
        ),
        examples=(("bench --streams 1,16", "how fast is it"),),
    ),
}
