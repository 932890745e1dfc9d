"""POST /v1/embeddings: texts, token ids or lists of either to vectors of length 1, as numbers or in base64."""

from __future__ import annotations

import base64
import struct
from typing import Any, Final

from llmd.frontend.exchange import Exchange
from llmd.frontend.fields import Fields, fault
from llmd.frontend.limits import MAX_DIMENSIONS, MAX_PRIORITY, MAX_TEXTS
from llmd.frontend.openai.answers import Answer
from llmd.frontend.openai.completions import read_prompts
from llmd.frontend.openai.endpoint import Endpoint, Prepared
from llmd.frontend.openai.params import check_model
from llmd.frontend.openai.usage import Usage
from llmd.frontend.replies import dumps
from llmd.frontend.req_state import Delta, Generation
from llmd.frontend.tokenizer_manager import TextSpec
from llmd.wire.messages import Pooling

#: Fields that would change the answer and are not offered.
UNSUPPORTED: Final = ("truncate_prompt_tokens", "lora_path", "messages", "softmax", "activation", "embed_dtype", "endianness")
WITHOUT_EFFECT: Final = ("user", "rid")


class Embeddings(Endpoint):
    """Vector i is that of text i."""

    path = "/v1/embeddings"
    rid_prefix = "embd-"

    async def prepare(self, exchange: Exchange, data: dict[str, Any]) -> Prepared:
        fields = Fields(data)
        check_model(fields, self.boot.served_name)
        texts = read_prompts(fields, self.boot.files.tokenizer_size, "input", MAX_TEXTS)
        encoding = fields.string("encoding_format", longest=64) or "float"
        if encoding not in ("float", "base64"):
            raise fault("encoding_format", "must be float or base64")
        dimensions = fields.integer("dimensions", 1, MAX_DIMENSIONS)
        priority = fields.integer("priority", -MAX_PRIORITY, MAX_PRIORITY) or 0
        special = fields.boolean("add_special_tokens", True)
        fields.neutral(*UNSUPPORTED, values=(False, ""))
        fields.ignore(*WITHOUT_EFFECT)
        fields.finish(strict=self.boot.args.http.strict)
        encoded = await self.manager.encode_all(texts, add_special_tokens=special)
        specs = [self._spec(path, ids, text, dimensions or 0, priority) for (path, text), ids in zip(texts, encoded, strict=True)]
        self.rid(exchange)
        usage = Usage([len(ids) for ids in encoded], 1)
        return Prepared(specs, EmbeddingAnswer(self.boot.served_name, usage, dimensions, in_base64=encoding == "base64"))

    def _spec(self, path: str, ids: list[int], text: str | list[int], dimensions: int, priority: int) -> TextSpec:
        if not ids:
            raise fault(path, "is empty")
        self.manager.check_fits(len(ids), path)
        debug = text if self.boot.failpoints and isinstance(text, str) else ""
        return TextSpec(ids, pooling_of(self.boot.args.model.pooling), dimensions, priority, debug)


class EmbeddingAnswer(Answer):
    """OpenAI's shape."""

    stream = False

    def __init__(self, model: str, usage: Usage, dimensions: int | None, *, in_base64: bool) -> None:
        self.usage = usage
        self._model = model
        self._dimensions = dimensions
        self._base64 = in_base64
        self._generation: Generation | None = None

    def begin(self, generation: Generation) -> None:
        self._generation = generation

    def chunk(self, delta: Delta) -> bytes:
        raise NotImplementedError("vectors are not streamed")

    def closing(self) -> bytes:
        raise NotImplementedError("vectors are not streamed")

    def body(self, deltas: list[Delta]) -> bytes:
        assert self._generation is not None
        vectors = [state.vector for state in self._generation.choices]
        longest = len(vectors[0]) // 4
        if self._dimensions is not None and self._dimensions > longest:
            raise fault("dimensions", f"must be at most {longest}, which is what this model's vectors have")
        data = [{"object": "embedding", "index": index, "embedding": self._shown(vector)} for index, vector in enumerate(vectors)]
        usage = {"prompt_tokens": self.usage.prompt_tokens, "total_tokens": self.usage.prompt_tokens}
        return dumps({"object": "list", "data": data, "model": self._model, "usage": usage})

    def _shown(self, vector: bytes) -> str | tuple[float, ...]:
        """float32, little-endian: that is what OpenAI's clients expect in base64."""
        return base64.b64encode(vector).decode() if self._base64 else struct.unpack(f"<{len(vector) // 4}f", vector)


def pooling_of(configured: str) -> Pooling:
    """`auto` is the last token: the only one that has seen the whole text, with the models there are."""
    match configured:
        case "mean" | "cls":
            return configured
        case _:
            return "last"
