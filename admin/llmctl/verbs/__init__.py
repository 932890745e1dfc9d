"""The verbs, one file each: its docstring is its help, `arguments` its options, `run` what it does (the exit status)."""

from __future__ import annotations

from typing import Final

#: Verb -> one line of help; the order of `llmctl --help`. A verb's module is imported only when it is used.
VERBS: Final[dict[str, str]] = {
    "status": "state, processes, requests, memory",
    "health": "exit 0 if ready, 1 if up but not ready, 3 if not running, 4 if not answering",
    "ps": "processes",
    "kv": "KV cache pages",
    "logs": "log lines of all processes",
    "version": "versions of llmctl and of the daemon",
    "flush": "forget cached prefixes",
    "reload": "`reload weights PATH` loads other weights",
    "drain": "take no new requests, finish the running ones",
    "resume": "end a drain",
    "abort": "end a request, a client's requests, or all",
    "restart": "restart the engine",
    "stop": "stop the daemon",
    "bench": "measure a server under load",
}
