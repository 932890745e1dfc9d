"""`ChatTemplate`: messages -> prompt text with the model's own Jinja template, in a sandbox with bounded work.

The helpers are those that templates on the hub expect (raise_exception, strftime_now, tojson, loop controls, `generation`
blocks). A template's text comes from the model or the operator, never from a client.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from llmd.errors import ConfigError, RequestError
from llmd.tokenizer.facts import TokenFacts, read_json
from llmd.tokenizer.sandbox import MAX_OUTPUT, BoundedSandbox, TooMuchWork, budget

_MESSAGE_LIMIT = 500


class _Refused(jinja2.TemplateError):
    """What a template's raise_exception raises."""


class _Generation(Extension):
    """`{% generation %}` marks an assistant's text for training; here its content stands as it is."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template and the special tokens it may name."""

    def __init__(self, source: str, *, name: str = "chat template", tokens: dict[str, str] | None = None) -> None:
        """Compile; raises ConfigError `NAME:LINE: ...` on a syntax error."""
        self.source = source
        self._tokens = dict(tokens or {})
        environment = BoundedSandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"{name}:{error.lineno}: chat template: {error.message}") from None
        except RecursionError:
            raise ConfigError(f"{name}: chat template: nested too deeply") from None

    @classmethod
    def load(cls, small_dir: Path, override_path: str | None) -> ChatTemplate | None:
        """The template of `override_path` if given, else the model's own, else None.

        Raises ConfigError on a missing file or, with the line number, a syntax error.
        """
        tokens = TokenFacts.read(small_dir).texts
        if override_path is not None:
            return cls(_read(Path(override_path)), name=override_path, tokens=tokens)
        path = small_dir / "chat_template.jinja"
        if path.exists():
            return cls(_read(path), name=str(path), tokens=tokens)
        for name in ("chat_template.json", "tokenizer_config.json"):
            source = _default(read_json(small_dir / name).get("chat_template"))
            if source is not None:
                return cls(source, name=str(small_dir / name), tokens=tokens)
        return None

    def render(self, messages: Sequence[Any], *, add_generation_prompt: bool = True, tools: Sequence[Any] | None = None, **kwargs: Any) -> str:
        """The prompt. Raises RequestError (400, param `messages`), with the template's own sentence where it refuses."""
        variables = {**self._tokens, **kwargs, "messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        pieces, size = [], 0
        try:
            with budget():
                for piece in self._template.generate(variables):
                    size += len(piece)
                    if size > MAX_OUTPUT:
                        raise TooMuchWork(f"its output is longer than {MAX_OUTPUT} characters")
                    pieces.append(piece)
        except _Refused as error:
            raise RequestError(_short(str(error)), param="messages") from None
        except Exception as error:  # whatever a template does wrong is this request's fault, not the server's
            reason = _short(f"{type(error).__name__}: {error}")
            raise RequestError(f"the chat template cannot render these messages: {reason}", param="messages") from None
        return "".join(pieces)


def _raise(message: object = "the chat template refuses these messages") -> NoReturn:
    raise _Refused(str(message))


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{path}: chat template cannot be read: {reason}") from None


def _default(value: object) -> str | None:
    """tokenizer_config.json's chat_template: a text, or a list of named ones."""
    if isinstance(value, list):
        named = {item["name"]: item["template"] for item in value if isinstance(item, dict) and {"name", "template"} <= item.keys()}
        value = named.get("default", next(iter(named.values()), None))
    return value if isinstance(value, str) else None


def _short(text: str) -> str:
    return text if len(text) <= _MESSAGE_LIMIT else text[:_MESSAGE_LIMIT] + "..."
