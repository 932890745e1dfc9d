"""What a frontend shows of the requests it owns. Made in the control link's thread; reads only."""

from __future__ import annotations

import time
from itertools import islice

from llmd.frontend.req_state import ReqState
from llmd.frontend.tokenizer_manager import TokenizerManager
from llmd.wire.messages import TokenizedGenerateReqInput
from llmd.wire.tables import MAX_REQUESTS, OwnedRequest, Tables


def tables_of(manager: TokenizerManager) -> Tables:
    """A row for each choice in flight; probes and the warm-up are left out."""
    now = time.monotonic()
    states = [state for state in manager.in_flight() if state.generation.metered]
    return Tables(owned=[_row(state, now) for state in islice(states, MAX_REQUESTS)], requests_total=len(states))


def _row(state: ReqState, now: float) -> OwnedRequest:
    request, generation = state.request, state.generation
    limit = request.sampling.max_new_tokens if isinstance(request, TokenizedGenerateReqInput) else 0
    return OwnedRequest(
        rid=request.rid,
        request=generation.rid,
        client_id=generation.client_id,
        age_s=round(now - state.sent_at, 3),
        prompt_tokens=len(request.input_ids),
        output_tokens=len(state.output_ids),
        max_new_tokens=limit,
        first_token_s=round(state.first_at - state.sent_at, 3) if state.first_at else 0.0,
        silent_s=round(now - state.last_at, 3) if state.last_at else 0.0,
        streamed=generation.streamed,
    )
