"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

from llmd.frontend.exchange import Exchange
from llmd.frontend.fields import Fields, check_text, fault, is_int
from llmd.frontend.limits import MAX_CHOICES, MAX_PROMPTS, MAX_TOP_LOGPROBS
from llmd.frontend.openai.answers import Answer, Head
from llmd.frontend.openai.endpoint import Endpoint, Prepared
from llmd.frontend.openai.logprobs import TextLogprobs
from llmd.frontend.openai.params import RequestParams, check_model, read_params, token_budget
from llmd.frontend.openai.usage import Usage
from llmd.frontend.replies import dumps
from llmd.frontend.req_state import Delta
from llmd.frontend.tokenizer_manager import ChoiceSpec
from llmd.wire.messages import Finish

Prompt = str | list[int]


class Completions(Endpoint):
    """The text endpoint: choice i answers prompt i // n."""

    path = "/v1/completions"
    rid_prefix = "cmpl-"

    async def prepare(self, exchange: Exchange, data: dict[str, Any]) -> Prepared:
        fields = Fields(data)
        check_model(fields, self.boot.served_name)
        prompts = read_prompts(fields, self.boot.files.tokenizer_size)
        echo = fields.boolean("echo")
        params = read_params(fields, vocabulary=self.boot.files.tokenizer_size, least_tokens=0 if echo else 1, fresh_seed=self.manager.fresh_seed)
        logprobs = fields.integer("logprobs", 0, MAX_TOP_LOGPROBS)
        _check_rest(fields, params.n)
        fields.finish(strict=self.boot.args.http.strict)
        if len(prompts) * params.n > MAX_CHOICES:
            raise fault("n", f"times the number of prompts may be at most {MAX_CHOICES}")
        specs: list[ChoiceSpec] = []
        encoded: list[list[int]] = []
        for path, prompt in prompts:
            ids = prompt if isinstance(prompt, list) else await self.manager.encode(prompt, add_special_tokens=True, param=path)
            if not ids:
                raise fault(path, "is empty")
            encoded.append(ids)
            budget = token_budget(params, len(ids), context=self.view.context_length, kv=self.view.kv_capacity, param=path)
            debug = prompt if self.boot.failpoints and isinstance(prompt, str) else ""
            for i in range(params.n):
                specs.append(
                    ChoiceSpec(
                        ids,
                        params.sampling(i, budget),
                        params.detokenize,
                        -1 if logprobs is None else logprobs,
                        prompt_logprobs=echo and logprobs is not None,
                        priority=params.priority,
                        debug_text=debug,
                    )
                )
        usage = Usage([len(ids) for ids in encoded], params.n)
        texts = [p if isinstance(p, str) else self.manager.tokenizer.decode(p, False) for _, p in prompts] if echo else None
        answer = TextAnswer(self.rid(exchange), self.boot.served_name, self.view.weights_version, params, usage, texts, logprobs)
        if params.max_tokens == 0 and logprobs is None:
            return Prepared([], answer, [Delta(i, "", [], [], None, Finish("length")) for i in range(len(specs))])
        return Prepared(specs, answer)


class TextAnswer(Answer):
    """Shapes of a text answer. `echo`: the prompts' texts, or None."""

    def __init__(self, rid: str, model: str, fingerprint: str, params: RequestParams, usage: Usage, echo: list[str] | None, logprobs: int | None) -> None:
        self.stream = params.stream
        self.usage = usage
        self._n = params.n
        self._echo = echo
        self._top = logprobs
        self._logprobs: dict[int, TextLogprobs] = {}
        self._held: dict[int, list[Any]] = {}
        self._begun: set[int] = set()
        self._head = Head(rid, "text_completion", model, fingerprint, usage_wanted=params.include_usage)

    def chunk(self, delta: Delta) -> bytes:
        text = self._text(delta)
        held = self._held.setdefault(delta.index, [])
        held += [*(delta.prompt_logprobs or ()), *delta.logprobs]
        if not text and delta.finish is None:
            return b""
        logprobs = b"null"
        if self._top is not None:
            logprobs = dumps(self._logprob_body(delta.index, held))
        held.clear()
        finish = b"null" if delta.finish is None else dumps(delta.finish.reason)
        return self._head.event(b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}' % (delta.index, dumps(text), logprobs, finish))

    def closing(self) -> bytes:
        return self._head.usage_event(self.usage)

    def body(self, deltas: list[Delta]) -> bytes:
        choices = [
            {
                "index": delta.index,
                "text": self._text(delta),
                "logprobs": None if self._top is None else self._logprob_body(delta.index, [*(delta.prompt_logprobs or ()), *delta.logprobs]),
                "finish_reason": delta.finish.reason if delta.finish else None,
            }
            for delta in deltas
        ]
        return self._head.whole(choices, self.usage)

    def _text(self, delta: Delta) -> str:
        if self._echo is None or delta.index in self._begun:
            return delta.text
        self._begun.add(delta.index)
        return self._echo[delta.index // self._n] + delta.text

    def _logprob_body(self, index: int, entries: list[Any]) -> dict[str, Any]:
        builder = self._logprobs.get(index)
        if builder is None:
            builder = self._logprobs[index] = TextLogprobs(bool(self._top))
        return builder.body(entries)


def read_prompts(fields: Fields, vocabulary: int, name: str = "prompt") -> list[tuple[str, Prompt]]:
    """(path for errors, prompt) of each prompt: a string, a list of strings, a list of token ids, or a list of such lists."""
    value: Any = fields.get(name)
    if isinstance(value, str):
        return [(name, check_text(value, name))]
    if not isinstance(value, list) or not value:
        raise fault(name, "is required: a string, token ids, or a list of either")
    if is_int(value[0]):
        return [(name, _ids(value, name, vocabulary))]
    if len(value) > MAX_PROMPTS:
        raise fault(name, f"may hold at most {MAX_PROMPTS} of them")
    prompts: list[tuple[str, Prompt]] = []
    for i, item in enumerate(value):
        path = f"{name}[{i}]"
        if isinstance(item, str) and isinstance(value[0], str):
            prompts.append((path, check_text(item, path)))
        elif isinstance(item, list) and isinstance(value[0], list):
            prompts.append((path, _ids(item, path, vocabulary)))
        else:
            raise fault(path, "must be of the same kind as the others: strings or lists of token ids")
    return prompts


def _ids(value: list[Any], path: str, vocabulary: int) -> list[int]:
    if not value:
        raise fault(path, "is empty")
    if not all(map(is_int, value)):
        raise fault(path, "must hold token ids only")
    if min(value) < 0 or max(value) >= vocabulary:
        raise fault(path, f"holds a token id outside 0 to {vocabulary - 1}")
    return value


def _check_rest(fields: Fields, n: int) -> None:
    fields.neutral("suffix", values=("",))
    best_of = fields.integer("best_of", 1, n)
    if best_of is not None and best_of != n:
        raise fault("best_of", "is not supported by this server other than equal to n")
    fields.neutral("response_format", values=({"type": "text"},))
    fields.neutral("tools", "tool_choice", "top_logprobs", values=([],))
