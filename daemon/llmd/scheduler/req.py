"""`Req`: one request in the scheduler, from its arrival to its last token."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass, field

from llmd.memory.radix_cache import TOKEN_BYTES, Node
from llmd.scheduler.embed import Pool, as_request
from llmd.wire.messages import Finish, TokenizedEmbeddingReqInput, TokenizedGenerateReqInput


@dataclass(slots=True, eq=False)
class Req:
    """A request, its tokens so far and the KV it holds.

    Prompt and output are one sequence. `computed` of its tokens have their KV written; what is missing is computed by the
    next steps: one token in decode, many after arrival or retraction. When nothing is missing, the next token is sampled.
    While a step is on its way the sequence may end in a token that is not known yet.
    """

    source: TokenizedGenerateReqInput
    arrived: float
    """Monotonic time."""
    order: int
    """Counts arrivals: the smaller goes first and is retracted last."""
    stop_ids: frozenset[int]
    prompt_key: bytes
    """The prompt as a key of the prefix tree."""
    mark: bytes
    """Stands for its rid in the journal."""
    output_ids: list[int]
    row: int = 0
    """Row of ReqToTokenPool; 0: none."""
    pages: list[int] = field(default_factory=list)
    shared: int = 0
    """So many of `pages`, from the first on, are the prefix tree's; the rest is its own."""
    node: Node | None = None
    """Where these end in the tree; locked."""
    computed: int = 0
    """Tokens whose KV is written, or will be by the steps on their way."""
    settled: int = 0
    """Tokens whose KV is written."""
    unseen: int = 0
    """Tokens that steps on their way will bring."""
    place: int = 0
    """Where the newest of these stands among the results of its step."""
    stay: int = 0
    """Counts how often its KV was taken: what a step on its way computes of an earlier stay is lost."""
    void: int = 0
    """What steps bring that were launched before this `stay` is void."""
    done: bool = False
    """It has ended, one way or another; what steps on their way bring of it is nobody's."""
    cached_tokens: int = 0
    """Prompt tokens that were known when it was first admitted."""
    queued: float = 0.0
    """When it came into the queue, for the first time or back."""
    waited: float = 0.0
    """Seconds of earlier waits in the queue."""
    started: float | None = None
    """When it was first admitted; None: never yet."""
    announced: bool = False
    """Its first chunk has been sent."""
    sent_logprobs: list[bytes] = field(default_factory=list)
    """Packed, of the newest tokens: those that its frontend had when it sent it have none."""
    sent_prompt_logprobs: bytes = b""
    """Packed."""
    pool: Pool | None = None
    """It is a text to embed."""

    @property
    def rid(self) -> str:
        return self.source.rid

    @property
    def length(self) -> int:
        """Tokens of prompt and output, the unseen included."""
        return len(self.source.input_ids) + len(self.output_ids) + self.unseen

    @property
    def pending(self) -> int:
        """Tokens whose KV is still to be computed; 1 in decode."""
        return self.length - self.computed

    @property
    def remaining(self) -> int:
        """Tokens it may still generate, the unseen included."""
        return self.source.sampling.max_new_tokens - len(self.output_ids)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the next prefill has to give them. Such a prompt is computed in one step."""
        return self.source.prompt_logprobs and not self.output_ids and not self.announced and not self.unseen

    @property
    def reuses_nothing(self) -> bool:
        """Whether every token of its prompt has to be computed, also where its KV is known."""
        return self.wants_prompt_logprobs or (self.pool is not None and self.pool.reads_all)

    @property
    def banned_ids(self) -> tuple[int, ...]:
        """Ids that would end it before `min_new_tokens`."""
        return tuple(self.stop_ids) if len(self.output_ids) + self.unseen < self.source.sampling.min_new_tokens else ()

    def tokens(self, start: int, stop: int) -> list[int]:
        """Ids of the sequence from index `start` up to `stop`; an unseen one is -1 - `place`."""
        prompt = self.source.input_ids
        size = len(prompt)
        late = [-1 - self.place] if self.unseen and stop == self.length else []
        if start >= size:
            return self.output_ids[start - size : stop - size] + late
        return prompt[start:stop] + self.output_ids[: max(0, stop - size)] + late

    def key(self, tokens: int) -> bytes:
        """The first `tokens` ids of the sequence as a key of the prefix tree."""
        size = len(self.source.input_ids)
        if tokens <= size:
            return self.prompt_key[: tokens * TOKEN_BYTES]
        return self.prompt_key + array("i", self.output_ids[: tokens - size]).tobytes()

    def finish(self, context_length: int) -> Finish | None:
        """Why it is over, or None. A stop token is part of the output and named by `matched`. A text to embed ends with its vector."""
        sampling = self.source.sampling
        if self.pool is not None:
            return None
        if self.output_ids and self.output_ids[-1] in self.stop_ids and len(self.output_ids) > sampling.min_new_tokens:
            return Finish("stop", self.output_ids[-1])
        if self.remaining <= 0 or len(self.source.input_ids) + len(self.output_ids) >= context_length:
            return Finish("length")
        return None

    def ending(self, context_length: int) -> bool:
        """Whether the unseen token is its last, so that no step has to go on from it."""
        return self.unseen > 0 and (self.remaining <= self.unseen or self.length >= context_length)


def mark_of(rid: str) -> bytes:
    """16 bytes that stand for a rid."""
    return hashlib.blake2b(rid.encode(), digest_size=16).digest()


def new_req(message: TokenizedGenerateReqInput | TokenizedEmbeddingReqInput, arrived: float, order: int, eos_token_ids: tuple[int, ...]) -> Req:
    """A request as it arrives; its `output_ids` go on from those that the client already has."""
    pool = None
    if isinstance(message, TokenizedEmbeddingReqInput):
        source, pool = as_request(message), Pool(message.pooling, message.dimensions)
    else:
        source = message
    sampling = source.sampling
    stops = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else frozenset(eos_token_ids))
    key = array("i", source.input_ids).tobytes()
    return Req(
        source=source,
        arrived=arrived,
        order=order,
        stop_ids=stops,
        prompt_key=key,
        mark=mark_of(source.rid),
        output_ids=list(source.output_ids),
        queued=arrived,
        pool=pool,
    )
