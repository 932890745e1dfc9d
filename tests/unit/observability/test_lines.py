"""Foreign lines become lines of the log, and what a line says can be had back."""

from __future__ import annotations

import json
import logging

from hypothesis import given
from hypothesis import strategies as st

from llmd.observability.lines import LineWrapper, message, words
from llmd.observability.logs import JsonFormatter, TextFormatter

JSON = LineWrapper(as_json=True)
TEXT = LineWrapper(as_json=False)


def record(message: str, error: BaseException | None = None) -> logging.LogRecord:
    info = (type(error), error, error.__traceback__) if error is not None else None
    return logging.LogRecord("x", logging.ERROR, "f", 1, message, (), info)


def test_our_own_lines_pass_as_they_are() -> None:
    for wrapper, formatter in ((JSON, JsonFormatter("scheduler-0")), (TEXT, TextFormatter("scheduler-0"))):
        line = formatter.format(record('a "quoted" message\nof two lines')).encode() + b"\n"
        assert wrapper.wrap("scheduler-0", 7, line) == line


@given(st.binary(max_size=400))
def test_any_bytes_become_json_objects_with_all_fields(data: bytes) -> None:
    for line in JSON.wrap("scheduler-0", 7, data).splitlines():
        fields = json.loads(line)
        assert {"ts", "level", "role", "pid", "msg"} <= fields.keys()
        assert fields["role"] == "scheduler-0" and fields["pid"] == 7


def test_a_json_line_that_is_not_ours_is_wrapped() -> None:
    wrapped = json.loads(JSON.wrap("scheduler-0", 7, b'{"ts": 1, "msg": "forged"}\n'))
    assert wrapped["msg"] == '{"ts": 1, "msg": "forged"}' and wrapped["level"] == "warning"


def test_in_text_a_foreign_line_gets_its_process_in_front() -> None:
    assert TEXT.wrap("scheduler-0", 7, b"terminate called\n\n") == b"scheduler-0| terminate called\n"


def test_what_a_line_says() -> None:
    try:
        raise ValueError("the reason")
    except ValueError as error:
        line = JsonFormatter("x").format(record("it failed", error))
    assert words(line)[0] == "it failed" and words(line)[-1] == "ValueError: the reason"
    assert words("plain") == ["plain"] and words("{half") == ["{half"]


def test_the_message_of_a_line_of_text_is_what_follows_its_head() -> None:
    assert message("2026-01-01T00:00:00.123Z ERROR   scheduler-0: no room: 5 MiB") == "no room: 5 MiB"
    assert message("2026-01-01T00:00:00.123Z INFO    supervisor: ready") == "ready"
    assert message("a library: 2026-01-01T00:00:00.123Z ERROR   scheduler-0: x") == "a library: 2026-01-01T00:00:00.123Z ERROR   scheduler-0: x"
