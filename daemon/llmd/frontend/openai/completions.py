"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

from msgspec import Raw

from llmd.frontend.exchange import Exchange
from llmd.frontend.fields import Fields, check_text, fault, is_int
from llmd.frontend.limits import MAX_CHOICES, MAX_PROMPTS, MAX_TOP_LOGPROBS
from llmd.frontend.logprob_bound import bounded
from llmd.frontend.openai.answers import Answer, Head, Held
from llmd.frontend.openai.endpoint import Endpoint, Prepared
from llmd.frontend.openai.logprobs import TextLogprobs, prompt_logprobs
from llmd.frontend.openai.params import RequestParams, check_model, read_params, token_budget
from llmd.frontend.openai.usage import Usage
from llmd.frontend.replies import dumps
from llmd.frontend.req_state import Delta
from llmd.frontend.tokenizer_manager import ChoiceSpec
from llmd.wire.messages import Finish, TokenLogprob

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
        logprobs = _logprobs(fields)
        fields.neutral("suffix", values=("",))
        special = fields.boolean("add_special_tokens", True)
        fields.finish(strict=self.boot.args.http.strict)
        if len(prompts) * params.n > MAX_CHOICES:
            raise fault("n", f"times the number of prompts may be at most {MAX_CHOICES}")
        encoded: list[list[int]] = []
        specs: list[ChoiceSpec] = []
        for path, prompt in prompts:
            ids = prompt if isinstance(prompt, list) else await self.manager.encode(prompt, add_special_tokens=special, param=path)
            if not ids:
                raise fault(path, "is empty")
            encoded.append(ids)
            specs += self._choices(params, ids, path, logprobs, echo=echo and logprobs >= 0, debug=prompt if isinstance(prompt, str) else "")
        param = "logprobs" if logprobs >= params.prompt_logprobs else "prompt_logprobs"
        # One choice has those of its prompt, and each of the others shows them too; with `echo` each has its own.
        specs = bounded(specs, wished=params.max_tokens is not None, param=param, shown=1 if echo and logprobs >= 0 else params.n)
        usage = Usage([len(ids) for ids in encoded], params.n)
        texts = [p if isinstance(p, str) else self.manager.tokenizer.decode(p, False) for _, p in prompts] if echo else None
        answer = TextAnswer(self.rid(exchange), self.boot.served_name, self.view.weights_version, params, usage, texts, logprobs, encoded)
        if params.max_tokens == 0 and logprobs < 0 and params.prompt_logprobs < 0:
            return Prepared([], answer, [Delta(i, "", [], [], None, Finish("length")) for i in range(len(specs))])
        return Prepared(specs, answer)

    def _choices(self, params: RequestParams, ids: list[int], path: str, logprobs: int, *, echo: bool, debug: str) -> list[ChoiceSpec]:
        """The choices for one prompt."""
        budget = token_budget(params, len(ids), context=self.view.context_length, kv=self.view.kv_capacity, param=path)
        return [
            ChoiceSpec(
                ids,
                params.sampling(i, budget),
                params.detokenize,
                max(logprobs, params.prompt_logprobs),
                prompt_logprobs=echo or (i == 0 and params.prompt_logprobs >= 0),
                priority=params.priority,
                debug_text=debug if self.boot.failpoints else "",
            )
            for i in range(params.n)
        ]


class TextAnswer(Answer):
    """Shapes of a text answer. `echo`: the prompts' texts, or None; `logprobs`: how many alternatives, -1: no logprobs at all."""

    def __init__(
        self,
        rid: str,
        model: str,
        fingerprint: str,
        params: RequestParams,
        usage: Usage,
        echo: list[str] | None,
        logprobs: int,
        prompt_ids: list[list[int]] | None = None,
    ) -> None:
        self.stream = params.stream
        self.usage = usage
        self._params = params
        self._echo = echo
        self._top = logprobs
        self._prompt_ids = prompt_ids or []
        self._logprobs: dict[int, TextLogprobs] = {}
        self._held: dict[int, Held] = {}
        self._begun: set[int] = set()
        """Choices whose prompt's ids have been shown."""
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        self._head = Head(rid, "text_completion", model, fingerprint, params, usage)

    def chunk(self, delta: Delta) -> bytes:
        frame = self._frames.get(delta.index)
        if frame is not None and delta.finish is None:
            return b"%b%b%b" % (frame[0], dumps(delta.text), frame[1]) if delta.text else b""
        index, text = delta.index, delta.text
        held = self._held.get(index)
        if held is None:
            held = self._held[index] = Held()
            if self._echo is not None:
                text = self._echo[index // self._params.n] + text
        held.add(delta)
        if not text and delta.finish is None:
            return b""
        return self._event(index, text, held, delta.finish)

    def _event(self, index: int, text: str, held: Held, finish: Finish | None) -> bytes:
        params, logprobs, more = self._params, b"null", b""
        if self._top >= 0:
            logprobs = dumps(self._logprob_body(index, held.prompt_logprobs if self._echo is not None else [], held.logprobs))
        if params.token_ids:
            more = b',"token_ids":%b' % dumps(held.ids)
            if index not in self._begun:
                self._begun.add(index)
                more += b',"prompt_token_ids":%b' % dumps(self._prompt_ids[index // params.n])
        elif self._top < 0 and (frame := self._head.frame(b'{"index":%d,"text":' % index, b',"logprobs":null,"finish_reason":null}')) is not None:
            self._frames[index] = frame
        tokens = len(held.ids)
        held.clear()
        reason = b"null" if finish is None else dumps(finish.reason)
        return self._head.event(b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b}' % (index, dumps(text), logprobs, reason, more), tokens)

    def closing(self) -> bytes:
        return self._head.usage_event()

    def body(self, deltas: list[Delta]) -> bytes:
        wanted = self._params.prompt_logprobs
        prompts = [prompt_logprobs(delta.prompt_logprobs or [], wanted) for delta in deltas[:: self._params.n]] if wanted >= 0 else []
        return self._head.whole((self._choice(delta, prompts) for delta in deltas), {})

    def _choice(self, delta: Delta, prompts: list[list[Raw | None]]) -> dict[str, Any]:
        of = delta.index // self._params.n
        shown = {
            "index": delta.index,
            "text": delta.text if self._echo is None else self._echo[of] + delta.text,
            "logprobs": None,
            "finish_reason": delta.finish.reason if delta.finish else None,
        }
        if self._top >= 0:
            shown["logprobs"] = self._logprob_body(delta.index, (delta.prompt_logprobs or []) if self._echo is not None else [], delta.logprobs)
        if prompts:
            shown["prompt_logprobs"] = prompts[of]
        if self._params.token_ids:
            shown |= {"token_ids": delta.token_ids, "prompt_token_ids": self._prompt_ids[of]}
        return shown

    def _logprob_body(self, index: int, prompt: list[TokenLogprob], output: list[TokenLogprob]) -> dict[str, Any]:
        builder = self._logprobs.get(index)
        if builder is None:
            builder = self._logprobs[index] = TextLogprobs(self._top, as_ids=self._params.tokens_as_ids)
        return builder.body([*prompt, *output])


def read_prompts(fields: Fields, vocabulary: int, name: str = "prompt", most: int = MAX_PROMPTS) -> list[tuple[str, Prompt]]:
    """(path for errors, prompt) of each prompt: a string, a list of strings, a list of token ids, or a list of such lists."""
    value: Any = fields.get(name)
    if isinstance(value, str):
        return [(name, check_text(value, name))]
    if not isinstance(value, list) or not value:
        raise fault(name, "is required: a string, token ids, or a list of either")
    if is_int(value[0]):
        return [(name, _ids(value, name, vocabulary))]
    if len(value) > most:
        raise fault(name, f"may hold at most {most} of them")
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


def _logprobs(fields: Fields) -> int:
    """How many alternatives, -1: no logprobs. Chat's `top_logprobs` means nothing here."""
    wish = fields.integer("logprobs", 0, MAX_TOP_LOGPROBS)
    fields.neutral("top_logprobs", values=(0,))
    return -1 if wish is None else wish
