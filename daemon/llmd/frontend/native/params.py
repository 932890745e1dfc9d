"""SGLang's `sampling_params` and the arguments of `generate`, for one prompt or a batch: ranges, defaults, what is refused by name.

A field that would change the answer and is not offered is refused; so is one that nobody knows. null always means the default.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

from msgspec import Struct

from llmd.frontend.fields import Fields, check_text, fault, is_int
from llmd.frontend.limits import MAX_N, MAX_TEMPERATURE, MAX_TOKENS, MAX_TOP_LOGPROBS
from llmd.frontend.openai.params import RequestParams, read_detokenize, read_stop_token_ids, token_budget
from llmd.frontend.openai.penalties import read_penalties
from llmd.frontend.tokenizer_manager import TokenizerManager

#: SGLang's own default.
DEFAULT_NEW_TOKENS: Final = 128
_SEED_MASK: Final = 2**63 - 1
_UNSUPPORTED: Final = ("json_schema", "regex", "ebnf", "structural_tag", "custom_params", "stream_interval", "custom_logit_processor")

T = TypeVar("T")


class Item(Struct, frozen=True):
    """One prompt of a batch, checked."""

    prompt: str | list[int]
    params: RequestParams
    given_tokens: bool
    """Whether max_new_tokens was given: a default that does not fit is shortened, a wish is refused."""
    logprobs: int
    """-1: none."""
    logprob_start: int
    """First prompt position whose logprob is wanted; -1: none of them."""
    path: str
    """The prompt's name in errors."""

    def max_new_tokens(self, prompt_tokens: int, *, context: int, kv: int | None) -> int:
        """How many tokens may be generated. Raises RequestError where prompt or wish cannot fit."""
        budget = token_budget(self.params, prompt_tokens, context=context, kv=kv, param=self.path)
        return budget if self.given_tokens else min(budget, DEFAULT_NEW_TOKENS)


class Batch(Struct, frozen=True):
    """What one call asks for."""

    items: list[Item]
    single: bool
    """One prompt, not in a list: the answer is not in a list either."""
    priority: int = 0


class Asked(Struct, frozen=True, kw_only=True):
    """The arguments of `generate`, as given, whatever their types are."""

    prompt: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    priority: int = 0
    """Checked already."""
    prompt_name: str = "prompt"
    """What errors call `prompt`."""
    most_prompts: int | None = None


def read_batch(asked: Asked, *, vocabulary: int, manager: TokenizerManager) -> Batch:
    """Check everything that needs no tokenizing. Raises RequestError naming the argument."""
    prompts, single = _prompts(asked, vocabulary)
    count = len(prompts)
    sampling = _spread("sampling_params", asked.sampling_params, {}, count)
    wanted = _spread("return_logprob", asked.return_logprob, False, count)
    starts = _spread("logprob_start_len", asked.logprob_start_len, -1, count)
    tops = _spread("top_logprobs_num", asked.top_logprobs_num, 0, count)
    many = isinstance(asked.sampling_params, list)
    items = []
    for i, (path, prompt) in enumerate(prompts):
        name = f"sampling_params[{i}]" if many else "sampling_params"
        params, given = read_sampling(sampling[i], name, vocabulary=vocabulary, manager=manager)
        top, start = _logprobs(wanted[i], tops[i], starts[i])
        items.append(Item(prompt, params, given, top, start, path))
    return Batch(items, single, asked.priority)


def read_sampling(raw: Any, name: str, *, vocabulary: int, manager: TokenizerManager) -> tuple[RequestParams, bool]:
    """One `sampling_params` object, and whether it says how many tokens may be generated."""
    if not isinstance(raw, dict):
        raise fault(name, "must be an object")
    fields = Fields(raw, f"{name}.")
    fields.neutral(*_UNSUPPORTED, values=(False, ""))
    most = fields.integer("max_new_tokens", 0, MAX_TOKENS)
    least = fields.integer("min_new_tokens", 0, MAX_TOKENS) or 0
    top_k = fields.integer("top_k", -1, MAX_TOKENS)
    seed = fields.integer("sampling_seed", -(2**63), 2**63 - 1)
    params = RequestParams(
        stream=False,
        include_usage=False,
        n=fields.integer("n", 1, MAX_N) or 1,
        max_tokens=most,
        max_tokens_field=fields.path("max_new_tokens"),
        min_tokens=least,
        min_tokens_field=fields.path("min_new_tokens"),
        temperature=fields.number("temperature", 0.0, MAX_TEMPERATURE, 1.0),
        top_p=fields.number("top_p", 0.0, 1.0, 1.0, open_low=True),
        top_k=-1 if top_k in (None, 0) else top_k,
        min_p=fields.number("min_p", 0.0, 1.0, 0.0),
        seed=(manager.fresh_seed() if seed is None else seed) & _SEED_MASK,
        ignore_eos=fields.boolean("ignore_eos"),
        stop_token_ids=read_stop_token_ids(fields, vocabulary),
        detokenize=read_detokenize(fields, least),
        penalties=read_penalties(fields, vocabulary),
    )
    fields.finish(strict=True)
    return params, most is not None


def _prompts(asked: Asked, vocabulary: int) -> tuple[list[tuple[str, str | list[int]]], bool]:
    name = asked.prompt_name
    if (asked.prompt is None) == (asked.input_ids is None):
        raise fault(name, f"give either {name} or input_ids")
    if asked.prompt is not None:
        if isinstance(asked.prompt, str):
            return [(name, check_text(asked.prompt, name))], True
        texts = _listed(name, asked.prompt)
        _few(name, texts, asked)
        return [(f"{name}[{i}]", _text(f"{name}[{i}]", text)) for i, text in enumerate(texts)], False
    ids = _listed("input_ids", asked.input_ids)
    if is_int(ids[0]):
        return [("input_ids", _ids("input_ids", ids, vocabulary))], True
    _few("input_ids", ids, asked)
    return [(f"input_ids[{i}]", _ids(f"input_ids[{i}]", row, vocabulary)) for i, row in enumerate(ids)], False


def _few(name: str, prompts: list[Any], asked: Asked) -> None:
    if asked.most_prompts is not None and len(prompts) > asked.most_prompts:
        raise fault(name, f"may hold at most {asked.most_prompts} prompts")


def _listed(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list | tuple) or not value:
        raise fault(name, "must not be empty" if isinstance(value, list | tuple) else "must be a list")
    return list(value)


def _text(path: str, value: Any) -> str:
    if not isinstance(value, str):
        raise fault(path, "must be a string")
    return check_text(value, path)


def _ids(path: str, value: Any, vocabulary: int) -> list[int]:
    ids = _listed(path, value)
    for id in ids:
        if not is_int(id) or not 0 <= id < vocabulary:
            raise fault(path, f"must hold integers from 0 to {vocabulary - 1}")
    return ids


def _spread(name: str, value: T | list[T] | None, default: T, count: int) -> list[T]:
    """One value for each prompt: a list has one for each, anything else holds for all."""
    if value is None:
        return [default] * count
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise fault(name, f"has {len(value)} entries for {count} prompts")
    return [default if item is None else item for item in value]


def _logprobs(wanted: Any, top: Any, start: Any) -> tuple[int, int]:
    if not isinstance(wanted, bool):
        raise fault("return_logprob", "must be true or false")
    if not is_int(top) or not 0 <= top <= MAX_TOP_LOGPROBS:
        raise fault("top_logprobs_num", f"must be an integer from 0 to {MAX_TOP_LOGPROBS}")
    if not is_int(start) or start < -1:
        raise fault("logprob_start_len", "must be an integer of at least -1")
    return (top, start) if wanted else (-1, -1)
