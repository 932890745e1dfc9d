"""GET /model_info and /server_info (also as /get_...): what SGLang's clients ask before they begin. Nothing secret, and of paths only the model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from llmd import __version__
from llmd.config.values import value_of
from llmd.frontend.exchange import Receive, Scope, Send
from llmd.frontend.replies import reply_json
from llmd.frontend.runtime import Runtime

#: What SGLang's load generators read of its first scheduler after a run, for lines that they leave out where there is no number.
_NOT_KEPT: Final = {"avg_spec_accept_length": None, "last_gen_throughput": None}


class ModelInfo:
    """The model."""

    paths = ("/model_info", "/get_model_info")

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await reply_json(send, 200, model_info(self._runtime))


class ServerInfo:
    """The model, the configuration and the daemon's state."""

    paths = ("/server_info", "/get_server_info")

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        runtime = self._runtime
        facts = {
            "version": __version__,
            "state": runtime.view.state,
            "startup_time": runtime.boot.started_at,
            "configuration": shown_configuration(runtime),
            "internal_states": [_NOT_KEPT],
        }
        await reply_json(send, 200, {**model_info(runtime), **facts})


def model_info(runtime: Runtime) -> dict[str, Any]:
    """`tokenizer_path` is the model's, or the name of the one that is configured: where llmd keeps its own copy is private."""
    boot, view = runtime.boot, runtime.view
    model_path = boot.files.path or boot.files.name
    tokenizer = boot.args.model.tokenizer_path
    return {
        "model_path": model_path,
        "served_model_name": boot.served_name,
        "tokenizer_path": Path(tokenizer).name if tokenizer else model_path,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": view.weights_version,
        "model_type": boot.files.architecture,
        "quantization": boot.files.quantization,
        "max_model_len": view.context_length,
        "max_total_num_tokens": view.kv_capacity,
        "vocab_size": boot.files.vocab_size,
        "has_image_understanding": False,
        "has_audio_understanding": False,
    }


def shown_configuration(runtime: Runtime) -> dict[str, Any]:
    """Each key with its effective value; where a value is a path, only whether there is one: the layout of the machine is no client's business."""
    from llmd.config.fields import FIELDS
    from llmd.config.show import redact_url

    shown: dict[str, Any] = {}
    for key, field in FIELDS.items():
        value = msgspec.to_builtins(value_of(runtime.boot.args, key))
        if field.path and value:
            value = "***"
        shown[key] = redact_url(value) if isinstance(value, str) and "://" in value else value
    return shown
