"""How many logprobs one request may ask for: with twenty alternatives a token costs a hundred times what it costs without.

Counted are tokens times (alternatives + 1): those of each prompt whose logprobs are wanted, and those that each choice may generate.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from llmd.frontend.fields import fault
from llmd.frontend.limits import MAX_LOGPROBS
from llmd.frontend.tokenizer_manager import ChoiceSpec


def bounded(specs: Sequence[ChoiceSpec], *, wished: bool, param: str, shown: int = 1) -> list[ChoiceSpec]:
    """The same choices, where they keep within `MAX_LOGPROBS`. Raises RequestError 400, naming `param`, where they do not.

    `wished`: the number of tokens to generate was asked for. Otherwise it is as much as fits, here as in the context.
    `shown`: how often the answer holds those of each prompt.
    """
    prompts = shown * sum(len(spec.input_ids) * (spec.logprobs + 1) for spec in specs if spec.prompt_logprobs)
    each = sum(spec.logprobs + 1 for spec in specs)
    total = prompts + sum(spec.sampling.max_new_tokens * (spec.logprobs + 1) for spec in specs)
    if total <= MAX_LOGPROBS:
        return list(specs)
    room = (MAX_LOGPROBS - prompts) // each
    if wished or room < max(1, *(spec.sampling.min_new_tokens for spec in specs)):
        raise fault(
            param,
            f"asks for up to {total} logprobs ({prompts} of prompts, {total - prompts} of what is generated; tokens times alternatives plus one), "
            f"the limit for one request is {MAX_LOGPROBS}: ask for fewer alternatives, choices, prompts or tokens",
        )
    return [replace(spec, sampling=replace(spec.sampling, max_new_tokens=min(room, spec.sampling.max_new_tokens))) for spec in specs]
