"""Types of the answers, for the description alone."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    """What is wrong."""

    message: str
    type: Literal["invalid_request_error", "authentication_error", "overloaded_error", "server_error"]
    param: str | None
    code: str | None


class Error(BaseModel):
    """Every answer that is not 2xx."""

    error: ErrorDetail


class PromptDetails(BaseModel):
    """Of the prompt's tokens."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens: each prompt once, and what was delivered."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class ChunkUsage(BaseModel):
    """Tokens so far; the details in the last chunk only."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | None = None


class AssistantMessage(BaseModel):
    """What the model said."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    """One choice."""

    index: int
    message: AssistantMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]


class ChatCompletion(BaseModel):
    """A whole answer. A stream has `chat.completion.chunk` objects with `delta` in place of `message`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class TextChoice(BaseModel):
    """One choice."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]


class ChatDelta(BaseModel):
    """What a chunk adds: the role in a choice's first one, text in the next, nothing in its last."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(BaseModel):
    """What one choice has to add. `finish_reason` is set in its last chunk."""

    index: int
    delta: ChatDelta
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"] | None


class ChatCompletionChunk(BaseModel):
    """The data of one event. `usage` with `stream_options.include_usage`: null but in the last, which has no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: ChunkUsage | None = None


class TextChunkChoice(BaseModel):
    """What one choice has to add. `finish_reason` is set in its last chunk."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"] | None


class CompletionChunk(BaseModel):
    """The data of one event. `usage` as in a chat's."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChunkChoice]
    usage: ChunkUsage | None = None


class Completion(BaseModel):
    """A whole answer."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage


class Vector(BaseModel):
    """One text's vector, of length 1."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    """Tokens of all texts."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(BaseModel):
    """One vector for each text, in order."""

    object: Literal["list"]
    data: list[Vector]
    model: str
    usage: EmbeddingUsage


class MetaInfo(BaseModel):
    """With `return_logprob` also `input_token_logprobs`, `output_token_logprobs` and their tops, as (logprob, id, text)."""

    id: str
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str


class Generated(BaseModel):
    """One choice, all there is so far. In the events of a batch or of several choices also `index`."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo


class Tokenized(BaseModel):
    """Lists where the prompt was a list."""

    count: int | list[int]
    max_model_len: int
    tokens: list[int] | list[list[int]]
    token_strs: list[str] | list[list[str]] | None


class Detokenized(BaseModel):
    """The text under vLLM's name and under SGLang's."""

    prompt: str | list[str]
    text: str | list[str]


class Done(BaseModel):
    """What control made of it."""

    success: Literal[True]
    message: str
    operation: dict[str, Any]


class ModelCard(BaseModel):
    """One model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(BaseModel):
    """Exactly the ids that requests may name."""

    object: Literal["list"]
    data: list[ModelCard]


class Health(BaseModel):
    """The daemon's state, and how far it is with it."""

    status: str


class AnyObject(BaseModel):
    """An object."""
