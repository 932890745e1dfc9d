"""From a checked batch to the choices that are submitted, and to their results; for `/generate` and `Engine.generate` alike."""

from __future__ import annotations

from llmd.frontend.fields import fault
from llmd.frontend.native.params import Batch
from llmd.frontend.native.results import Growing, Result
from llmd.frontend.req_state import Generation
from llmd.frontend.runtime import EngineSide
from llmd.frontend.tokenizer_manager import ChoiceSpec


async def tokenized(side: EngineSide, batch: Batch) -> list[list[int]]:
    """Token ids of each prompt. Raises RequestError naming the one that is empty."""
    encoded = await side.manager.encode_all([(item.path, item.prompt) for item in batch.items])
    for item, ids in zip(batch.items, encoded, strict=True):
        if not ids:
            raise fault(item.path, "is empty")
    return encoded


def specs_of(side: EngineSide, batch: Batch, encoded: list[list[int]]) -> list[ChoiceSpec]:
    """`n` choices for each prompt, in order. Raises RequestError where one cannot fit."""
    context, kv = side.view.context_length, side.view.kv_capacity
    specs = []
    for item, ids in zip(batch.items, encoded, strict=True):
        budget = item.max_new_tokens(len(ids), context=context, kv=kv)
        debug = item.prompt if side.boot.failpoints and isinstance(item.prompt, str) else ""
        for i in range(item.params.n):
            specs.append(
                ChoiceSpec(
                    ids,
                    item.params.sampling(i, budget),
                    item.params.detokenize,
                    item.logprobs,
                    prompt_logprobs=item.logprob_start >= 0,
                    priority=batch.priority,
                    debug_text=debug,
                )
            )
    return specs


def results_of(
    batch: Batch, generation: Generation, *, weights_version: str, with_text: bool, names: tuple[str, ...] = (), growing: type[Growing] = Growing
) -> list[Result]:
    """One for each choice. `names`: their ids in the answer, where the client has chosen them; `growing`: what their logprobs are kept in."""
    items = [item for item in batch.items for _ in range(item.params.n)]
    return [
        Result(
            state,
            name=names[index] if names else state.request.rid,
            weights_version=weights_version,
            logprobs=item.logprobs,
            logprob_start=item.logprob_start,
            with_text=with_text,
            growing=growing,
        )
        for index, (item, state) in enumerate(zip(items, generation.choices, strict=True))
    ]
