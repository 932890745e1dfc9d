"""POST /generate, as SGLang has it: one prompt or a batch, whole or as events that each hold all there is so far."""

from __future__ import annotations

from typing import Any, Final

from msgspec import Raw

from llmd.frontend.exchange import Exchange
from llmd.frontend.fields import Fields, fault
from llmd.frontend.limits import MAX_CHOICES, MAX_PRIORITY, MAX_PROMPTS, MAX_REQUEST_ID
from llmd.frontend.logprob_bound import bounded
from llmd.frontend.native.choices import results_of, specs_of, tokenized
from llmd.frontend.native.params import Asked, Batch, read_batch
from llmd.frontend.native.results import GrowingJson, Result
from llmd.frontend.openai.answers import Answer
from llmd.frontend.openai.endpoint import Endpoint, Prepared
from llmd.frontend.openai.usage import Usage
from llmd.frontend.replies import dumps
from llmd.frontend.req_state import Delta, Generation
from llmd.frontend.runtime import Runtime

#: Fields that would change the answer and are not offered.
UNSUPPORTED: Final = (
    "input_embeds",
    "image_data",
    "video_data",
    "audio_data",
    "modalities",
    "lora_path",
    "lora_id",
    "custom_logit_processor",
    "token_ids_logprob",
    "return_hidden_states",
    "return_routed_experts",
    "return_sampling_mask",
    "return_flat_raw_top_logprobs",
    "session_params",
    "require_reasoning",
    "max_thinking_tokens",
)
#: Fields that say where or how a request is to run, not what it is to answer.
WITHOUT_EFFECT: Final = (
    "log_metrics",
    "no_logs",
    "data_parallel_rank",
    "routed_dp_rank",
    "routing_key",
    "conversation_id",
    "session_id",
    "extra_key",
)


class Generate(Endpoint):
    """The native endpoint."""

    path = "/generate"
    rid_prefix = "gen-"

    async def prepare(self, exchange: Exchange, data: dict[str, Any]) -> Prepared:
        fields = Fields(data)
        asked = Asked(
            prompt=fields.get("text"),
            input_ids=fields.get("input_ids"),
            sampling_params=fields.get("sampling_params"),
            return_logprob=fields.get("return_logprob"),
            logprob_start_len=fields.get("logprob_start_len"),
            top_logprobs_num=fields.get("top_logprobs_num"),
            priority=fields.integer("priority", -MAX_PRIORITY, MAX_PRIORITY) or 0,
            prompt_name="text",
            most_prompts=MAX_PROMPTS,
        )
        stream, with_text = fields.boolean("stream"), fields.boolean("return_text_in_logprobs")
        given = fields.get("rid")
        fields.neutral(*UNSUPPORTED, values=(False, "", []))
        fields.ignore(*WITHOUT_EFFECT)
        fields.finish(strict=self.boot.args.http.strict)
        batch = read_batch(asked, vocabulary=self.boot.files.tokenizer_size, manager=self.manager)
        names = read_rid(given, batch)
        if sum(item.params.n for item in batch.items) > MAX_CHOICES:
            raise fault("sampling_params", f"`n` times the number of prompts may be at most {MAX_CHOICES}")
        encoded = await tokenized(self.runtime, batch)
        specs = bounded(specs_of(self.runtime, batch, encoded), wished=True, param="top_logprobs_num")
        self.rid(exchange)
        if len(names) == 1:  # readable in every log, and still nobody else's
            exchange.rid = f"{names[0]}.{exchange.rid[-8:]}"
        usage = Usage([len(ids) for ids in encoded], 1)
        return Prepared(specs, NativeAnswer(self.runtime, batch, usage, stream=stream, with_text=with_text, names=names), names=names)


class NativeAnswer(Answer):
    """SGLang's shapes."""

    def __init__(self, runtime: Runtime, batch: Batch, usage: Usage, *, stream: bool, with_text: bool, names: tuple[str, ...]) -> None:
        self.stream = stream
        self.usage = usage
        self._runtime = runtime
        self._batch = batch
        self._with_text = with_text
        self._names = names
        self._results: list[Result] = []

    @property
    def _alone(self) -> bool:
        return self._batch.single and len(self._results) == 1

    def begin(self, generation: Generation) -> None:
        generation.names = self._names
        version = self._runtime.view.weights_version
        self._results = results_of(self._batch, generation, weights_version=version, with_text=self._with_text, names=self._names, growing=GrowingJson)

    def chunk(self, delta: Delta) -> bytes:
        result = self._results[delta.index]
        result.add(delta)
        body = result.body()
        return b"data: %b\n\n" % dumps(body if self._alone else body | {"index": delta.index})

    def closing(self) -> bytes:
        return b""

    def body(self, deltas: list[Delta]) -> bytes:
        for delta in deltas:
            self._results[delta.index].add(delta)
        bodies = [Raw(dumps(result.body())) for result in self._results]
        return dumps(bodies[0] if self._alone else bodies)


def read_rid(given: Any, batch: Batch) -> tuple[str, ...]:
    """A name for each choice: of a list, one for each prompt; one for several prompts or choices gets their numbers. Empty: none given."""
    if given is None:
        return ()
    names = given if isinstance(given, list) else [given]
    for name in names:
        if not isinstance(name, str) or not 0 < len(name) <= MAX_REQUEST_ID or not (name.isascii() and name.isprintable()):
            raise fault("rid", f"must be 1 to {MAX_REQUEST_ID} printable ASCII characters, or a list of such")
    counts = [item.params.n for item in batch.items]
    if not isinstance(given, list):
        total = sum(counts)
        return (given,) if batch.single and total == 1 else tuple(f"{given}_{i}" for i in range(total))
    if len(names) != len(counts):
        raise fault("rid", f"has {len(names)} entries for {len(counts)} prompts")
    return tuple(name if count == 1 else f"{name}_{i}" for name, count in zip(names, counts, strict=True) for i in range(count))
