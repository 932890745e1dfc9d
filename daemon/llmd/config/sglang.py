"""SGLang's names for llmd's keys, in one table: what `python -m llmd.launch_server` and `ServerArgs.from_kwargs` understand.

A name becomes a flag over environment and file, like `--set`. A name of SGLang's that llmd has nothing for is refused by name
and never ignored; so is a value that llmd's own key does not know.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Final

from msgspec import Struct

from llmd.config.keys import keep_key
from llmd.config.load import Check, FlagValue, Loaded, load_config
from llmd.config.sglang_names import UNSUPPORTED
from llmd.errors import UsageError


class Flag(Struct, frozen=True):
    """One of SGLang's flags: its names as written on the command line, the preferred one first, and the key it sets."""

    names: tuple[str, ...]
    key: str
    switch: str | None = None
    """The value that the bare flag means; None: the flag takes a value."""
    off: str | None = None
    """What its keyword means as False; None: the opposite of `switch`."""
    words: Mapping[str, str] = {}
    """SGLang's word -> ours, where they differ."""
    unit: str = ""
    """Put behind a bare number."""


_LEVELS: Final = {level.upper(): level for level in ("debug", "info", "warning", "error")} | dict.fromkeys(("critical", "CRITICAL", "fatal", "FATAL"), "error")
_DTYPES: Final = {"half": "float16", "float": "float32"}

TABLE: Final[tuple[Flag, ...]] = (
    Flag(("model-path", "model"), "model.path"),
    Flag(("tokenizer-path",), "model.tokenizer_path"),
    Flag(("served-model-name",), "model.served_name"),
    Flag(("revision",), "model.revision"),
    Flag(("chat-template",), "model.chat_template"),
    Flag(("dtype",), "model.dtype", words=_DTYPES),
    Flag(("kv-cache-dtype",), "model.kv_cache_dtype", words={"bf16": "bfloat16"}),
    Flag(("quantization",), "model.quantization"),
    Flag(("context-length",), "model.context_length"),
    Flag(("device",), "model.device"),
    Flag(("host",), "http.host"),
    Flag(("port",), "http.port"),
    Flag(("tokenizer-worker-num",), "http.workers"),
    Flag(("tp-size", "tensor-parallel-size", "tp"), "parallel.tp"),
    Flag(("pp-size", "pipeline-parallel-size", "pp"), "parallel.pp"),
    Flag(("dp-size", "data-parallel-size", "dp"), "parallel.dp"),
    Flag(("ep-size", "expert-parallel-size", "ep"), "parallel.ep"),
    Flag(("enable-dp-attention",), "parallel.dp_attention", switch="true"),
    Flag(("nnodes",), "parallel.nnodes"),
    Flag(("node-rank",), "parallel.node_rank"),
    Flag(("dist-init-addr", "nccl-init-addr"), "parallel.dist_init_addr"),
    Flag(("use-ray",), "parallel.backend", switch="ray"),
    Flag(("mem-fraction-static",), "memory.mem_fraction_static"),
    Flag(("max-running-requests",), "memory.max_running_requests"),
    Flag(("max-total-tokens",), "memory.max_total_tokens"),
    Flag(("page-size",), "memory.page_size"),
    Flag(("schedule-policy",), "scheduler.policy"),
    Flag(("chunked-prefill-size",), "scheduler.chunked_prefill_size", words={"-1": "16777216"}),  # off: no prompt is longer
    Flag(("disable-overlap-schedule",), "scheduler.overlap", switch="false", off="auto"),
    Flag(("disable-radix-cache",), "scheduler.radix_cache", switch="false"),
    Flag(("radix-eviction-policy",), "scheduler.eviction"),
    Flag(("max-queued-requests",), "scheduler.max_queued_requests"),
    Flag(("random-seed",), "scheduler.random_seed"),
    Flag(("watchdog-timeout",), "supervision.hang_timeout", unit="s"),
    Flag(("max-loras-per-batch",), "lora.max_adapters"),
    Flag(("max-lora-rank",), "lora.max_rank"),
    Flag(("log-level",), "observability.log_level", words=_LEVELS),
    Flag(("otlp-traces-endpoint",), "observability.tracing.otlp_endpoint"),
)

#: Switches for what llmd always does: naming them changes nothing, and nothing is ignored.
ALWAYS_ON: Final = {
    "enable-metrics": "llmd always serves /metrics",
    "enable-cache-report": "llmd always reports cached tokens in `usage`",
    "sleep-on-idle": "llmd always sleeps when idle",
}
#: Flags whose value is a secret: a file that only its owner may read holds the key's digest, and the configuration that file's path.
KEYS: Final = {"api-key": "http.api_keys_file", "admin-api-key": "http.admin_key_file"}
#: The configuration file, as in `llmd run -c`.
CONFIG: Final = "config"

BY_NAME: Final[dict[str, Flag]] = {name: flag for flag in TABLE for name in flag.names}


def known(name: str) -> bool:
    """Whether llmd understands the flag `name` (dashes, no leading ones)."""
    return name in BY_NAME or name in ALWAYS_ON or name in KEYS or name == CONFIG


def complaint(name: str, *, dashes: bool = False) -> str:
    """Why a flag that is not `known` is refused. `dashes`: of a command line, and not an argument of Python's."""
    if name in UNSUPPORTED:
        return "not supported: SGLang has this flag, llmd has nothing for it"
    close = get_close_matches(name, [*BY_NAME, *ALWAYS_ON, *KEYS, CONFIG], 1, 0.7)
    if not close:
        return "unknown flag"
    return f"unknown flag: did you mean {f'--{close[0]}' if dashes else close[0].replace('-', '_')}?"


def flag_value(spelling: str, name: str, value: Any) -> FlagValue | None:
    """What giving `value` (text, or a Python value) to the flag `name` says; None where it says nothing. Raises UsageError."""
    if name in ALWAYS_ON:
        if value is not True:
            raise UsageError(f"{spelling}: cannot be turned off: {ALWAYS_ON[name]}")
        return None
    if name in KEYS:
        if value is None:
            return None
        if not isinstance(value, str):
            raise UsageError(f"{spelling}: expected text, got {type(value).__name__}")
        return FlagValue(spelling, KEYS[name], keep_key(spelling, value, name="" if name == "admin-api-key" else "default"))
    flag = BY_NAME[name]
    if flag.switch is not None:
        return FlagValue(spelling, flag.key, _switched(spelling, flag.switch, flag.off, value))
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int | float | os.PathLike):
        raise UsageError(f"{spelling}: expected text or a number, got {type(value).__name__}")
    text = os.fspath(value) if isinstance(value, os.PathLike) else str(value)
    return FlagValue(spelling, flag.key, flag.words.get(text, text) + (flag.unit if _is_number(text) else ""))


def load(
    flags: Iterable[FlagValue],
    config_file: str | None,
    overrides: Iterable[str] = (),
    environ: Mapping[str, str] = os.environ,
    *,
    check: Check | None = None,
) -> Loaded:
    """The configuration with these flags over everything else. Raises ConfigError with every fault."""
    return load_config(config_file, list(overrides), environ, flags=tuple(flags), check=check)


def load_kwargs(kwargs: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Loaded:
    """The configuration of `ServerArgs.from_kwargs`: SGLang's names as Python writes them. Raises UsageError and ConfigError."""
    config_file: str | None = None
    values: list[FlagValue] = []
    faults: list[str] = []
    for spelling, value in kwargs.items():
        name = spelling.replace("_", "-")
        if not known(name):
            faults.append(f"{spelling}: {complaint(name)}")
        elif name == CONFIG:
            config_file = os.fspath(value) if value is not None else None
        elif (found := flag_value(spelling, name, value)) is not None:
            other = next((each for each in values if each.key == found.key and each.text != found.text), None)
            if other is not None:
                faults.append(f"{spelling}: contradicts {other.name}, which sets {found.key} too")
            values.append(found)
    if faults:
        raise UsageError("\n".join(faults))
    return load(values, config_file, environ=environ)


def _switched(spelling: str, on: str, off: str | None, value: Any) -> str:
    if not isinstance(value, bool):
        raise UsageError(f"{spelling}: expected True or False, got {type(value).__name__}")
    return on if value else off or {"true": "false", "false": "true", "ray": "local"}[on]


def _is_number(text: str) -> bool:
    return text.isascii() and text.replace(".", "", 1).isdecimal()
