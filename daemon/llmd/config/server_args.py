"""`ServerArgs`: the one typed truth about how llmd runs. Frozen; made once by the loader; handed to every process.

Each field says what it means, its unit and how it can change (`reload`: `live` without anyone noticing, `engine` with an
engine restart and requests held, `restart` with the daemon). Durations are seconds and sizes bytes in here; the YAML file
writes `30s` and `8MiB` (`unit` in a field's metadata tells the loader). `auto` and null are resolved in `llmd.config.resolve`.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct

Reload = Literal["live", "engine", "restart"]


def doc(text: str, *, reload: Reload = "restart", unit: str | None = None, path: bool | Literal["or_name"] = False, **limits: Any) -> Meta:
    """Metadata of one field: its text, how it changes, its unit (`s` or `B`), whether it is a path (`or_name`: a bare word is not), and its numeric limits."""
    extra: dict[str, Any] = {"reload": reload}
    if unit:
        extra["unit"] = unit
    if path:
        extra["path"] = path
    return Meta(description=text, extra=extra, **limits)


#: Seconds that a wait which must be one has at least; less would only be a loop that turns.
SHORTEST: Final = 0.01
#: The warm-up's prompt, of a byte a token at worst, and what it generates; nobody serves less.
LEAST_CONTEXT: Final = 8
Context = Annotated[int, Meta(ge=LEAST_CONTEXT, le=2**24)]
Tokens = Annotated[int, Meta(ge=1, le=2**40)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Meta(ge=0)]
Wait = Annotated[float, Meta(ge=SHORTEST)]


class _Section(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class ModelArgs(_Section, frozen=True):
    """What is served."""

    path: Annotated[str, doc("Name of an embedded model, a GGUF file, or a directory with config.json and safetensors.", reload="engine", path="or_name")] = (
        "smollm2-135m-instruct"
    )
    served_name: Annotated[str | None, doc("Name that clients use; null: the model's own name.", reload="live")] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        doc(
            "Type of weights that are not quantized, and of activations on a GPU; a CPU computes in float32, with AMX and bfloat16 in bfloat16, which is up to "
            "twice as fast. auto: on a CPU the type they are stored in. float32 takes two to six times the memory, and implies `quantization: none`.",
            reload="engine",
        ),
    ] = "auto"
    quantization: Annotated[
        Literal["auto", "none", "int8", "int4"],
        doc(
            "auto keeps a GGUF's own types (those without a kernel become 8 bits), none dequantizes at load, int8 and int4 quantize at load in groups of 32 "
            "(int4 leaves the embedding and the head at 8 bits). int8 and int4: on a CPU with the native kernels.",
            reload="engine",
        ),
    ] = "auto"
    kv_cache_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "int8"],
        doc("auto: float32 with `dtype: float32`, else bfloat16. int8, one scale a head and token: on a CPU with the native kernels.", reload="engine"),
    ] = "auto"
    context_length: Annotated[Context | None, doc("Longest prompt plus output in tokens; null: the model's own.", reload="engine")] = None
    revision: Annotated[str | None, doc("Revision of a model on a hub; `llmd pull hf:OWNER/NAME@REVISION` fetches one.", reload="restart")] = None
    chat_template: Annotated[str | None, doc("File with a Jinja chat template, in place of the model's own.", reload="live", path=True)] = None
    verify_weights: Annotated[bool, doc("Read every tensor at start and refuse NaN and Inf.", reload="engine")] = False
    tokenizer_path: Annotated[str | None, doc("tokenizer.json or its directory, in place of the model's own.", reload="restart", path=True)] = None
    device: Annotated[Literal["auto", "cpu", "cuda"], doc("auto takes a CUDA GPU where there is one.", reload="engine")] = "auto"
    threads: Annotated[Annotated[int, Meta(ge=1, le=1024)] | Literal["auto"], doc("Compute threads of one scheduler rank on a CPU.", reload="restart")] = "auto"
    pooling: Annotated[
        Literal["auto", "last", "mean", "cls"],
        doc("How embeddings are pooled: the last token's state, the mean of all, or the first one's; auto: last.", reload="live"),
    ] = "auto"


class ParallelArgs(_Section, frozen=True):
    """How the model is spread."""

    tp: Annotated[int, doc("Tensor parallel ranks.", ge=1, le=4096)] = 1
    pp: Annotated[int, doc("Pipeline parallel ranks.", ge=1, le=4096)] = 1
    dp: Annotated[int, doc("Data parallel replicas.", ge=1, le=4096)] = 1
    ep: Annotated[int, doc("Expert parallel ranks.", ge=1, le=4096)] = 1
    dp_attention: Annotated[bool, doc("Data parallel attention inside the tensor parallel group.")] = False
    nnodes: Annotated[int, doc("Number of machines.", ge=1, le=4096)] = 1
    node_rank: Annotated[int, doc("This machine's number, from 0.", ge=0, le=4095)] = 0
    dist_init_addr: Annotated[str | None, doc("host:port of machine 0 for several machines.")] = None
    backend: Annotated[Literal["local", "ray"], doc("Who starts the ranks.")] = "local"


class MemoryArgs(_Section, frozen=True):
    """How much memory the KV cache takes."""

    mem_fraction_static: Annotated[
        Annotated[float, Meta(gt=0, lt=1)] | Literal["auto"],
        doc(
            "Share of the free memory, of the GPU or of the host, that weights and KV cache may take together. auto: 0.88 on a GPU; on a CPU the KV cache "
            "is for max_running_requests times 2,048 tokens (or the context, if that is less), and at most a quarter of what is free.",
            reload="engine",
        ),
    ] = "auto"
    page_size: Annotated[int, doc("Tokens in one KV page.", reload="engine", ge=1, le=1024)] = 16
    max_running_requests: Annotated[Annotated[int, Meta(ge=1, le=4096)] | Literal["auto"], doc("Requests in one batch at most; auto: 64.", reload="engine")] = (
        "auto"
    )
    max_total_tokens: Annotated[Tokens | None, doc("Size of the KV pool in tokens; null: as mem_fraction_static says.", reload="engine")] = None
    clamp_context: Annotated[bool, doc("Shorten the context to what the KV pool holds instead of refusing to start.", reload="engine")] = False
    preallocate: Annotated[
        bool | Literal["auto"],
        doc(
            "When the KV pool's memory is taken on a CPU. false: as tokens come to lie in it. auto: so, and ahead of that while nothing runs: "
            "512 MiB, or, where that is more, half as much again as tokens have needed so far. true: all of it before the model is ready, so that no step ever "
            "waits for memory; a start, and a scheduler's replacement, take longer by 0.1 s for each GiB, but by some seconds for each in a virtual machine "
            "whose host gives memory at the first write. What has been taken is kept.",
            reload="engine",
        ),
    ] = "auto"


class SchedulerArgs(_Section, frozen=True):
    """Who runs when."""

    policy: Annotated[
        Literal["fcfs", "lpm", "priority"],
        doc(
            "Who is next in the waiting queue. fcfs: the oldest. lpm: of the oldest 128, who finds most of its prompt in the prefix cache. "
            "priority: the smallest `priority` of the requests, which may also send running requests of a larger one back to the queue.",
            reload="engine",
        ),
    ] = "fcfs"
    chunked_prefill_size: Annotated[
        Tokens | Literal["auto"],
        doc(
            "Prompt tokens computed in one step at most; auto: as many as let a step take twice as long as without them, measured while running; more, up to "
            "a step of 0.1 s, where more than one request waits for its first token to each eight streams; up to 2,048 when nothing else runs.",
            reload="engine",
        ),
    ] = "auto"
    overlap: Annotated[
        bool | Literal["auto"],
        doc("Prepare the next batch while the current one computes; auto: unless torch computes on a CPU. No answer depends on it.", reload="engine"),
    ] = "auto"
    radix_cache: Annotated[bool, doc("Keep the KV of prompts and outputs, and reuse it for prompts that begin alike.", reload="engine")] = True
    eviction: Annotated[
        Literal["lru", "lfu", "fifo"], doc("Which cached prefix goes first: least recently used, least frequently used, or first in.", reload="engine")
    ] = "lru"
    max_queued_requests: Annotated[int, doc("Waiting requests at most; more get 429 queue_full.", reload="live", ge=0, le=2**31 - 1)] = 512
    queue_timeout: Annotated[Wait | None, doc("Longest wait in the queue; then 503 queue_timeout.", reload="live", unit="s")] = 60.0
    request_timeout: Annotated[Wait | None, doc("Longest run of one request; null: no limit.", reload="live", unit="s")] = None
    random_seed: Annotated[
        Seed | None, doc("Requests that give no seed get one from a sequence that starts here, one sequence a frontend; null: at random.")
    ] = None
    priority_max_wait: Annotated[
        float,
        doc(
            "With policy lpm or priority, a request that has waited this long goes next, and is not sent back to the queue for another any more.",
            reload="engine",
            unit="s",
            ge=0,
        ),
    ] = 20.0


class HttpArgs(_Section, frozen=True):
    """The data plane."""

    host: Annotated[str, doc("Address to listen on; other than loopback is refused without `http.api_keys_file`, unless `http.allow_unauthenticated`.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, doc("TCP port; 0 takes a free one.", ge=0, le=65535)] = 8000
    workers: Annotated[int, doc("Frontend processes on the one socket; they share load, limits of keys and names of requests.", ge=1, le=64)] = 1
    backlog: Annotated[int, doc("Connections that may wait to be accepted.", ge=1, le=65535)] = 2048
    keep_alive: Annotated[float, doc("Idle time after which a connection is closed.", reload="live", unit="s", ge=0)] = 75.0
    sse_ping: Annotated[float, doc("A stream silent for this long gets a comment.", reload="live", unit="s", ge=SHORTEST)] = 15.0
    max_body: Annotated[int, doc("Largest request body.", reload="live", unit="B", ge=1024, le=2**40)] = 8 * 2**20
    drain_timeout: Annotated[float, doc("How long running requests may finish when llmd stops.", reload="live", unit="s", ge=0)] = 30.0
    stream_write_timeout: Annotated[float, doc("A client that reads nothing for this long is cut off.", reload="live", unit="s", ge=SHORTEST)] = 60.0
    api_keys_file: Annotated[
        str | None,
        doc(
            "File of API keys, one NAME:sha256:HEX or NAME:KEY a line, then rpm=N (requests a minute), tpm=N (tokens a minute) and admin as wanted; mode 0600 "
            "or 0640. Read again when it changes. null: no key is asked for.",
            reload="live",
            path=True,
        ),
    ] = None
    admin_key_file: Annotated[
        str | None,
        doc(
            "File with the admin key, KEY or sha256:HEX, for the administrative paths; mode 0600 or 0640. Read again when it changes. "
            "null: only keys of api_keys_file that say admin open them.",
            reload="live",
            path=True,
        ),
    ] = None
    allow_unauthenticated: Annotated[bool, doc("Allow an address other than loopback without a key.")] = False
    strict: Annotated[bool, doc("Refuse unknown request fields.", reload="live")] = False
    access_log_exclude: Annotated[tuple[str, ...], doc("Paths whose 2xx answers are not logged.", reload="live")] = ("/livez", "/readyz", "/health", "/metrics")


class AdminArgs(_Section, frozen=True):
    """The admin plane."""

    socket: Annotated[str | None, doc("Unix socket; null: RUN/admin.sock.", path=True)] = None
    listen: Annotated[str | None, doc("HOST:PORT for TCP as well; needs `http.admin_key_file`, and TLS where HOST is not loopback.")] = None
    group: Annotated[str | None, doc("Group that may use the socket.")] = "llmd-admin"
    tls_cert: Annotated[str | None, doc("Certificate (PEM, with what leads to its authority) for `admin.listen`.", path=True)] = None
    tls_key: Annotated[str | None, doc("Key of `admin.tls_cert`.", path=True)] = None


class RestartArgs(_Section, frozen=True):
    """Restart budget of each role group."""

    max: Annotated[int, doc("Restarts within `window` before llmd gives up (exit 70).", reload="live", ge=0, le=10**6)] = 5
    window: Annotated[float, doc("A group healthy for this long starts anew.", reload="live", unit="s", ge=SHORTEST)] = 600.0
    backoff: Annotated[tuple[Seconds, Seconds, Seconds], doc("Waits: first restart, second, and the most that doubling reaches.", reload="live", unit="s")] = (
        0.0,
        1.0,
        30.0,
    )


class SupervisionArgs(_Section, frozen=True):
    """How processes are watched and healed."""

    startup_timeout: Annotated[float, doc("A worker without progress for this long ends the start.", unit="s", ge=SHORTEST)] = 600.0
    heartbeat: Annotated[float, doc("Period of heartbeats.", unit="s", ge=SHORTEST)] = 0.5
    hang_timeout: Annotated[float, doc("A scheduler silent, or in one step, for this long is killed.", reload="live", unit="s", ge=SHORTEST)] = 30.0
    helper_timeout: Annotated[float, doc("The same for the detokenizer and the frontends.", reload="live", unit="s", ge=SHORTEST)] = 5.0
    control_timeout: Annotated[float, doc("The same for control.", reload="live", unit="s", ge=SHORTEST)] = 5.0
    stall_alarm: Annotated[float, doc("Requests wait, none runs, memory is free: after this long readiness fails.", reload="live", unit="s", ge=SHORTEST)] = (
        30.0
    )
    hold_timeout: Annotated[float, doc("How long requests that arrive during recovery are held.", reload="live", unit="s", ge=0)] = 60.0
    recover_timeout: Annotated[float, doc("How long running requests wait for a recovering engine.", reload="live", unit="s", ge=0)] = 600.0
    stop_timeout: Annotated[float, doc("How long a process may take to stop before it is killed.", unit="s", ge=SHORTEST)] = 10.0
    restart: Annotated[RestartArgs, doc("Restart budget.", reload="live")] = RestartArgs()
    spare_worker: Annotated[bool | Literal["auto"], doc("Keep a pre-imported worker for faster recovery.", reload="live")] = "auto"


class ReloadArgs(_Section, frozen=True):
    """Weight reload."""

    allowed_dirs: Annotated[
        tuple[str, ...] | None, doc("Directories weights may come from; null: the model's own and cache_dir.", reload="live", path=True)
    ] = None
    mode: Annotated[Literal["drain", "abort", "now"], doc("What happens to running requests.", reload="live")] = "drain"
    timeout: Annotated[float, doc("Longest wait of a reload.", reload="live", unit="s", ge=SHORTEST)] = 60.0


class LoraArgs(_Section, frozen=True):
    """Adapters."""

    max_adapters: Annotated[int, doc("Adapters loaded at once.", reload="engine", ge=1, le=4096)] = 8
    max_rank: Annotated[int, doc("Largest rank of an adapter.", reload="engine", ge=1, le=4096)] = 64
    adapters: Annotated[dict[str, str], doc("Adapters loaded at start: name -> path.", reload="engine", path=True)] = {}


class RequestLogArgs(_Section, frozen=True):
    """Opt-in log of prompts and outputs."""

    enabled: Annotated[bool, doc("Write prompts and outputs to requests.jsonl, mode 0600, 64 MiB and four older ones.", reload="live")] = False
    dir: Annotated[str | None, doc("Directory of requests.jsonl; null: log_dir.", reload="live", path=True)] = None


class MetricsArgs(_Section, frozen=True):
    """Prometheus metrics."""

    compat: Annotated[tuple[Literal["sglang", "vllm"], ...], doc("Add these projects' metric names.", reload="live")] = ()
    require_key: Annotated[bool, doc("/metrics needs an API key, as all but the health paths do.", reload="live")] = False


class TracingArgs(_Section, frozen=True):
    """OpenTelemetry."""

    otlp_endpoint: Annotated[str | None, doc("Where traces go; null: nowhere.")] = None


class ObservabilityArgs(_Section, frozen=True):
    """Logs, metrics, traces."""

    log_level: Annotated[Literal["debug", "info", "warning", "error"], doc("Least severe level that is logged.", reload="live")] = "info"
    log_format: Annotated[Literal["auto", "text", "json"], doc("auto: text on a terminal, fields of the journal under systemd, else json.")] = "auto"
    request_log: Annotated[RequestLogArgs, doc("Opt-in request log.", reload="live")] = RequestLogArgs()
    metrics: Annotated[MetricsArgs, doc("Prometheus metrics.", reload="live")] = MetricsArgs()
    tracing: Annotated[TracingArgs, doc("OpenTelemetry.")] = TracingArgs()


class ServerArgs(_Section, frozen=True):
    """The whole configuration."""

    model: Annotated[ModelArgs, doc("What is served.")] = ModelArgs()
    parallel: Annotated[ParallelArgs, doc("How the model is spread.")] = ParallelArgs()
    memory: Annotated[MemoryArgs, doc("How much memory the KV cache takes.")] = MemoryArgs()
    scheduler: Annotated[SchedulerArgs, doc("Who runs when.")] = SchedulerArgs()
    http: Annotated[HttpArgs, doc("The data plane.")] = HttpArgs()
    admin: Annotated[AdminArgs, doc("The admin plane.")] = AdminArgs()
    supervision: Annotated[SupervisionArgs, doc("How processes are watched and healed.")] = SupervisionArgs()
    reload: Annotated[ReloadArgs, doc("Weight reload.")] = ReloadArgs()
    lora: Annotated[LoraArgs, doc("Adapters.")] = LoraArgs()
    observability: Annotated[ObservabilityArgs, doc("Logs, metrics, traces.")] = ObservabilityArgs()
    run_dir: Annotated[
        str | None,
        doc("Sockets, lock and state; null: /run/llmd under systemd, else $XDG_RUNTIME_DIR/llmd, else llmd-UID in the temporary directory.", path=True),
    ] = None
    state_dir: Annotated[str | None, doc("Audit and crash records; null: /var/lib/llmd or ~/.local/state/llmd.", path=True)] = None
    cache_dir: Annotated[str | None, doc("Models and packed weights; null: /var/cache/llmd or ~/.cache/llmd.", path=True)] = None
    log_dir: Annotated[str | None, doc("Log files; null: /var/log/llmd or STATE/log.", path=True)] = None

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> ServerArgs:
        """The configuration with SGLang's names as keyword arguments: `from_kwargs(model_path="x", tp_size=1)`; `config` names a file.

        They go over environment and file. Raises UsageError for a name that llmd does not know, ConfigError for values that cannot be.
        """
        from llmd.config.sglang import load_kwargs

        return load_kwargs(kwargs).args
