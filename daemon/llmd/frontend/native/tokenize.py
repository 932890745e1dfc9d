"""POST /tokenize and /detokenize (also under /v1): what text becomes, and what ids stand for. vLLM's shapes, and SGLang's where these differ.

Neither needs the engine, only the tokenizer, so both answer while it is being replaced.
"""

from __future__ import annotations

from typing import Any, Final

from llmd.errors import RequestError
from llmd.frontend.body import read_json
from llmd.frontend.exchange import Receive, Scope, Send
from llmd.frontend.fields import Fields, check_text, fault, is_int
from llmd.frontend.limits import MAX_PROMPTS
from llmd.frontend.openai.chat import read_rendering, render
from llmd.frontend.openai.messages import read_messages
from llmd.frontend.openai.params import check_model
from llmd.frontend.replies import reply_json
from llmd.frontend.runtime import Runtime

#: Ids that one request may have turned into text, over all its lists.
MAX_IDS: Final = 1 << 20


class _TokenizerEndpoint:
    """From the body to the answer."""

    def __init__(self, runtime: Runtime) -> None:
        self._boot = runtime.boot
        self._view = runtime.view
        self._manager = runtime.manager

    async def answer(self, fields: Fields) -> dict[str, Any]:
        """Raises RequestError."""
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._view.arriving():
            data = await read_json(scope, receive, limit=self._boot.args.http.max_body, executor=self._manager.executor)
        await self._view.settled()
        if not self._view.prepared:
            raise RequestError("the tokenizer is not loaded yet", code="loading")
        fields = Fields(data)
        check_model(fields, self._boot.served_name)
        await reply_json(send, 200, await self.answer(fields))


class Tokenize(_TokenizerEndpoint):
    """A prompt, a list of prompts, or messages."""

    paths = ("/v1/tokenize", "/tokenize")

    async def answer(self, fields: Fields) -> dict[str, Any]:
        prompt = fields.get("prompt")
        chat = fields.get("messages") is not None
        if (prompt is None) is not chat:
            raise fault("prompt", "give either prompt or messages")
        rendering = read_rendering(fields)
        texts = [await render(self._manager, read_messages(fields), rendering)] if chat else _texts(prompt)
        special = fields.boolean("add_special_tokens", not chat)
        strings = fields.boolean("return_token_strs")
        fields.finish(strict=self._boot.args.http.strict)
        ids = [await self._manager.encode(text, add_special_tokens=special, bounded=False) for text in texts]
        listed = isinstance(prompt, list)
        body: dict[str, Any] = {
            "count": [len(row) for row in ids] if listed else len(ids[0]),
            "max_model_len": self._view.context_length,
            "tokens": ids if listed else ids[0],
            "token_strs": None,
        }
        if strings:
            shown = await self._manager.token_texts(ids)
            body["token_strs"] = shown if listed else shown[0]
        return body


class Detokenize(_TokenizerEndpoint):
    """Ids, or lists of ids. Special tokens are shown unless `skip_special_tokens`."""

    paths = ("/v1/detokenize", "/detokenize")

    async def answer(self, fields: Fields) -> dict[str, Any]:
        tokens = fields.get("tokens")
        skip = fields.boolean("skip_special_tokens")
        fields.finish(strict=self._boot.args.http.strict)
        if not isinstance(tokens, list):
            raise fault("tokens", "is required: token ids, or a list of lists of them")
        listed = bool(tokens) and isinstance(tokens[0], list)
        rows = tokens if listed else [tokens]
        if len(rows) > MAX_PROMPTS:
            raise fault("tokens", f"may hold at most {MAX_PROMPTS} lists")
        for index, row in enumerate(rows):
            self._check(row, f"tokens[{index}]" if listed else "tokens")
        if sum(map(len, rows)) > MAX_IDS:
            raise fault("tokens", f"may hold at most {MAX_IDS} ids")
        texts = await self._manager.decode(rows, skip_special_tokens=skip)
        shown = texts if listed else texts[0]
        return {"prompt": shown, "text": shown}

    def _check(self, row: Any, path: str) -> None:
        vocabulary = self._boot.files.tokenizer_size
        if not isinstance(row, list) or not all(is_int(id) and 0 <= id < vocabulary for id in row):
            raise fault(path, f"must hold token ids from 0 to {vocabulary - 1} only")


def _texts(prompt: Any) -> list[str]:
    if isinstance(prompt, str):
        return [check_text(prompt, "prompt")]
    if not isinstance(prompt, list) or not prompt:
        raise fault("prompt", "must be a string or a list of strings")
    if len(prompt) > MAX_PROMPTS:
        raise fault("prompt", f"may hold at most {MAX_PROMPTS} of them")
    for index, text in enumerate(prompt):
        if not isinstance(text, str):
            raise fault(f"prompt[{index}]", "must be a string")
        check_text(text, f"prompt[{index}]")
    return prompt
