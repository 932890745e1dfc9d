"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from llmd.frontend.exchange import Exchange
from llmd.frontend.fields import Fields, check_text, fault
from llmd.frontend.limits import MAX_MESSAGES, MAX_PARTS, MAX_TOP_LOGPROBS
from llmd.frontend.openai.answers import Answer, Head
from llmd.frontend.openai.endpoint import Endpoint, Prepared
from llmd.frontend.openai.logprobs import chat_logprobs
from llmd.frontend.openai.params import RequestParams, check_model, read_params, token_budget
from llmd.frontend.openai.usage import Usage
from llmd.frontend.replies import dumps
from llmd.frontend.req_state import Delta
from llmd.frontend.tokenizer_manager import ChoiceSpec

#: Not offered: refused by name unless null or a value that asks for nothing.
_UNSUPPORTED = (
    "function_call",
    "functions",
    "audio",
    "prediction",
    "web_search_options",
    "continue_final_message",
    "documents",
    "tools",
    "echo",
    "reasoning_effort",
    "verbosity",
)


#: Roles of the API. Most templates take any word for a role, and a model makes nothing of one that it was not trained on.
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


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
        kwargs = _template_arguments(fields)
        fields.finish(strict=self.boot.args.http.strict)
        text = await self.manager.render(messages, kwargs)
        ids = await self.manager.encode(text, add_special_tokens=False, param="messages")
        if not ids:
            raise fault("messages", "the chat template makes no prompt of these")
        budget = token_budget(params, len(ids), context=self.view.context_length, kv=self.view.kv_capacity, param="messages")
        debug = text if self.boot.failpoints else ""
        specs = [ChoiceSpec(ids, params.sampling(i, budget), params.detokenize, logprobs, priority=params.priority, debug_text=debug) for i in range(params.n)]
        usage = Usage([len(ids)], params.n)
        return Prepared(specs, ChatAnswer(self.rid(exchange), self.boot.served_name, self.view.weights_version, params, usage, logprobs >= 0))


class ChatAnswer(Answer):
    """Shapes of a chat answer."""

    def __init__(self, rid: str, model: str, fingerprint: str, params: RequestParams, usage: Usage, logprobs: bool) -> None:
        self.stream = params.stream
        self.usage = usage
        self._with_logprobs = logprobs
        kind = "chat.completion.chunk" if params.stream else "chat.completion"
        self._head = Head(rid, kind, model, fingerprint, usage_wanted=params.include_usage)
        self._begun: set[int] = set()
        self._held: dict[int, list[Any]] = {}

    def chunk(self, delta: Delta) -> bytes:
        out = []
        index = delta.index
        if index not in self._begun:
            self._begun.add(index)
            out.append(self._event(index, b'{"role":"assistant","content":""}', b"null", b"null"))
        logprobs = b"null"
        if self._with_logprobs:
            held = self._held.setdefault(index, [])
            held += delta.logprobs
            if held and (delta.text or delta.finish):
                logprobs = dumps(chat_logprobs(held))
                held.clear()
        if delta.text:
            out.append(self._event(index, b'{"content":' + dumps(delta.text) + b"}", logprobs, b"null"))
            logprobs = b"null"
        if delta.finish is not None:
            out.append(self._event(index, b"{}", logprobs, dumps(delta.finish.reason)))
        return b"".join(out)

    def _event(self, index: int, delta: bytes, logprobs: bytes, finish: bytes) -> bytes:
        return self._head.event(b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}' % (index, delta, logprobs, finish))

    def closing(self) -> bytes:
        return self._head.usage_event(self.usage)

    def body(self, deltas: list[Delta]) -> bytes:
        choices = [
            {
                "index": delta.index,
                "message": {"role": "assistant", "content": delta.text, "refusal": None},
                "logprobs": chat_logprobs(delta.logprobs) if self._with_logprobs else None,
                "finish_reason": delta.finish.reason if delta.finish else None,
            }
            for delta in deltas
        ]
        return self._head.whole(choices, self.usage)


def read_messages(fields: Fields) -> list[dict[str, Any]]:
    """`messages` with each content as one string. Text parts are joined by newlines; `developer` is the newer name of `system`."""
    value: Any = fields.get("messages")
    if not isinstance(value, list) or not value:
        raise fault("messages", "must be a list with at least one message")
    if len(value) > MAX_MESSAGES:
        raise fault("messages", f"may hold at most {MAX_MESSAGES} messages")
    return [_message(item, f"messages[{i}]") for i, item in enumerate(value)]


def _message(item: Any, path: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise fault(path, "must be an object with role and content")
    fields = Fields(item, path + ".")
    role = fields.string("role", longest=64)
    if not role:
        raise fault(path + ".role", "is required")
    if role not in ROLES:
        raise fault(path + ".role", f"must be one of {', '.join(ROLES)}")
    fields.neutral("tool_calls", values=([],))
    fields.neutral("function_call", "audio", "refusal")
    content = item.get("content")
    if content is None and role == "assistant":
        content = ""
    message = {"role": "system" if role == "developer" else role, "content": _content(content, path + ".content")}
    for name in ("name", "tool_call_id"):
        text = fields.string(name, longest=256)
        if text is not None:
            message[name] = text
    return message


def _content(content: Any, path: str) -> str:
    if isinstance(content, str):
        return check_text(content, path)
    if content is None:
        raise fault(path, "is required")
    if not isinstance(content, list):
        raise fault(path, "must be a string or a list of parts")
    if len(content) > MAX_PARTS:
        raise fault(path, f"may hold at most {MAX_PARTS} parts")
    texts = []
    for j, part in enumerate(content):
        where = f"{path}[{j}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise fault(where, "must be an object with a type")
        if kind != "text":
            shown = kind if len(kind) <= 64 else kind[:64] + "..."
            raise fault(where, f"parts of type {shown!r} are not supported, only text")
        text = part.get("text")
        if not isinstance(text, str):
            raise fault(where, "needs a string in `text`")
        texts.append(check_text(text, where))
    return "\n".join(texts)


def _logprobs(fields: Fields) -> int:
    wanted = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)
    if not wanted:
        if top:
            raise fault("top_logprobs", "needs `logprobs: true`")
        return -1
    return top or 0


def _template_arguments(fields: Fields) -> dict[str, Any]:
    fields.neutral(*_UNSUPPORTED, values=(False, "", []))
    fields.neutral("tool_choice", values=("none", "auto"))
    fields.neutral("response_format", values=({"type": "text"},))
    fields.neutral("modalities", values=(["text"],))
    fields.ignore("parallel_tool_calls")
    arguments = dict(fields.mapping("chat_template_kwargs") or {})
    for name in ("messages", "tools", "add_generation_prompt"):
        if name in arguments:
            raise fault("chat_template_kwargs", f"may not hold {name!r}")
    arguments["add_generation_prompt"] = fields.boolean("add_generation_prompt", True)
    return arguments
