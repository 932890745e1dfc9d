"""`llmd check`: what `llmd run` would start, without starting it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, TypeVar

from llmd.config import ServerArgs
from llmd.config.load import DESCRIBED, Loaded, in_order, placed
from llmd.config.resolve import resolve_args, resolve_dirs
from llmd.errors import ConfigError, LlmdError
from llmd.memory.host import may_have_gpu
from llmd.plan.ports import PortArgs
from llmd.plan.spec import ModelFiles, ProcessSpec, make_plan
from llmd.supervisor import admin_path, cpus, directories, environ, memory_plan, port_check, preflight, rundir, sockets
from llmd.supervisor.os_seam import Os

T = TypeVar("T")


def describe(loaded: Loaded, env: Mapping[str, str]) -> str:
    """The model, the endpoints and the processes, as text. Raises what `run` would raise first, with the faults that it would find later."""
    args = loaded.args
    dirs = resolve_dirs(args, env)
    ports = PortArgs(dirs.run_dir)
    threads = cpus.available() if args.model.threads == "auto" else args.model.threads
    faults: list[LlmdError] = []
    warnings = _tried(faults, lambda: directories.judge(args, dirs)) or []
    _tried(faults, lambda: ports.check(args.http.workers))
    _tried(faults, lambda: rundir.judge(ports))
    _tried(faults, lambda: admin_path.judge(args.admin.socket))
    taken = _tried(faults, lambda: port_check.judge(args, ports, env)) or {}
    _tried(faults, lambda: memory_plan.refuse_absent_gpu(args))
    found = _tried(faults, lambda: _plan_model(args, Path(dirs.cache_dir), env, threads))
    if faults:
        raise _all(faults, loaded.places)
    assert found is not None
    args, model, memory = found
    sections = {
        "model": model,
        **({"memory": memory} if memory else {}),
        "endpoints": [
            f"data plane   {sockets.url_of(args.http.host, args.http.port)}{taken.get('http.port', '')}",
            f"admin plane  {args.admin.socket or ports.admin_socket}",
            *([f"             {args.admin.listen}{taken.get('admin.listen', '')}"] if args.admin.listen is not None else []),
            f"private      {ports.private}",
        ],
        "directories": [f"state  {dirs.state_dir}", f"cache  {dirs.cache_dir}", f"log    {dirs.log_dir}", *(f"WARNING: {each}" for each in warnings)],
        "processes": [_process(spec) for spec in make_plan(args, ports, threads=threads)],
    }
    return "".join(f"{title}:\n" + "".join(f"  {line}\n" for line in lines) for title, lines in sections.items())


def more_faults(error: ConfigError, env: Mapping[str, str]) -> ConfigError:
    """`error` of a configuration, with what a start would find wrong later in those of its values that were written and are right."""
    told = ConfigError(error.faults, hint=DESCRIBED if DESCRIBED in error.hint else error.hint)
    loaded = error.readable
    if not isinstance(loaded, Loaded):
        return told
    args, written = loaded.args, loaded.places.keys()
    dirs = resolve_dirs(args, env)
    faults: list[LlmdError] = []
    _tried(faults, lambda: directories.judge(args, dirs))
    _tried(faults, lambda: admin_path.judge(args.admin.socket))
    if "http.port" in written:
        _tried(faults, lambda: port_check.judge(args, PortArgs(dirs.run_dir), env))
    if "model.device" in written:
        _tried(faults, lambda: memory_plan.refuse_absent_gpu(args))
    if "model.path" in written:
        _tried(faults, lambda: _model_files(args, Path(dirs.cache_dir), env))
    for fault in faults:
        new = [line for line in placed(fault.message.splitlines(), loaded.places) if line not in told.faults]
        told = ConfigError(in_order([*told.faults, *new]), hint="; ".join(filter(None, (told.hint, fault.hint))))
    return told


def _tried(faults: list[LlmdError], call: Callable[[], T]) -> T | None:
    """The result; None with one more fault."""
    try:
        return call()
    except LlmdError as error:
        faults.append(error)
        return None


def _all(faults: list[LlmdError], places: Mapping[str, str]) -> LlmdError:
    """One error of the first one's kind that tells all, each with its place."""
    first = faults[0]
    lines = in_order(placed([line for fault in faults for line in fault.message.splitlines()], places))
    told = ConfigError(lines) if isinstance(first, ConfigError) else type(first)("\n".join(lines))
    told.hint = "; ".join(dict.fromkeys(fault.hint for fault in faults if fault.hint))
    return told


def _plan_model(args: ServerArgs, cache_dir: Path, env: Mapping[str, str], threads: int) -> tuple[ServerArgs, list[str], list[str]]:
    """The resolved arguments, and lines about the model and its memory."""
    files = _model_files(args, cache_dir, env)
    if files is None:
        return args, [f"{args.model.path}: not in {cache_dir} yet; `llmd pull {args.model.path}` or the first start fetches it"], []
    args = resolve_args(args, files, threads=threads)
    plan = memory_plan.plan_memory(args, files)
    return args, _model(args, files), memory_plan.describe(args, plan) if plan is not None else []


def _model_files(args: ServerArgs, cache_dir: Path, env: Mapping[str, str]) -> ModelFiles | None:
    """What the checking child finds; None for a model that is to be fetched first."""
    if preflight.needs_pull(args, cache_dir):
        _refuse_unknown(args.model.path)
        return None
    with tempfile.TemporaryDirectory(prefix="llmd-check-") as place:  # a check leaves nothing behind
        return preflight.check(args, cache_dir, environ.cleaned(env, failpoints=False), Os(), [Path(place)])


def _refuse_unknown(name: str) -> None:
    from llmd.store.catalog import find

    find(name)


def _model(args: ServerArgs, files: ModelFiles) -> list[str]:
    model = args.model
    on_cpu = model.device == "cpu" or not may_have_gpu()
    kernels = f"{files.kernels} kernels" if files.kernels else "torch"
    device = model.device if model.device != "auto" else f"auto ({'a GPU' if may_have_gpu() else 'the CPU: there is no GPU'})"
    return [
        f"name       {model.served_name or files.name}",
        f"weights    {files.weights_version}: {files.architecture}, {files.quantization}, {files.weights_bytes / 2**20:.0f} MiB of tensors",
        f"device     {device}, {model.threads} compute threads{f', {kernels}' if on_cpu else ''}",
        f"dtype      {numbers(args, files, on_cpu)}, KV cache {model.kv_cache_dtype}",
        f"context    {model.context_length} tokens of prompt and output",
        f"requests   {args.memory.max_running_requests} at once, {args.scheduler.max_queued_requests} more may wait",
    ]


def numbers(args: ServerArgs, files: ModelFiles, on_cpu: bool) -> str:
    """As what weights lie in memory, and what products are computed in."""
    kept = files.native_format
    if not on_cpu or not kept:
        dtype = args.model.dtype
        return f"weights and activations {dtype if dtype != 'auto' else 'float32' if on_cpu else 'bfloat16 on the GPU'}"
    if kept in ("float32", "float16"):
        computed = "float32"
    elif files.kernels == "amx":
        computed = "bfloat16"
    else:
        computed = "float32" if kept == "bfloat16" else "float32 from 8-bit activations"
    return f"weights kept as {kept}, computed in {computed}"


_DOES: Final = {
    "control": "watches the others, answers llmctl, collects metrics",
    "frontend": "answers HTTP, makes text into tokens",
    "detokenizer": "makes tokens into text",
    "scheduler": "the engine: the model, its KV cache, who runs when",
}


def _process(spec: ProcessSpec) -> str:
    return f"{spec.name:<14} {_DOES.get(spec.role, spec.role)}"
