"""SGLang's administrative paths, for scripts that have them: each hands its verb to control's admin socket, which does, audits and answers.

They need the admin key. What comes back is control's status and error, or `{"success": true, "message", "operation"}`.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from llmd.errors import CODES, RequestError
from llmd.frontend.body import read_optional_json
from llmd.frontend.exchange import Receive, Scope, Send, exchange_of
from llmd.frontend.fields import Fields, fault
from llmd.frontend.replies import reply_json
from llmd.frontend.runtime import Runtime

#: Seconds for a verb that says nothing of a timeout of its own: a reload loads weights.
DEADLINE_S: Final = 900.0
#: How control is told for whom this frontend speaks (llmd.control.peer): it believes its frontends that, by their pid.
PASSED_KEY: Final = "X-Llmd-Passed-Key"
PASSED_ADDRESS: Final = "X-Llmd-Passed-Address"
MAX_PATH: Final = 4096


class Alias(Struct, frozen=True):
    """One path, the verb it stands for, and how its fields become the verb's."""

    path: str
    verb: str
    translate: Callable[[Fields], dict[str, Any]]
    methods: tuple[str, ...] = ("POST",)


def _flush(fields: Fields) -> dict[str, Any]:
    seconds = fields.number("timeout", 0.0, 86400.0, 0.0)
    return {"timeout_s": seconds} if seconds else {}


def _abort(fields: Fields) -> dict[str, Any]:
    rid = fields.string("rid", longest=256)
    if fields.boolean("abort_all"):
        return {"all": True}
    if not rid:
        raise fault("rid", "is required, unless abort_all is true")
    return {"rid": rid}


def _reload(fields: Fields) -> dict[str, Any]:
    path = fields.string("model_path", longest=MAX_PATH)
    if not path:
        raise fault("model_path", "is required")
    version = fields.string("weight_version", longest=128)
    mode = {"mode": "abort"} if fields.boolean("abort_all_requests") else {}
    return {"path": path, **mode, **({"version": version} if version else {})}


ALIASES: Final = (
    Alias("/flush_cache", "flush", _flush, ("GET", "POST")),
    Alias("/abort_request", "abort", _abort),
    Alias("/update_weights_from_disk", "reload", _reload),
)
#: Paths of SGLang's that stand for what is not there: what whoever calls one is told.
NOT_BUILT: Final = {
    "/pause_generation": "pausing is not built in this version; `llmctl drain` lets requests end and takes no new ones",
    "/continue_generation": "pausing is not built in this version; `llmctl resume` ends a drain",
    "/load_lora_adapter": "LoRA adapters are not built in this version",
    "/unload_lora_adapter": "LoRA adapters are not built in this version",
}


class AdminAlias:
    """One of them."""

    def __init__(self, runtime: Runtime, alias: Alias) -> None:
        self._runtime = runtime
        self._alias = alias

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        boot, manager = self._runtime.boot, self._runtime.manager
        data = await read_optional_json(scope, receive, limit=boot.args.http.max_body, executor=manager.executor)
        params = self._alias.translate(Fields({**_query(scope), **data}))
        params["reason"] = f"{self._alias.path} of the HTTP API"
        client = scope.get("client")
        caller = {PASSED_KEY: exchange_of(scope).key, PASSED_ADDRESS: str(client[0]) if client else ""}
        admin_socket = Path(boot.args.admin.socket) if boot.args.admin.socket else boot.ports.admin_socket
        status, answer = await asyncio.to_thread(_post, admin_socket, f"/v1/{self._alias.verb}", params, caller)
        if status >= 400:
            raise _refused(status, answer)
        message = answer.get("message") or f"{self._alias.verb}: {answer.get('state', 'done')}"
        await reply_json(send, 200, {"success": True, "message": message, "operation": answer})


def _post(path: Path, url: str, params: dict[str, Any], caller: dict[str, str]) -> tuple[int, dict[str, Any]]:
    """In a thread: (status, answer) of control. Raises RequestError where it cannot be reached."""
    connection = _UnixConnection("llmd", timeout=DEADLINE_S)
    try:
        connection.unix_path = str(path)
        connection.request("POST", url, json.dumps(params), {"Content-Type": "application/json", **caller})
        response = connection.getresponse()
        answer = json.loads(response.read())
        return response.status, answer if isinstance(answer, dict) else {}
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise RequestError(f"control does not answer ({type(error).__name__}); it is replaced within seconds", code="engine_unavailable") from None
    finally:
        connection.close()


class _UnixConnection(http.client.HTTPConnection):
    unix_path = ""

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.unix_path)


def _query(scope: Scope) -> dict[str, Any]:
    """Numbers of the query string, which is where SGLang's clients put a timeout."""
    found: dict[str, Any] = {}
    for pair in bytes(scope.get("query_string", b"")).decode("latin-1").split("&"):
        name, _, value = pair.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            continue
    return found


def _refused(status: int, answer: dict[str, Any]) -> RequestError:
    error = answer.get("error") or {}
    code = error.get("code")
    return RequestError(str(error.get("message") or "refused"), code=code if code in CODES else None, param=error.get("param"), status=status)
