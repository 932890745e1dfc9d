"""GET /v1/models and /v1/models/ID: exactly the ids that requests may name."""

from __future__ import annotations

from typing import Any

from llmd.errors import RequestError
from llmd.frontend.exchange import Receive, Scope, Send
from llmd.frontend.replies import reply_json
from llmd.frontend.runtime import Runtime


class Models:
    """The list; answered in every state of the daemon."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await reply_json(send, 200, {"object": "list", "data": [model_card(self._runtime)]})


class Model:
    """One model."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        served = self._runtime.boot.served_name
        if scope["path_params"]["model"] != served:
            raise RequestError(f"no such model; this server has: {served}", code="model_not_found", param="model")
        await reply_json(send, 200, model_card(self._runtime))


def model_card(runtime: Runtime) -> dict[str, Any]:
    """What a client may know of the model."""
    served = runtime.boot.served_name
    return {
        "id": served,
        "object": "model",
        "created": int(runtime.boot.started_at),
        "owned_by": "llmd",
        "root": served,
        "parent": None,
        "max_model_len": runtime.view.context_length,
    }
