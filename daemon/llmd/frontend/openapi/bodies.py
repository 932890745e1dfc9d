"""Types of the request bodies, for the description alone: the endpoints read their fields themselves, to name faults exactly.

A test holds the fields here against those that each endpoint reads, so neither can have one that the other lacks. Fields that are
known and have no effect, and fields that are refused whatever they hold, are not here; docs/http-api.md names them.
pydantic, because msgspec has no unions of several kinds of list; a frontend imports none of this, it serves the document as written.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo

from llmd.frontend import limits
from llmd.frontend.openai.messages import ROLES

TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
Text = Annotated[str, Field(min_length=1)]
Prompts = (
    Text
    | TokenIds
    | Annotated[list[Text], Field(min_length=1, max_length=limits.MAX_PROMPTS)]
    | Annotated[list[TokenIds], Field(max_length=limits.MAX_PROMPTS)]
)
Texts = (
    Text | TokenIds | Annotated[list[Text], Field(min_length=1, max_length=limits.MAX_TEXTS)] | Annotated[list[TokenIds], Field(max_length=limits.MAX_TEXTS)]
)
Count = Annotated[int, Field(ge=0, le=limits.MAX_TOKENS)]
Choices = Annotated[int, Field(ge=1, le=limits.MAX_N)]
Temperature = Annotated[float, Field(ge=0, le=limits.MAX_TEMPERATURE)]
Share = Annotated[float, Field(ge=0, le=1)]
OpenShare = Annotated[float, Field(gt=0, le=1)]
Penalty = Annotated[float, Field(ge=-limits.MAX_PENALTY, le=limits.MAX_PENALTY)]
Repetition = Annotated[float, Field(gt=0, le=limits.MAX_PENALTY)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Alternatives = Annotated[int, Field(ge=0, le=limits.MAX_TOP_LOGPROBS)]
Priority = Annotated[int, Field(ge=-limits.MAX_PRIORITY, le=limits.MAX_PRIORITY)]
StopText = Annotated[str, Field(min_length=1, max_length=limits.MAX_STOP_CHARS)]
Stops = StopText | Annotated[list[StopText], Field(max_length=limits.MAX_STOP)]
StopIds = Annotated[list[TokenId], Field(max_length=limits.MAX_STOP_TOKEN_IDS)]
Biases = Annotated[
    dict[Annotated[str, Field(pattern="^(0|[1-9][0-9]*)$")], Bias], Field(max_length=limits.MAX_LOGIT_BIAS, json_schema_extra={"additionalProperties": False})
]
Name = Annotated[str, Field(min_length=1, max_length=limits.MAX_REQUEST_ID, pattern="^[ -~]+$")]


def doc(text: str) -> FieldInfo:
    """A field's text."""
    found: FieldInfo = Field(description=text)
    return found


def _one_of(one: str, other: str) -> JsonDict:
    """Exactly one of two fields is there and not null."""

    def only(name: str, absent: str) -> JsonDict:
        return {"required": [name], "properties": {name: {"not": {"type": "null"}}, absent: {"type": "null"}}}

    return {"oneOf": [only(one, other), only(other, one)]}


class StreamOptions(BaseModel):
    """Only with `stream: true`."""

    include_usage: Annotated[bool | None, doc("A last chunk with `usage` and no choices.")] = None
    continuous_usage_stats: Annotated[bool | None, doc("With include_usage: `usage` in every chunk.")] = None


class TextFormat(BaseModel):
    """The only format there is."""

    type: Literal["text"]


class Sampling(BaseModel):
    """What chat and text completions share. null is the default."""

    model: Annotated[str | None, doc("The served id; it, if left out.")] = None
    stream: Annotated[bool | None, doc("Answer with server-sent events that end with `data: [DONE]`.")] = None
    stream_options: Annotated[StreamOptions | None, doc("What a stream tells besides.")] = None
    n: Annotated[Choices | None, doc(f"Choices for each prompt; at most {limits.MAX_CHOICES} in all.")] = None
    best_of: Annotated[Choices | None, doc("Equal to n, or left out.")] = None
    max_tokens: Annotated[Count | None, doc("Tokens to generate at most; left out: as many as fit. 0 only for completions with echo.")] = None
    max_completion_tokens: Annotated[Count | None, doc("The newer name of max_tokens; it wins.")] = None
    min_tokens: Annotated[Count | None, doc("Nothing ends the output before this many tokens.")] = None
    temperature: Annotated[Temperature | None, doc("0 is greedy; 1 by default.")] = None
    top_p: Annotated[OpenShare | None, doc("Sample from the most likely ids with this total probability; 1 by default.")] = None
    top_k: Annotated[Annotated[int, Field(ge=-1, le=limits.MAX_TOKENS)] | None, doc("Sample from the k most likely ids; 0 and -1: from all.")] = None
    min_p: Annotated[Share | None, doc("Leave out ids less likely than this share of the most likely one.")] = None
    seed: Annotated[Seed | None, doc("The same seed gives the same output.")] = None
    stop: Annotated[Stops | None, doc("End before the first of these texts.")] = None
    stop_token_ids: Annotated[StopIds | None, doc("End at any of these ids.")] = None
    ignore_eos: Annotated[bool | None, doc("Go on after the end of sequence.")] = None
    skip_special_tokens: Annotated[bool | None, doc("Leave special tokens out of the text; true by default.")] = None
    spaces_between_special_tokens: Annotated[bool | None, doc("Taken for compatibility; the tokenizers there are put none.")] = None
    include_stop_str_in_output: Annotated[bool | None, doc("Keep the stop text that ended the output.")] = None
    no_stop_trim: Annotated[bool | None, doc("SGLang's name of the same.")] = None
    presence_penalty: Annotated[Penalty | None, doc("Taken off the logit of an id that the output has.")] = None
    frequency_penalty: Annotated[Penalty | None, doc("Taken off once for each time the output has it.")] = None
    repetition_penalty: Annotated[Repetition | None, doc("Divides the logit of an id that prompt or output has; 1 by default.")] = None
    logit_bias: Annotated[Biases | None, doc("Token id -> what is added to its logit.")] = None
    prompt_logprobs: Annotated[Alternatives | None, doc("Also the prompt's log-probabilities, with so many alternatives; not streamed.")] = None
    return_token_ids: Annotated[bool | None, doc("Show the ids of prompt and output.")] = None
    return_tokens_as_token_ids: Annotated[bool | None, doc("Logprobs call a token `token_id:ID`.")] = None
    add_special_tokens: Annotated[bool | None, doc("Whether the tokenizer adds special tokens; true for text, false for chats.")] = None
    priority: Annotated[Priority | None, doc("Smaller is more urgent; counts with `scheduler.policy: priority`.")] = None
    response_format: Annotated[TextFormat | None, doc("Text is the only format in this version.")] = None


class TextPart(BaseModel):
    """One part of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """`developer` means `system`. An assistant's content may be null."""

    role: Literal[ROLES]  # type: ignore[valid-type]
    content: str | Annotated[list[TextPart], Field(max_length=limits.MAX_PARTS)] | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None


class ChatCompletionRequest(Sampling):
    """POST /v1/chat/completions"""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=limits.MAX_MESSAGES, description="The conversation so far.")]
    logprobs: Annotated[bool | None, doc("Log-probabilities of the output's tokens.")] = None
    top_logprobs: Annotated[Alternatives | None, doc("And so many alternatives for each; needs logprobs.")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, doc("Variables for the chat template.")] = None
    add_generation_prompt: Annotated[bool | None, doc("Begin a new message of the assistant; true by default.")] = None
    continue_final_message: Annotated[bool | None, doc("Go on with the last message instead.")] = None
    echo: Annotated[bool | None, doc("Begin the answer with the message that is gone on with.")] = None


class CompletionRequest(Sampling):
    """POST /v1/completions"""

    prompt: Annotated[Prompts, doc("A text, token ids, or a list of either.")]
    echo: Annotated[bool | None, doc("Begin the text with the prompt.")] = None
    logprobs: Annotated[Alternatives | bool | None, doc("Log-probabilities with so many alternatives.")] = None


class EmbeddingRequest(BaseModel):
    """POST /v1/embeddings"""

    input: Annotated[Texts, doc("A text, token ids, or a list of either.")]
    model: Annotated[str | None, doc("The served id; it, if left out.")] = None
    encoding_format: Annotated[Literal["float", "base64"] | None, doc("base64: float32, little-endian.")] = None
    dimensions: Annotated[Annotated[int, Field(ge=1, le=limits.MAX_DIMENSIONS)] | None, doc("Keep the first so many numbers, and make the length 1 again.")] = (
        None
    )
    add_special_tokens: Annotated[bool | None, doc("Whether the tokenizer adds its special tokens; true by default.")] = None
    priority: Annotated[Priority | None, doc("Smaller is more urgent; counts with `scheduler.policy: priority`.")] = None


class NativeSampling(BaseModel):
    """SGLang's `sampling_params`. null is the default; an unknown field is refused."""

    model_config = ConfigDict(extra="forbid")

    max_new_tokens: Annotated[Count | None, doc("128 by default, or what fits; 0: nothing, for the prompt's log-probabilities.")] = None
    min_new_tokens: Annotated[Count | None, doc("Nothing ends the output before this many tokens.")] = None
    temperature: Temperature | None = None
    top_p: OpenShare | None = None
    top_k: Annotated[int, Field(ge=-1, le=limits.MAX_TOKENS)] | None = None
    min_p: Share | None = None
    sampling_seed: Seed | None = None
    n: Choices | None = None
    stop: Stops | None = None
    stop_token_ids: StopIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: Annotated[bool | None, doc("Taken for compatibility; the tokenizers there are put none.")] = None
    no_stop_trim: Annotated[bool | None, doc("Keep the stop text or stop token that ended the output.")] = None
    include_stop_str_in_output: Annotated[bool | None, doc("OpenAI-style servers' name of the same.")] = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None
    logit_bias: Biases | None = None


class GenerateRequest(BaseModel):
    """POST /generate: `text` or `input_ids`, one prompt or a list. What is a list has an entry for each prompt."""

    model_config = ConfigDict(json_schema_extra=_one_of("text", "input_ids"))

    text: Text | Annotated[list[Text], Field(min_length=1, max_length=limits.MAX_PROMPTS)] | None = None
    input_ids: TokenIds | Annotated[list[TokenIds], Field(min_length=1, max_length=limits.MAX_PROMPTS)] | None = None
    sampling_params: NativeSampling | list[NativeSampling] | None = None
    stream: Annotated[bool | None, doc("Events that each hold all there is so far.")] = None
    rid: Annotated[Name | list[Name] | None, doc("Names of the client's; one that runs already is 409.")] = None
    return_logprob: bool | list[bool | None] | None = None
    logprob_start_len: Annotated[
        Annotated[int, Field(ge=-1)] | list[Annotated[int, Field(ge=-1)] | None] | None, doc("First prompt position whose logprob is wanted; -1: none.")
    ] = None
    top_logprobs_num: Alternatives | list[Alternatives | None] | None = None
    return_text_in_logprobs: bool | None = None
    priority: Priority | None = None


class TokenizeRequest(BaseModel):
    """POST /v1/tokenize, /tokenize: `prompt` or `messages`."""

    model_config = ConfigDict(json_schema_extra=_one_of("prompt", "messages"))

    prompt: str | Annotated[list[str], Field(min_length=1, max_length=limits.MAX_PROMPTS)] | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=limits.MAX_MESSAGES)] | None = None
    model: str | None = None
    add_special_tokens: Annotated[bool | None, doc("true by default for a prompt, false for messages.")] = None
    return_token_strs: Annotated[bool | None, doc("Also each token's text.")] = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: Annotated[bool | None, doc("Without effect here.")] = None


class DetokenizeRequest(BaseModel):
    """POST /v1/detokenize, /detokenize"""

    tokens: list[TokenId] | Annotated[list[list[TokenId]], Field(max_length=limits.MAX_PROMPTS)]
    model: str | None = None
    skip_special_tokens: Annotated[bool | None, doc("false by default.")] = None


class FlushRequest(BaseModel):
    """POST /flush_cache"""

    timeout: Annotated[Annotated[float, Field(ge=0, le=86400)] | None, doc("Wait so many seconds for running requests; also in the query.")] = None


class AbortRequest(BaseModel):
    """POST /abort_request"""

    rid: Annotated[Annotated[str, Field(max_length=256)] | None, doc("Exactly one of the two: a request's own id, or the name that its client gave it.")] = None
    abort_all: bool | None = None


class ReloadRequest(BaseModel):
    """POST /update_weights_from_disk"""

    model_path: Annotated[str, Field(min_length=1, max_length=4096)]
    weight_version: Annotated[str, Field(max_length=128)] | None = None
    abort_all_requests: bool | None = None
