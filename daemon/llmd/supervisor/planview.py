"""`llmd check`: what `llmd run` would start, without starting it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from llmd.config import ServerArgs
from llmd.config.resolve import resolve_args, resolve_dirs
from llmd.plan.ports import PortArgs
from llmd.plan.spec import ModelFiles, ProcessSpec, make_plan
from llmd.supervisor import cpus, environ, memory_plan, preflight, sockets
from llmd.supervisor.os_seam import Os


def describe(args: ServerArgs, env: Mapping[str, str]) -> str:
    """The model, the endpoints and the processes, as text. Raises ConfigError, ResourceError."""
    dirs = resolve_dirs(args, env)
    ports = PortArgs(dirs.run_dir)
    ports.check(args.http.workers)
    cache_dir = Path(dirs.cache_dir)
    memory: list[str] = []
    threads = cpus.available() if args.model.threads == "auto" else args.model.threads
    if preflight.needs_pull(args, cache_dir):
        _refuse_unknown(args.model.path)
        model = [f"{args.model.path}: not in {cache_dir} yet; `llmd pull {args.model.path}` or the first start fetches it"]
    else:
        files = preflight.check(args, cache_dir, environ.cleaned(env, failpoints=False), Os())
        args = resolve_args(args, files, threads=threads)
        model = _model(args, files)
        plan = memory_plan.plan_memory(args, files)
        memory = memory_plan.describe(args, plan) if plan is not None else []
    sections = {
        "model": model,
        **({"memory": memory} if memory else {}),
        "endpoints": [
            f"data plane   {sockets.url_of(args.http.host, args.http.port)}",
            f"admin plane  {args.admin.socket or ports.admin_socket}",
            f"private      {ports.private}",
        ],
        "directories": [f"state  {dirs.state_dir}", f"cache  {dirs.cache_dir}", f"log    {dirs.log_dir}"],
        "processes": [_process(spec) for spec in make_plan(args, ports, threads=threads)],
    }
    return "".join(f"{title}:\n" + "".join(f"  {line}\n" for line in lines) for title, lines in sections.items())


def _refuse_unknown(name: str) -> None:
    from llmd.store.catalog import find

    find(name)


def _model(args: ServerArgs, files: ModelFiles) -> list[str]:
    return [
        f"{args.model.served_name or files.name}: {files.architecture}, {files.quantization}, version {files.weights_version}",
        f"{files.weights_bytes / 2**20:.1f} MiB of weights",
        f"context {args.model.context_length} tokens, KV cache {args.model.kv_cache_dtype}, "
        f"at most {args.memory.max_running_requests} requests at once, {args.model.threads} compute threads",
    ]


def _process(spec: ProcessSpec) -> str:
    return f"{spec.name:<14} group {spec.group:<12} stops {spec.stop_order}  {' '.join(spec.argv[1:])}"
