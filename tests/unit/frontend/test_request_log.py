"""What the request log keeps of a request, and that nothing it cannot show ends it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from llmd.config.server_args import RequestLogArgs
from llmd.frontend.exchange import Exchange
from llmd.frontend.req_state import Generation
from llmd.frontend.request_log import MAX_TEXT, RequestLog
from llmd.wire.messages import SamplingParams, TokenizedGenerateReqInput


class Decoder:
    """Each id is a CJK character; 9 cannot be shown."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        if 9 in ids:
            raise ValueError("no such token")
        return "".join(chr(0x4E00 + id) for id in ids)


def generation(ids: list[int], output: list[int]) -> Generation:
    made = Generation("cmpl-1", streamed=False)
    state = made.add(TokenizedGenerateReqInput(rid="cmpl-1", frontend=0, epoch=1, input_ids=ids, sampling=SamplingParams(max_new_tokens=4)))
    state.output_ids += output
    return made


def test_texts_are_cut_at_a_character_and_faults_are_shown(tmp_path: Path) -> None:
    log = RequestLog(str(tmp_path), RequestLogArgs(enabled=True))
    decoder: Any = Decoder()
    log.write(Exchange(), generation([1, 2] * MAX_TEXT, [3]), decoder)
    log.write(Exchange(), generation([9], []), decoder)
    log.close()
    cut, odd = (json.loads(line) for line in (tmp_path / "requests.jsonl").read_text(encoding="utf-8").splitlines())
    assert len(cut["prompts"][0]) == MAX_TEXT and cut["outputs"] == ["\u4e03"] and cut["prompt_tokens"] == [2 * MAX_TEXT]
    assert "ValueError" in odd["prompts"][0]


def test_off_it_writes_nothing_and_a_loose_mode_is_tightened(tmp_path: Path) -> None:
    decoder: Any = Decoder()
    log = RequestLog(str(tmp_path), RequestLogArgs())
    log.write(Exchange(), generation([1], [2]), decoder)
    assert list(tmp_path.iterdir()) == []
    path = tmp_path / "requests.jsonl"
    path.touch(mode=0o644)
    log.configure(RequestLogArgs(enabled=True))
    log.write(Exchange(), generation([1], [2]), decoder)
    log.configure(RequestLogArgs())
    deadline = time.monotonic() + 20
    while not path.read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert path.stat().st_mode & 0o777 == 0o600
