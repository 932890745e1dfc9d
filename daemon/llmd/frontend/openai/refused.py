"""Fields that would change the answer and are not built: each is refused by name. null, and what asks for nothing, passes."""

from __future__ import annotations

from typing import Any, Final

from llmd.frontend.fields import Fields, fault

_CONSTRAINTS: Final = ("regex", "ebnf", "json_schema", "grammar", "structural_tag", "structured_outputs")
#: vLLM's older names all begin so.
_CONSTRAINT_PREFIX: Final = "guided_"

_TOOLS: Final = ("tools", "functions")
_OTHERS: Final = (
    "lora_path",
    "logits_processors",
    "custom_logit_processor",
    "allowed_token_ids",
    "bad_words",
    "stop_regex",
    "truncate_prompt_tokens",
    "use_beam_search",
    "echo_logprobs",
    "return_hidden_states",
    "audio",
    "prediction",
    "web_search_options",
    "documents",
    "mm_processor_kwargs",
    "reasoning_effort",
    "verbosity",
)
_NOTHING: Final[tuple[Any, ...]] = (False, "", [], {})
_FORMATS: Final = ("json_object", "json_schema", "structural_tag")


def refuse_unbuilt(fields: Fields) -> None:
    """Raise RequestError 400 for the first field that asks for what is not there."""
    for name in (*_CONSTRAINTS, *fields.starting(_CONSTRAINT_PREFIX)):
        fields.neutral(name, values=(False, ""), why="constrained output is not built in this version")
    fields.neutral(*_TOOLS, values=_NOTHING, why="tools are not built in this version")
    for name, of in (("tool_choice", "tools"), ("function_call", "functions")):
        fields.neutral(name, values=("none",), why=f"is only allowed with {of}, and tools are not built in this version")
    fields.neutral(*_OTHERS, values=_NOTHING)
    fields.neutral("length_penalty", values=(1, 1.0))
    fields.neutral("modalities", values=(["text"],))
    fields.neutral("chat_template", why="is not taken from requests, since a template is a program; the operator sets model.chat_template")
    _response_format(fields)
    fields.ignore("parallel_tool_calls")


def _response_format(fields: Fields) -> None:
    value, path = fields.get("response_format"), fields.path("response_format")
    if value is None:
        return
    kind = fields.nested(value, "response_format").get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in ("text", *_FORMATS):
        raise fault(path, f'must be an object with a type of "text", {", ".join(_FORMATS)}')
    if kind != "text":
        raise fault(path, 'constrained output is not built in this version; {"type": "text"} is all there is')
