"""The plan as data: which processes run, how they are started, in which order they stop; and the boot file that tells each of them the rest."""

from __future__ import annotations

import sys
from typing import Any, Literal

from msgspec import Struct, msgpack
from msgspec.structs import force_setattr

from llmd.config import ServerArgs
from llmd.config.source import ConfigSource
from llmd.plan.ports import PortArgs

Role = Literal["control", "frontend", "detokenizer", "scheduler"]
Group = Literal["control", "frontend", "detokenizer", "engine"]


class ProcessSpec(Struct, frozen=True, kw_only=True):
    """One child of the supervisor."""

    role: Role
    rank: int
    title: str
    """What `ps` shows."""
    group: Group
    """Restart unit: the engine restarts as one, every other process alone, budgets are per group."""
    stop_order: int
    """Lower stops first."""
    argv: tuple[str, ...]
    env: dict[str, str]
    takes_socket: bool = False
    """The listening socket is its fd 0."""
    cpus: tuple[int, ...] = ()
    """CPU affinity; empty: any."""
    gpu: int | None = None

    @property
    def name(self) -> str:
        """supervisord's program name, e.g. `scheduler-0`."""
        return f"{self.role}-{self.rank}"


class ModelFiles(Struct, frozen=True, kw_only=True):
    """What the checking child found; the small files are all that frontend and detokenizer ever open."""

    kind: Literal["gguf", "safetensors", "dummy"]
    path: str
    """The GGUF file, or the directory with safetensors; empty for dummy."""
    name: str
    """The model's own name."""
    small_dir: str
    """Directory (in cache_dir, or the model's own) with tokenizer.json, config.json, chat_template.jinja."""
    weights_version: str
    weights_bytes: int
    context_length: int
    vocab_size: int
    """Rows of the embedding."""
    tokenizer_size: int
    """Ids that the tokenizer knows; ids from here on are never sampled."""
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    add_bos: bool
    has_chat_template: bool
    architecture: str
    quantization: str
    """What is in the file, for status: `Q4_1`, `bfloat16`..."""
    parameters: int = 0
    """Numbers that the weights are; 0: not known."""
    kv_values_per_token: int = 0
    """Numbers that one token's K and V are, in all layers; 0: not known, and then nothing is planned before the weights are loaded."""
    kv_vectors_per_token: int = 0
    """Heads that these numbers belong to, K and V and all layers."""
    kernels: str = ""
    """Instruction set of the native kernels where they serve this model on a CPU; empty: torch does."""
    native_bytes: int = 0
    """Bytes of the weights as the native kernels have them, with the settings that were checked; 0 where torch serves."""
    native_format: str = ""
    """What most of these weights are kept as then: `Q4_1`, `float16`..."""


class Boot(Struct, frozen=True, kw_only=True):
    """RUN/private/boot.msgpack: everything a worker needs beyond its role, rank and environment."""

    start_id: str
    """Names this life of the supervisor; state files of another one are ignored."""
    started_at: float
    """Unix time."""
    args: ServerArgs
    """Resolved: no `auto` or null is left that a worker would have to guess."""
    ports: PortArgs
    files: ModelFiles
    processes: tuple[ProcessSpec, ...]
    http_url: str
    state_dir: str
    cache_dir: str
    log_dir: str
    failpoints: bool = False
    external_frontend: bool = False
    """Frontend 0 is no child of the supervisor: it lives in the process that started llmd (`llmd.Engine`), and nothing serves HTTP."""

    socket_activated: bool = False
    """systemd holds the listening socket too: connections that nobody takes while llmd ends wait for the next one."""
    source: ConfigSource | None = None
    """Where `args` came from; None: from a caller, and then they cannot be read again."""

    @property
    def served_name(self) -> str:
        """The id that clients use."""
        return self.args.model.served_name or self.files.name

    def take(self, args: ServerArgs) -> None:
        """Go by other values from now on: whoever asks this boot file for `args` gets them. Frozen all the same: they are exchanged as a whole."""
        force_setattr(self, "args", args)

    def dump(self) -> bytes:
        return msgpack.encode(self)

    @classmethod
    def load(cls, data: bytes) -> Boot:
        return msgpack.decode(data, type=cls)


def make_plan(
    args: ServerArgs, ports: PortArgs, *, threads: int, base_env: dict[str, str] | None = None, external_frontend: bool = False
) -> tuple[ProcessSpec, ...]:
    """Processes for a resolved config. Pure: the same input gives the same plan. `threads`: compute threads of one scheduler rank.

    `external_frontend`: no frontend is planned, because whoever starts llmd is one."""
    env = {
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "2",
        "NO_PROXY": "127.0.0.1,localhost,::1",
        "HF_HUB_OFFLINE": "1",
        **(base_env or {}),
    }
    engine_env = {
        **env,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": "1",  # numpy's, which computes nothing that matters
        # Threads without work look for some for about 50 us, then sleep: the frontends and the detokenizer need the cores too.
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "3000",
        # One order of additions whatever the number of rows and threads; see llmd.model.exact.
        "MKL_CBWR": "AUTO,STRICT",
    }

    def spec(role: Role, rank: int, group: Group, stop_order: int, title: str, **more: Any) -> ProcessSpec:
        # -P: the directory that llmd was started in is no place to import from.
        argv = (sys.executable, "-P", "-m", "llmd.worker", role, "--boot", str(ports.boot), "--rank", str(rank))
        return ProcessSpec(role=role, rank=rank, group=group, stop_order=stop_order, title=title, argv=argv, env=more.pop("env", env), **more)

    frontends = [spec("frontend", n, "frontend", 0, f"llmd: frontend {n}", takes_socket=True) for n in range(0 if external_frontend else args.http.workers)]
    ranks = args.parallel.dp * args.parallel.pp * args.parallel.tp
    schedulers = [spec("scheduler", n, "engine", 1, f"llmd: scheduler {rank_label(args, n)}", env=engine_env) for n in range(ranks)]
    detokenizer = spec("detokenizer", 0, "detokenizer", 2, "llmd: detokenizer")
    control = spec("control", 0, "control", 3, "llmd: control")
    return (control, *frontends, detokenizer, *schedulers)


def rank_label(args: ServerArgs, rank: int) -> str:
    """`DP0 PP0 TP0` of a scheduler rank; tp varies fastest."""
    p = args.parallel
    return f"DP{rank // (p.tp * p.pp)} PP{rank // p.tp % p.pp} TP{rank % p.tp}"
