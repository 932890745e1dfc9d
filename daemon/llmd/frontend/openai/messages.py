"""The field `messages` of a chat: checked, each content as one string."""

from __future__ import annotations

from typing import Any

from llmd.frontend.fields import Fields, check_text, fault
from llmd.frontend.limits import MAX_MESSAGES, MAX_PARTS

#: Roles of the API. Most templates take any word for a role, and a model makes nothing of one that it was not trained on.
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def read_messages(fields: Fields) -> list[dict[str, Any]]:
    """`messages` with each content as one string. Text parts are joined by newlines; `developer` is the newer name of `system`."""
    value: Any = fields.get("messages")
    if not isinstance(value, list) or not value:
        raise fault("messages", "must be a list with at least one message")
    if len(value) > MAX_MESSAGES:
        raise fault("messages", f"may hold at most {MAX_MESSAGES} messages")
    return [_message(fields, item, f"messages[{i}]") for i, item in enumerate(value)]


def _message(request: Fields, item: Any, path: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise fault(path, "must be an object with role and content")
    fields = request.nested(item, path)
    role = fields.string("role", longest=64)
    if not role:
        raise fault(path + ".role", "is required")
    if role not in ROLES:
        raise fault(path + ".role", f"must be one of {', '.join(ROLES)}")
    fields.neutral("tool_calls", values=([],))
    fields.neutral("function_call", "audio", "refusal")
    fields.ignore("annotations", "reasoning_content")  # of an answer, sent back
    content = fields.get("content")
    if content is None and role == "assistant":
        content = ""
    message = {"role": "system" if role == "developer" else role, "content": _content(fields, content)}
    for name in ("name", "tool_call_id"):
        text = fields.string(name, longest=256)
        if text is not None:
            message[name] = text
    return message


def _content(message: Fields, content: Any) -> str:
    path = message.path("content")
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
        fields = message.nested(part, f"content[{j}]")
        fields.ignore("type")
        text = fields.get("text")
        if not isinstance(text, str):
            raise fault(where, "needs a string in `text`")
        texts.append(check_text(text, where))
    return "\n".join(texts)
