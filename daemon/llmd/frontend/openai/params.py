"""The fields that chat and text completions share: ranges, defaults, what is refused by name. docs/http-api.md has the same table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from llmd.errors import RequestError
from llmd.frontend.fields import Fields, check_text, fault, is_int
from llmd.frontend.limits import MAX_N, MAX_PRIORITY, MAX_STOP, MAX_STOP_CHARS, MAX_STOP_TOKEN_IDS, MAX_TEMPERATURE, MAX_TOKENS, MAX_TOP_LOGPROBS
from llmd.frontend.openai.penalties import Penalties, read_penalties
from llmd.frontend.openai.refused import refuse_unbuilt
from llmd.wire.messages import DetokenizeParams, SamplingParams

_SEED_MASK = 2**64 - 1

_WITHOUT_EFFECT = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "separate_reasoning",
    "stream_reasoning",
)


class RequestParams(Struct, frozen=True, kw_only=True):
    """What both endpoints read alike."""

    stream: bool
    include_usage: bool
    n: int
    max_tokens: int | None
    """None: as many as fit."""
    max_tokens_field: str
    """Which field said so."""
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    ignore_eos: bool
    stop_token_ids: tuple[int, ...]
    detokenize: DetokenizeParams
    min_tokens_field: str = "min_tokens"
    """Which field said so."""
    priority: int = 0
    """Smaller is more urgent."""
    penalties: Penalties = Penalties()
    continuous_usage: bool = False
    """`usage` in every chunk, not only in the last one."""
    prompt_logprobs: int = -1
    """-1: none; k >= 0: also those of the prompt, with the k most likely alternatives."""
    token_ids: bool = False
    """The answer shows the ids of prompt and output."""
    tokens_as_ids: bool = False
    """Logprobs call a token `token_id:ID`, which is exact where its text is not."""

    def sampling(self, choice: int, max_new_tokens: int) -> SamplingParams:
        """For choice `choice` of a prompt: the choices differ by their seed."""
        if self.min_tokens > max_new_tokens:
            raise fault(self.min_tokens_field, f"must be at most the {max_new_tokens} tokens that may be generated")
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            min_new_tokens=self.min_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=(self.seed + choice) & _SEED_MASK,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
            presence_penalty=self.penalties.presence,
            frequency_penalty=self.penalties.frequency,
            repetition_penalty=self.penalties.repetition,
            logit_bias=self.penalties.logit_bias,
        )


def read_params(fields: Fields, *, vocabulary: int, least_tokens: int, fresh_seed: Callable[[], int]) -> RequestParams:
    """Read and check the shared fields. `least_tokens`: smallest max_tokens that makes sense; `fresh_seed`: for a request that gives none."""
    refuse_unbuilt(fields)
    fields.ignore(*_WITHOUT_EFFECT)
    stream = fields.boolean("stream")
    include_usage, continuous_usage = _usage_wishes(fields, stream)
    max_tokens, field = _max_tokens(fields, least_tokens)
    top_k = fields.integer("top_k", -1, MAX_TOKENS)
    priority = fields.integer("priority", -MAX_PRIORITY, MAX_PRIORITY)
    min_tokens = fields.integer("min_tokens", 0, MAX_TOKENS) or 0
    seed = fields.integer("seed", -(2**63), 2**63 - 1)
    return RequestParams(
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        n=_choices(fields),
        max_tokens=max_tokens,
        max_tokens_field=field,
        min_tokens=min_tokens,
        temperature=fields.number("temperature", 0.0, MAX_TEMPERATURE, 1.0),
        top_p=fields.number("top_p", 0.0, 1.0, 1.0, open_low=True),
        top_k=-1 if top_k in (None, 0) else top_k,
        min_p=fields.number("min_p", 0.0, 1.0, 0.0),
        seed=(fresh_seed() if seed is None else seed) & _SEED_MASK,
        ignore_eos=fields.boolean("ignore_eos"),
        stop_token_ids=read_stop_token_ids(fields, vocabulary),
        detokenize=read_detokenize(fields, min_tokens),
        priority=priority or 0,
        penalties=read_penalties(fields, vocabulary),
        prompt_logprobs=_prompt_logprobs(fields, stream),
        token_ids=fields.boolean("return_token_ids"),
        tokens_as_ids=fields.boolean("return_tokens_as_token_ids"),
    )


def check_model(fields: Fields, served: str) -> None:
    """A missing model is the served one; any other name is refused."""
    name = fields.string("model", longest=4096)
    if name is not None and name != served:
        shown = name if len(name) <= 128 else name[:128] + "..."
        raise RequestError(f"the model {shown!r} does not exist; this server has: {served}", code="model_not_found", param="model")


def token_budget(params: RequestParams, prompt_tokens: int, *, context: int, kv: int | None, param: str) -> int:
    """How many tokens one choice may generate after a prompt; raises where prompt or wish cannot fit. `param` names the prompt."""
    least = 0 if params.max_tokens == 0 else 1
    room = context - prompt_tokens
    if room < least:
        raise RequestError(
            f"this model's context is {context} tokens for prompt and output, the request has {prompt_tokens} prompt tokens; shorten the prompt",
            code="context_length_exceeded",
            param=param,
        )
    kv_room = room if kv is None else kv - prompt_tokens
    if kv_room < least:
        raise RequestError(f"the KV cache holds {kv} tokens, the request has {prompt_tokens} prompt tokens", code="exceeds_kv_capacity", param=param)
    wish = params.max_tokens
    if wish is None:
        return min(room, kv_room)
    if wish > room:
        raise RequestError(
            f"this model's context is {context} tokens, the request asks for {prompt_tokens + wish} ({prompt_tokens} in the prompt, {wish} to generate)",
            code="context_length_exceeded",
            param=params.max_tokens_field,
        )
    if wish > kv_room:
        raise RequestError(
            f"the KV cache holds {kv} tokens, the request asks for {prompt_tokens + wish} ({prompt_tokens} in the prompt, {wish} to generate)",
            code="exceeds_kv_capacity",
            param=params.max_tokens_field,
        )
    return wish


def _max_tokens(fields: Fields, least: int) -> tuple[int | None, str]:
    """max_completion_tokens is the newer name: with both given it wins."""
    old = fields.integer("max_tokens", least, MAX_TOKENS)
    new = fields.integer("max_completion_tokens", least, MAX_TOKENS)
    return (new, "max_completion_tokens") if new is not None else (old, "max_tokens")


def _choices(fields: Fields) -> int:
    """`n`; `best_of` would choose among more choices than are given back."""
    n = fields.integer("n", 1, MAX_N) or 1
    best_of = fields.integer("best_of", 1, MAX_N)
    if best_of is not None and best_of != n:
        raise fault("best_of", f"is not built in this version other than equal to n ({n})")
    return n


def read_detokenize(fields: Fields, min_tokens: int) -> DetokenizeParams:
    """What becomes of the tokens, in OpenAI's requests and in SGLang's `sampling_params`."""
    fields.boolean("spaces_between_special_tokens")  # the tokenizers that llmd takes put none there
    include_stop = fields.boolean("include_stop_str_in_output")
    return DetokenizeParams(
        stop=read_stop(fields),
        skip_special_tokens=fields.boolean("skip_special_tokens", True),
        include_stop=fields.boolean("no_stop_trim") or include_stop,
        min_tokens=min_tokens,
    )


def _prompt_logprobs(fields: Fields, stream: bool) -> int:
    wish = fields.integer("prompt_logprobs", 0, MAX_TOP_LOGPROBS)
    if wish is not None and stream:
        raise fault("prompt_logprobs", "is only for requests that are not streamed")
    return -1 if wish is None else wish


def _usage_wishes(fields: Fields, stream: bool) -> tuple[bool, bool]:
    """(`usage` in a chunk at the end, and in every chunk)."""
    options = fields.child("stream_options")
    if options is None:
        return False, False
    if not stream:
        raise fault("stream_options", "is only for requests with `stream: true`")
    options.ignore("include_obfuscation")
    include, continuous = options.boolean("include_usage"), options.boolean("continuous_usage_stats")
    return include, include and continuous


def read_stop(fields: Fields) -> tuple[str, ...]:
    """The field `stop`: one string or several."""
    value: Any = fields.get("stop")
    if value is None:
        return ()
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list):
        raise fault(fields.path("stop"), "must be a string or a list of strings")
    if len(items) > MAX_STOP:
        raise fault(fields.path("stop"), f"may hold at most {MAX_STOP} strings")
    for item in items:
        if not isinstance(item, str) or not item:
            raise fault(fields.path("stop"), "must hold strings that are not empty")
        if len(item) > MAX_STOP_CHARS:
            raise fault(fields.path("stop"), f"may hold strings of at most {MAX_STOP_CHARS} characters")
        check_text(item, fields.path("stop"))
    return tuple(items)


def read_stop_token_ids(fields: Fields, vocabulary: int) -> tuple[int, ...]:
    """The field `stop_token_ids`."""
    value: Any = fields.get("stop_token_ids")
    if value is None:
        return ()
    if not isinstance(value, list):
        raise fault(fields.path("stop_token_ids"), "must be a list of token ids")
    if len(value) > MAX_STOP_TOKEN_IDS:
        raise fault(fields.path("stop_token_ids"), f"may hold at most {MAX_STOP_TOKEN_IDS} ids")
    for item in value:
        if not is_int(item) or not 0 <= item < vocabulary:
            raise fault(fields.path("stop_token_ids"), f"must hold integers from 0 to {vocabulary - 1}")
    return tuple(value)
