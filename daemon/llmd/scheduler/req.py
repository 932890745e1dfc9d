"""`Req`: one request in the scheduler, from its arrival to its last token."""

from __future__ import annotations

from dataclasses import dataclass, field

from llmd.wire.messages import Finish, TokenizedGenerateReqInput, TokenLogprob


@dataclass(slots=True, eq=False)
class Req:
    """A request, its tokens so far and the KV it holds.

    Prompt and output are one sequence. `computed` of its tokens have their KV written; what is missing is computed by the
    next steps: one token in decode, many after arrival or retraction. When nothing is missing, the next token is sampled.
    """

    source: TokenizedGenerateReqInput
    arrived: float
    """Monotonic time."""
    order: int
    """Counts arrivals: the smaller goes first and is retracted last."""
    stop_ids: frozenset[int]
    output_ids: list[int]
    row: int = 0
    """Row of ReqToTokenPool; 0: none."""
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    started: float | None = None
    """When it was first admitted; None: never yet."""
    announced: bool = False
    """Its first chunk has been sent."""
    prompt_logprobs: list[TokenLogprob] | None = None
    """Computed and not sent yet."""

    @property
    def rid(self) -> str:
        return self.source.rid

    @property
    def length(self) -> int:
        """Tokens of prompt and output."""
        return len(self.source.input_ids) + len(self.output_ids)

    @property
    def pending(self) -> int:
        """Tokens whose KV is still to be computed; 1 in decode."""
        return self.length - self.computed

    @property
    def remaining(self) -> int:
        """Tokens it may still generate."""
        return self.source.sampling.max_new_tokens - len(self.output_ids)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the next prefill has to give them. Such a prompt is computed in one step."""
        return self.source.prompt_logprobs and not self.output_ids and not self.announced

    @property
    def banned_ids(self) -> tuple[int, ...]:
        """Ids that would end it before `min_new_tokens`."""
        return tuple(self.stop_ids) if len(self.output_ids) < self.source.sampling.min_new_tokens else ()

    def tokens(self, start: int, stop: int) -> list[int]:
        """Ids of the sequence from index `start` up to `stop`."""
        prompt = self.source.input_ids
        size = len(prompt)
        if start >= size:
            return self.output_ids[start - size : stop - size]
        return prompt[start:stop] + self.output_ids[: max(0, stop - size)]

    def finish(self, context_length: int) -> Finish | None:
        """Why it is over, or None. A stop token is part of the output and named by `matched`."""
        sampling = self.source.sampling
        if self.output_ids and self.output_ids[-1] in self.stop_ids and len(self.output_ids) > sampling.min_new_tokens:
            return Finish("stop", self.output_ids[-1])
        if self.remaining <= 0 or self.length >= context_length:
            return Finish("length")
        return None


def new_req(source: TokenizedGenerateReqInput, arrived: float, order: int, eos_token_ids: tuple[int, ...]) -> Req:
    """A request as it arrives; its `output_ids` go on from those that the client already has."""
    sampling = source.sampling
    stops = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else frozenset(eos_token_ids))
    return Req(source=source, arrived=arrived, order=order, stop_ids=stops, output_ids=list(source.output_ids))
