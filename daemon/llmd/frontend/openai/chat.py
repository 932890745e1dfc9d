"""POST /v1/chat/completions."""

from __future__ import annotations

import secrets
from typing import Any

from msgspec import Struct

from llmd.frontend.exchange import Exchange
from llmd.frontend.fields import Fields, fault
from llmd.frontend.limits import MAX_TOP_LOGPROBS
from llmd.frontend.logprob_bound import bounded
from llmd.frontend.openai.answers import Answer, Head, Held
from llmd.frontend.openai.endpoint import Endpoint, Prepared
from llmd.frontend.openai.logprobs import chat_logprobs, prompt_logprobs
from llmd.frontend.openai.messages import read_messages
from llmd.frontend.openai.params import RequestParams, check_model, read_params, token_budget
from llmd.frontend.openai.usage import Usage
from llmd.frontend.replies import dumps
from llmd.frontend.req_state import Delta
from llmd.frontend.tokenizer_manager import ChoiceSpec, TokenizerManager

#: Names that the template gets from elsewhere. `self` is jinja's.
_RESERVED = ("messages", "tools", "add_generation_prompt", "self")


class ChatCompletions(Endpoint):
    """The chat endpoint."""

    path = "/v1/chat/completions"
    rid_prefix = "chatcmpl-"

    async def prepare(self, exchange: Exchange, data: dict[str, Any]) -> Prepared:
        fields = Fields(data)
        check_model(fields, self.boot.served_name)
        messages = read_messages(fields)
        params = read_params(fields, vocabulary=self.boot.files.tokenizer_size, least_tokens=1, fresh_seed=self.manager.fresh_seed)
        logprobs = _logprobs(fields)
        rendering = read_rendering(fields)
        special = fields.boolean("add_special_tokens")
        fields.finish(strict=self.boot.args.http.strict)
        text = await render(self.manager, messages, rendering)
        ids = await self.manager.encode(text, add_special_tokens=special, param="messages")
        if not ids:
            raise fault("messages", "the chat template makes no prompt of these")
        budget = token_budget(params, len(ids), context=self.view.context_length, kv=self.view.kv_capacity, param="messages")
        specs = [
            ChoiceSpec(
                ids,
                params.sampling(i, budget),
                params.detokenize,
                max(logprobs, params.prompt_logprobs),
                prompt_logprobs=i == 0 and params.prompt_logprobs >= 0,
                priority=params.priority,
                debug_text=text if self.boot.failpoints else "",
            )
            for i in range(params.n)
        ]
        specs = bounded(specs, wished=params.max_tokens is not None, param="top_logprobs" if logprobs >= params.prompt_logprobs else "prompt_logprobs")
        echo = messages[-1]["content"] if rendering.echo and messages[-1]["role"] == "assistant" and not rendering.arguments["add_generation_prompt"] else ""
        usage = Usage([len(ids)], params.n)
        answer = ChatAnswer(self.rid(exchange), self.boot.served_name, self.view.weights_version, params, usage, logprobs, echo=echo, prompt_ids=ids)
        return Prepared(specs, answer)


class Rendering(Struct, frozen=True):
    """How messages become a prompt."""

    arguments: dict[str, Any]
    """The template's variables, `add_generation_prompt` among them."""
    continue_final: bool
    echo: bool
    """The answer begins with the last message, where it goes on with that."""


async def render(manager: TokenizerManager, messages: list[dict[str, Any]], rendering: Rendering) -> str:
    """The prompt. One that goes on with the last message ends where that message's content ends, whatever the template puts after it."""
    if not rendering.continue_final:
        return await manager.render(messages, rendering.arguments)
    mark = f"<{secrets.token_hex(16)}>"
    last = {**messages[-1], "content": messages[-1]["content"] + mark}
    text = await manager.render([*messages[:-1], last], rendering.arguments)
    before, found, _ = text.rpartition(mark)
    if not found:
        raise fault("continue_final_message", "the chat template does not show the last message as it is")
    return before.replace(mark, "")


class ChatAnswer(Answer):
    """Shapes of a chat answer. `logprobs`: how many alternatives, -1: no logprobs at all; `echo`: what every choice begins with."""

    def __init__(
        self,
        rid: str,
        model: str,
        fingerprint: str,
        params: RequestParams,
        usage: Usage,
        logprobs: int,
        *,
        echo: str = "",
        prompt_ids: list[int] | None = None,
    ) -> None:
        self.stream = params.stream
        self.usage = usage
        self._params = params
        self._top = logprobs
        self._echo = echo
        self._prompt_ids = prompt_ids or []
        kind = "chat.completion.chunk" if params.stream else "chat.completion"
        self._head = Head(rid, kind, model, fingerprint, params, usage)
        self._held: dict[int, Held] = {}
        self._frames: dict[int, tuple[bytes, bytes]] = {}

    def chunk(self, delta: Delta) -> bytes:
        frame = self._frames.get(delta.index)
        if frame is not None and delta.finish is None:
            return b"%b%b%b" % (frame[0], dumps(delta.text), frame[1]) if delta.text else b""
        index, text, out = delta.index, delta.text, b""
        held = self._held.get(index)
        if held is None:
            out = self._begin(index)
            held = self._held[index] = Held()
            text = self._echo + text
        held.add(delta)
        if text:
            out += self._event(index, b'{"content":%b}' % dumps(text), held, b"null")
        if delta.finish is not None:
            out += self._event(index, b"{}", held, dumps(delta.finish.reason))
        return out

    def _begin(self, index: int) -> bytes:
        plain = self._top < 0 and not self._params.token_ids
        frame = self._head.frame(b'{"index":%d,"delta":{"content":' % index, b'},"logprobs":null,"finish_reason":null}')
        if plain and frame is not None:
            self._frames[index] = frame
        extra = b'"prompt_token_ids":%b,' % dumps(self._prompt_ids) if self._params.token_ids else b""
        return self._head.event(b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' % index, extra=extra)

    def _event(self, index: int, delta: bytes, held: Held, finish: bytes) -> bytes:
        logprobs = b"null"
        if self._top >= 0 and held.logprobs:
            logprobs = dumps(chat_logprobs(held.logprobs, self._top, as_ids=self._params.tokens_as_ids))
        more = b',"token_ids":%b' % dumps(held.ids) if self._params.token_ids else b""
        tokens = len(held.ids)
        held.clear()
        return self._head.event(b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b}' % (index, delta, logprobs, finish, more), tokens)

    def closing(self) -> bytes:
        return self._head.usage_event()

    def body(self, deltas: list[Delta]) -> bytes:
        extra: dict[str, Any] = {"prompt_token_ids": self._prompt_ids} if self._params.token_ids else {}
        if self._params.prompt_logprobs >= 0:
            extra["prompt_logprobs"] = prompt_logprobs(deltas[0].prompt_logprobs or [], self._params.prompt_logprobs)
        return self._head.whole(map(self._choice, deltas), extra)

    def _choice(self, delta: Delta) -> dict[str, Any]:
        return {
            "index": delta.index,
            "message": {"role": "assistant", "content": self._echo + delta.text, "refusal": None},
            "logprobs": chat_logprobs(delta.logprobs, self._top, as_ids=self._params.tokens_as_ids) if self._top >= 0 else None,
            "finish_reason": delta.finish.reason if delta.finish else None,
            **({"token_ids": delta.token_ids} if self._params.token_ids else {}),
        }


def _logprobs(fields: Fields) -> int:
    wanted = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if not wanted:
        if top:
            raise fault("top_logprobs", "needs `logprobs: true`")
        return -1
    return top or 0


def read_rendering(fields: Fields) -> Rendering:
    arguments = dict(fields.mapping("chat_template_kwargs") or {})
    for name in _RESERVED:
        if name in arguments:
            raise fault("chat_template_kwargs", f"may not hold {name!r}")
    continue_final = fields.boolean("continue_final_message")
    if continue_final and fields.boolean("add_generation_prompt"):
        raise fault("continue_final_message", "goes on with the last message, and add_generation_prompt begins a new one: ask for one of them")
    arguments["add_generation_prompt"] = fields.boolean("add_generation_prompt", not continue_final)
    return Rendering(arguments, continue_final, fields.boolean("echo"))
