"""Every message between llmd's processes: msgspec structs, tagged, msgpack. No pickle, ever.

Data plane: frontend -> scheduler -> detokenizer -> frontend. Control plane: every worker <-> control.
Data messages carry the engine's epoch; whoever gets one of another epoch drops and counts it.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from llmd.wire.tables import Tables

FinishReason = Literal["stop", "length", "abort"]
Pooling = Literal["last", "mean", "cls"]
"""How the hidden states of a text become one vector: the last token's, the mean of all, the first token's."""


class Message(Struct, frozen=True, tag=True, kw_only=True):
    """Base of everything that travels on its own; the struct's name is its tag."""


# ---------------------------------------------------------------- data plane: frontend -> scheduler


class SamplingParams(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one request's tokens are chosen. `temperature` 0 is greedy.

    `seed` is always set by the frontend (at random where the client gave none), so that the token at a position is a
    function of (seed, position) alone and a resubmitted request continues as it would have.
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1: off."""
    min_p: float = 0.0
    seed: int = 0
    """0 <= seed < 2**63."""
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    """-2 to 2, on the request's output tokens."""
    repetition_penalty: float = 1.0
    """Above 0, to 2, on its prompt's and its output's ids."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(id, what is added to its logit)."""

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


class DetokenizeParams(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the detokenizer must know of a request; travels with its first chunk."""

    stop: tuple[str, ...] = ()
    """Stop strings: the text ends before the first that stands in it, the tokens with the one that completed that."""
    min_tokens: int = 0
    """Stop strings that are complete after so many tokens are text."""
    skip_special_tokens: bool = True
    include_stop: bool = False
    """The text ends with the stop string or stop token that ended it, instead of before it."""


class TokenizedGenerateReqInput(Message, frozen=True, kw_only=True):
    """One request to generate. `output_ids` are tokens that the frontend already has (a resubmission), else empty."""

    rid: str
    frontend: int
    epoch: int
    input_ids: list[int]
    sampling: SamplingParams
    detokenize: DetokenizeParams = DetokenizeParams()
    output_ids: list[int] = []
    priority: int = 0
    """Smaller is more urgent; counts with `scheduler.policy: priority`."""
    logprobs: int = -1
    """-1: none; k >= 0: each token's logprob and the k most likely alternatives."""
    prompt_logprobs: bool = False
    """Also the logprob of each prompt token (`echo`)."""
    resumed: bool = False
    """An engine had taken it before, and is gone: it is not refused for a full queue, and goes before new ones."""
    incarnation: int = 1
    """Of the frontend: a successor's requests are not what is dropped when it dies."""
    debug_text: str = ""
    """The prompt's text, only while failpoints are armed."""


class TokenizedEmbeddingReqInput(Message, frozen=True, kw_only=True):
    """One text to embed. It queues, batches and ends like a request to generate; the answer is one BatchEmbeddingOutput entry."""

    rid: str
    frontend: int
    epoch: int
    input_ids: list[int]
    pooling: Pooling
    dimensions: int = 0
    """Keep the first so many numbers, if the vector has more; 0: all."""
    priority: int = 0
    resumed: bool = False
    """As for a request to generate."""
    incarnation: int = 1
    debug_text: str = ""
    """The text, only while failpoints are armed."""


class AbortReq(Message, frozen=True, kw_only=True):
    """frontend -> scheduler: forget `rid`. scheduler -> frontend: `rid` is refused or ended, with the error to give."""

    rid: str
    epoch: int
    code: str | None = None
    message: str = ""
    param: str | None = None


class Resend(Message, frozen=True, kw_only=True):
    """frontend -> scheduler: a detokenizer has been lost; send the output of `request` again, from its first token on.

    A scheduler that does not know the request (any more) takes it as a new one, which goes on from its `output_ids`.
    """

    epoch: int
    request: TokenizedGenerateReqInput


class Ack(Message, frozen=True, kw_only=True):
    """frontend -> scheduler: all of `rid`'s output has come, its finish included; it need not be kept any more."""

    rid: str
    epoch: int


# ---------------------------------------------------------------- data plane: scheduler -> detokenizer -> frontend


class TokenLogprob(Struct, frozen=True, array_like=True, gc=False):
    """Natural-log probability of one token and of the most likely alternatives, best first.

    The scheduler leaves `text` and the alternatives' bytes empty; the detokenizer fills them in.
    """

    token_id: int
    logprob: float | None
    """None only for a prompt's first token."""
    top: tuple[tuple[int, float], ...] = ()
    data: bytes = b""
    """The token's raw bytes."""
    top_data: tuple[bytes, ...] = ()


class Finish(Struct, frozen=True, array_like=True, gc=False):
    """Why a choice ended. `matched`: the stop token id or stop string, if one did."""

    reason: FinishReason
    matched: int | str | None = None


class TokenChunk(Struct, frozen=True, array_like=True, gc=False):
    """New token ids of one request. `first` is the index of `token_ids[0]` in its output."""

    rid: str
    frontend: int
    first: int
    token_ids: list[int]
    finish: Finish | None = None
    logprobs: list[TokenLogprob] | None = None
    """Of the last tokens of `token_ids`, where asked for; those that a frontend has already are left out."""
    start: DetokenizeParams | None = None
    """Set on the first chunk of a request in this epoch, and when its output is sent again: then `first` is 0."""
    prompt_logprobs: list[TokenLogprob] | None = None
    """With the first chunk, where asked for: one entry a prompt token."""
    cached_tokens: int = 0


class BatchTokenIDOutput(Message, frozen=True, kw_only=True):
    """scheduler -> detokenizer: what one step brought, for all requests of the batch."""

    epoch: int
    chunks: list[TokenChunk]


class TextChunk(Struct, frozen=True, array_like=True, gc=False):
    """New text of one request; the ids and logprobs belong to the tokens since the last chunk.

    Text that might be the start of a stop string, and bytes of an unfinished character, are held back to a later chunk, and so are tokens
    behind a stop string which is complete while one that starts before it may still come true.
    Where output is sent again, `first` and `at` say how much of it a frontend has already.
    """

    rid: str
    first: int
    text: str
    token_ids: list[int]
    finish: Finish | None = None
    logprobs: list[TokenLogprob] | None = None
    """Of the last tokens of `token_ids`."""
    prompt_logprobs: list[TokenLogprob] | None = None
    cached_tokens: int = 0
    at: int = 0
    """Index of the first character of `text` in the request's text."""


class BatchStrOutput(Message, frozen=True, kw_only=True):
    """detokenizer -> one frontend."""

    epoch: int
    chunks: list[TextChunk]


class Embedding(Struct, frozen=True, array_like=True):
    """One text's vector: pooled, cut to `dimensions`, of length 1."""

    rid: str
    vector: bytes
    """float32, little-endian."""


class BatchEmbeddingOutput(Message, frozen=True, kw_only=True):
    """scheduler -> one frontend, past the detokenizer: the texts whose last token this step computed."""

    epoch: int
    embeddings: list[Embedding]


class Detokenizer404(Message, frozen=True, kw_only=True):
    """detokenizer -> frontend: a chunk came for a request it does not know (it was restarted in between)."""

    rid: str
    epoch: int


SchedulerInput = TokenizedGenerateReqInput | TokenizedEmbeddingReqInput | AbortReq | Resend | Ack
DetokenizerInput = BatchTokenIDOutput | AbortReq
FrontendInput = BatchStrOutput | BatchEmbeddingOutput | AbortReq | Detokenizer404

# ---------------------------------------------------------------- control plane: worker -> control


class Hello(Message, frozen=True, kw_only=True):
    """First word of a worker, and again whenever control asks (`Command("hello")`) or has been replaced."""

    role: str
    rank: int
    pid: int
    incarnation: int
    epoch: int


class Progress(Message, frozen=True, kw_only=True):
    """A worker that starts is getting on: `stage` like `loading weights`, `done` of `total` (bytes, layers...; 0 = unknown)."""

    stage: str
    done: int = 0
    total: int = 0


class Ready(Message, frozen=True, kw_only=True):
    """A worker can work. `info` is what status and metrics show of it (a scheduler: model and KV facts)."""

    info: dict[str, Any] = {}


class HistogramTotals(Struct, frozen=True, array_like=True):
    """Cumulative histogram: `counts[i]` observations <= `bounds[i]`, the last count for +Inf."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float


class Totals(Struct, frozen=True, array_like=True):
    """A worker's metrics since its start. Keys: (metric name, ((label, value), ...)) flattened to `name{label="value"}`."""

    counters: dict[str, float] = {}
    gauges: dict[str, float] = {}
    histograms: dict[str, HistogramTotals] = {}


class Heartbeat(Message, frozen=True, kw_only=True):
    """Sent each `supervision.heartbeat` by a thread of its own, with the work loop's pulse.

    `phase`: `idle`, `busy`, or `blocked on X`; `step_age_s`: how long the current step has been going (0 when idle).
    """

    phase: str
    step_age_s: float
    steps: int
    rss_bytes: int
    cpu_s: float
    totals: Totals | None = None
    tables: Tables | None = None
    """None: as they were in the last one. A control that has just been met is told them."""


class Reply(Message, frozen=True, kw_only=True):
    """Answer to a Command. `ok` false: `code` and `message` say why."""

    id: int
    ok: bool
    data: dict[str, Any] = {}
    code: str | None = None
    message: str = ""


class KeyCount(Struct, frozen=True, array_like=True):
    """One API key with limits, as a frontend knows it. None where the key has no such limit."""

    requests: int
    tokens: int
    """Used at this frontend since its start."""
    rpm: int | None
    tpm: int | None
    requests_left: float
    tokens_left: float
    """What its buckets hold, all frontends' use taken off; below 0 is owed."""


class KeyUse(Message, frozen=True, kw_only=True):
    """frontend -> control, soon after each use and again while a bucket is not full; passed on to all frontends in `KeyUses`."""

    frontend: int
    incarnation: int
    keys: dict[str, KeyCount]
    """By the key's name."""


class ClaimNames(Message, frozen=True, kw_only=True):
    """frontend -> control: may this frontend run requests of these names? Answered with `NamesClaimed`; id 0: it runs them already, no answer."""

    id: int
    names: tuple[str, ...]


class ReleaseNames(Message, frozen=True, kw_only=True):
    """frontend -> control: they are over."""

    names: tuple[str, ...]


ControlInput = Hello | Progress | Ready | Heartbeat | Reply | KeyUse | ClaimNames | ReleaseNames

# ---------------------------------------------------------------- control plane: control -> worker


class Command(Message, frozen=True, kw_only=True):
    """control -> worker. Verbs: `hello` (say Hello and, when ready, Ready again), `log_level` (all), `warmup` (frontend), `flush` (scheduler),
    `freeze` (all: gc.collect + gc.freeze), `drain` / `resume` (frontend)."""

    id: int
    verb: str
    params: dict[str, Any] = {}


class Publish(Message, frozen=True, kw_only=True):
    """control -> frontends, each heartbeat and on each change: all that /readyz, /startupz and /metrics answer from."""

    state: str
    stage: str
    reason: str
    degraded: tuple[str, ...]
    progress: float
    """0..1, of the current stage."""
    epoch: int
    engine_up: bool
    detokenizer_incarnation: int
    """0 while it is away."""
    weights_version: str
    model: dict[str, Any]
    """The scheduler's Ready info."""
    metrics: str
    """Prometheus text."""
    stalled: bool = False
    """Requests wait, none runs, memory is free, for too long: readiness fails."""


class KeyUses(Message, frozen=True, kw_only=True):
    """control -> all frontends: what some of them have told."""

    uses: list[KeyUse]


class NamesClaimed(Message, frozen=True, kw_only=True):
    """control -> frontend: whether the names of claim `id` are its own now, all of them, or another frontend runs one."""

    id: int
    granted: bool


Shared = KeyUses | NamesClaimed
"""Of what several frontends share."""

WorkerInput = Command | Publish | Shared
