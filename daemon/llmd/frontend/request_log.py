"""`RequestLog`: DIR/requests.jsonl, prompts and outputs of what was generated, for whoever turns it on. The one file that holds them; mode 0600, bounded.

Texts are made from the token ids, in the file's own thread, and cut at a character. Off, it costs one look at a flag a request.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any, Final

from llmd.config.server_args import RequestLogArgs
from llmd.frontend.exchange import Exchange
from llmd.frontend.line_file import MAX_BYTES, LineFile
from llmd.frontend.req_state import Generation
from llmd.observability.lines import timestamp
from llmd.tokenizer.load import Tokenizer

log = logging.getLogger(__name__)

#: Characters of a prompt and of an output that are kept, and tokens that are looked at for them.
MAX_TEXT: Final = 16 * 1024
MAX_TOKENS: Final = 16 * 1024


class RequestLog:
    """One frontend's. `log_dir`: where it is unless configured elsewhere."""

    def __init__(self, log_dir: str, args: RequestLogArgs, max_bytes: int = MAX_BYTES) -> None:
        self._log_dir = log_dir
        self._max_bytes = max_bytes
        self._file: LineFile | None = None
        self._path: Path | None = None
        self.configure(args)

    def configure(self, args: RequestLogArgs) -> None:
        """Turn it on or off, or to another place. A WARNING says that it is on."""
        path = Path(args.dir or self._log_dir) / "requests.jsonl" if args.enabled else None
        if path == self._path:
            return
        self.close()
        self._path = path
        if path is not None:
            log.warning("the request log is on: prompts and outputs are written to %s", path)
            self._file = LineFile(path, "request log", mode=0o600, max_bytes=self._max_bytes)
            self._file.start()
        else:
            log.info("the request log is off")

    def close(self) -> None:
        """Write what is waiting, for at most a second."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def write(self, exchange: Exchange, generation: Generation, tokenizer: Tokenizer) -> None:
        """Note one request that is over."""
        if self._file is None:
            return
        prompts = [choice.request.input_ids[:MAX_TOKENS] for choice in generation.choices]
        outputs = [choice.output_ids[:MAX_TOKENS] for choice in generation.choices]
        facts: dict[str, Any] = {
            "ts": timestamp(time.time()),
            "request_id": exchange.request_id or None,
            "rid": generation.rid,
            "key": exchange.key or None,
            "endpoint": exchange.endpoint,
            "outcome": exchange.outcome,
            "duration_s": round(time.monotonic() - exchange.started, 4),
            "prompt_tokens": [len(choice.request.input_ids) for choice in generation.choices],
            "completion_tokens": [len(choice.output_ids) for choice in generation.choices],
        }
        self._file.put(lambda: _line(facts, prompts, outputs, tokenizer))


def _line(facts: dict[str, Any], prompts: list[list[int]], outputs: list[list[int]], tokenizer: Tokenizer) -> str:
    def text(ids: list[int]) -> str:
        try:
            return tokenizer.decode(ids, skip_special_tokens=False)[:MAX_TEXT]
        except Exception as error:  # a text that cannot be shown must not end the thread that shows the others
            return f"<not decoded: {type(error).__name__}>"

    once = prompts[:1] if all(prompt == prompts[0] for prompt in prompts) else prompts
    return json.dumps({**facts, "prompts": [text(ids) for ids in once], "outputs": [text(ids) for ids in outputs]}, ensure_ascii=False)
