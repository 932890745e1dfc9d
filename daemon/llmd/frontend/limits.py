"""Bounds on what one request may ask for. Each is named in the error that it causes and in docs/http-api.md."""

from __future__ import annotations

from typing import Final

MAX_JSON_DEPTH: Final = 64
MAX_JSON_CONTAINERS: Final = 65_536
"""Lists and objects of one body."""
MAX_JSON_NAMES: Final = 65_536
"""Named values in the objects of one body."""
MAX_REQUEST_ID: Final = 128
MAX_N: Final = 128
"""Choices for one prompt."""
MAX_PROMPTS: Final = 256
MAX_TEXTS: Final = 2048
"""Texts of one request for vectors."""
MAX_CHOICES: Final = 256
"""Choices of one request, over all its prompts."""
MAX_MESSAGES: Final = 4096
MAX_PARTS: Final = 1024
"""Content parts of one message."""
MAX_STOP: Final = 16
MAX_STOP_CHARS: Final = 1024
MAX_STOP_TOKEN_IDS: Final = 64
MAX_TOP_LOGPROBS: Final = 20
MAX_LOGPROBS: Final = 2**19
"""Of one request: tokens times (alternatives + 1), of prompts and choices. As JSON that is some 50 MB, as objects less than 100 MB."""
MAX_TEMPERATURE: Final = 2.0
MAX_PENALTY: Final = 2.0
MAX_LOGIT_BIAS: Final = 1024
"""Ids in one `logit_bias`."""
MAX_TOKENS: Final = 2**31 - 1
"""Largest number that is taken for a count of tokens at all; the context is the real bound."""

INLINE_BODY: Final = 64 * 1024
"""Bytes of JSON up to which a body is parsed in the event loop."""
INLINE_TEXT: Final = 4096
"""Characters up to which a prompt is tokenized in the event loop."""
MAX_DIMENSIONS: Final = 1 << 20
"""Numbers of one vector that may be asked for; the model's own are the real bound."""
#: Priorities lie between minus this and this.
MAX_PRIORITY: Final = 1_000_000
