"""Requests of many frontends and epochs: text, ids, logprobs and finish of each, and what becomes of unknown ones."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmd.detokenizer import detokenizer as module
from llmd.detokenizer.detokenizer import Detokenizer
from llmd.observability.totals import Meter
from llmd.tokenizer.token_bytes import TokenBytes
from llmd.wire.messages import AbortReq, BatchStrOutput, BatchTokenIDOutput, DetokenizeParams, Detokenizer404, Finish, TextChunk, TokenChunk, TokenLogprob
from tests.unit.tokenizer import samples

TABLE = TokenBytes.from_json(samples.byte_level())
EOS = TABLE.size - 2
LENGTH = Finish("length")


class Feed:
    """A scheduler's side of one Detokenizer: knows the index of each request's next token."""

    def __init__(self, epoch: int = 1, frontends: int = 2) -> None:
        self.meter = Meter()
        self.core = Detokenizer(TABLE, epoch=epoch, frontends=frontends, meter=self.meter)
        self.epoch = epoch
        self.next: dict[str, int] = {}

    def chunk(
        self,
        rid: str,
        ids: list[int] | bytes,
        *,
        stop: tuple[str, ...] = (),
        skip: bool = True,
        include_stop: bool = False,
        frontend: int = 0,
        least: int = 0,
        **more: Any,
    ) -> TokenChunk:
        first = self.next.get(rid)
        start = DetokenizeParams(stop=stop, skip_special_tokens=skip, include_stop=include_stop, min_tokens=least) if first is None else None
        self.next[rid] = (first or 0) + len(ids)
        return TokenChunk(rid, frontend, first or 0, list(ids), start=start, **more)

    def send(self, *chunks: TokenChunk) -> list[tuple[int, Any]]:
        self.core.take(BatchTokenIDOutput(epoch=self.epoch, chunks=list(chunks)))
        return self.core.drain()

    def one(self, rid: str, ids: list[int] | bytes, **more: Any) -> TextChunk | None:
        messages = self.send(self.chunk(rid, ids, **more))
        if not messages:
            return None
        ((_, batch),) = messages
        (chunk,) = batch.chunks
        return chunk  # type: ignore[no-any-return]


def test_a_chunk_carries_all_ids_since_the_last_one() -> None:
    feed = Feed()
    assert feed.one("a", b"\xf0") is None
    assert feed.one("a", b"\x9f\x98") is None
    assert feed.one("a", b"\x80") == TextChunk("a", 0, "\U0001f600", [0xF0, 0x9F, 0x98, 0x80])
    assert feed.one("a", b"x", finish=LENGTH) == TextChunk("a", 4, "x", [120], LENGTH, at=1)
    assert len(feed.core) == 0


def test_leftover_bytes_and_held_text_come_out_at_the_finish() -> None:
    feed = Feed()
    assert feed.one("a", b"\xe6\x97") is None
    assert feed.one("a", b"", finish=LENGTH) == TextChunk("a", 0, "\ufffd", [0xE6, 0x97], LENGTH)
    assert feed.one("b", b"xen", stop=("end",)) == TextChunk("b", 0, "x", [120, 101, 110])
    assert feed.one("b", b"", finish=Finish("abort")) == TextChunk("b", 3, "en", [], Finish("abort"), at=1)


def test_what_stopped_a_request_ends_its_text_where_that_is_asked_for() -> None:
    feed = Feed()
    wish: dict[str, Any] = {"stop": ("<stop>",), "include_stop": True}
    assert feed.one("a", b"one <st", **wish) == TextChunk("a", 0, "one ", list(b"one <st"))
    assert feed.one("a", b"op> two") == TextChunk("a", 7, "<stop>", list(b"op>"), Finish("stop", "<stop>"), at=4)
    assert feed.one("b", b"x<stop", **wish) == TextChunk("b", 0, "x", list(b"x<stop"))
    assert feed.one("b", b">", finish=LENGTH) == TextChunk("b", 6, "<stop>", [62], Finish("stop", "<stop>"), at=1)
    assert feed.one("c", [65, 66], finish=Finish("stop", 66), include_stop=True) == TextChunk("c", 0, "AB", [65, 66], Finish("stop", 66))
    assert feed.one("d", [65, 66], finish=Finish("stop", 66)) == TextChunk("d", 0, "A", [65, 66], Finish("stop", 66))


def test_stop_string_across_chunks_ends_the_request() -> None:
    feed = Feed()
    assert feed.one("a", b"one <st", stop=("<stop>",)) == TextChunk("a", 0, "one ", list(b"one <st"))
    assert feed.one("a", b"op> two") == TextChunk("a", 7, "", list(b"op>"), Finish("stop", "<stop>"), at=4)
    assert len(feed.core) == 0
    assert feed.one("a", b" three") is None
    assert feed.one("a", b" four", finish=LENGTH) is None


def test_stop_on_the_last_allowed_token_beats_length() -> None:
    feed = Feed()
    chunk = feed.one("a", b"xyz", stop=("yz",), finish=LENGTH)
    assert chunk == TextChunk("a", 0, "x", [120, 121, 122], Finish("stop", "yz"))
    chunk = feed.one("b", b"xbc", stop=("c", "bcd"), finish=LENGTH)
    assert chunk == TextChunk("b", 0, "xb", [120, 98, 99], Finish("stop", "c"))


def test_tokens_behind_a_complete_stop_wait_for_what_starts_before_it() -> None:
    feed = Feed()
    stop = ("a", "XaYZXaYZ!", "YZXaYZ?")
    assert feed.one("a", b"-XaY", stop=stop) == TextChunk("a", 0, "-", list(b"-Xa"))
    assert feed.one("a", b"ZXaYZ") is None
    assert feed.one("a", b".Z") == TextChunk("a", 3, "X", [], Finish("stop", "a"), at=1)
    assert len(feed.core) == 0
    assert feed.one("b", b"-XaYZ", stop=stop) == TextChunk("b", 0, "-", list(b"-Xa"))
    assert feed.one("b", b"XaYZ!..") == TextChunk("b", 3, "", list(b"YZXaYZ!"), Finish("stop", stop[1]), at=1)
    assert feed.one("c", b"-XaYZ", stop=stop, finish=LENGTH) == TextChunk("c", 0, "-X", list(b"-Xa"), Finish("stop", "a"))
    assert feed.one("d", [*b"-XaYZ", EOS], stop=stop, finish=Finish("stop", EOS)) == TextChunk("d", 0, "-X", list(b"-Xa"), Finish("stop", "a"))


def test_logprobs_wait_with_their_tokens() -> None:
    feed = Feed()
    entries = [TokenLogprob(byte, -1.0) for byte in b"-XaYZ"]
    chunk = feed.one("a", b"-XaYZ", stop=("a", "XaYZ!"), logprobs=entries)
    assert chunk is not None and [entry.token_id for entry in chunk.logprobs or ()] == list(b"-Xa")
    chunk = feed.one("a", b"!.", logprobs=[TokenLogprob(byte, -1.0) for byte in b"!."])
    assert chunk is not None and [entry.token_id for entry in chunk.logprobs or ()] == chunk.token_ids == list(b"YZ!")


def test_no_stop_string_ends_a_request_before_it_has_its_least_tokens() -> None:
    feed = Feed()
    assert feed.one("a", b"aba", stop=("b", "ab!"), least=3) == TextChunk("a", 0, "ab", list(b"aba"))
    assert feed.one("a", b"cbd") == TextChunk("a", 3, "ac", list(b"cb"), Finish("stop", "b"), at=2)
    assert feed.one("b", b"ab", stop=("ab",), least=2, finish=LENGTH) == TextChunk("b", 0, "ab", list(b"ab"), LENGTH)
    assert feed.one("c", b"ab", stop=("bc",), least=2) == TextChunk("c", 0, "a", list(b"ab"))
    assert feed.one("c", b"c") == TextChunk("c", 2, "", [99], Finish("stop", "bc"), at=1)


def test_stop_token_is_no_part_of_the_text() -> None:
    feed = Feed()
    assert feed.one("a", [97, EOS], skip=False, finish=Finish("stop", EOS)) == TextChunk("a", 0, "a", [97, EOS], Finish("stop", EOS))
    assert feed.one("b", [97, 46], finish=Finish("stop", 46)) == TextChunk("b", 0, "a", [97, 46], Finish("stop", 46))
    assert feed.one("c", [97, EOS, 98], skip=False, finish=LENGTH) == TextChunk("c", 0, "a<|end|>b", [97, EOS, 98], LENGTH)


def test_logprobs_get_raw_bytes_one_entry_a_token() -> None:
    feed = Feed()
    prompt = [TokenLogprob(97, None), TokenLogprob(EOS, -1.0)]
    entries = [TokenLogprob(0xF0, -0.5, ((0xF0, -0.5), (256, -2.0))), TokenLogprob(0x9F, -0.25)]
    assert feed.one("a", b"\xf0\x9f", logprobs=entries, prompt_logprobs=prompt, cached_tokens=16) is None
    chunk = feed.one("a", b"\x98\x80", logprobs=[TokenLogprob(0x98, -1.0), TokenLogprob(0x80, -2.0)])
    assert chunk is not None and chunk.logprobs is not None and chunk.prompt_logprobs is not None
    assert [entry.data for entry in chunk.logprobs] == [b"\xf0", b"\x9f", b"\x98", b"\x80"]
    assert chunk.logprobs[0].top_data == (b"\xf0", b" hello")
    assert [entry.data for entry in chunk.prompt_logprobs] == [b"a", b"<|end|>"]
    assert chunk.cached_tokens == 16


def test_logprobs_end_with_the_token_that_completed_the_stop() -> None:
    feed = Feed()
    entries = [TokenLogprob(byte, -1.0) for byte in b"axyb"]
    chunk = feed.one("a", b"axyb", stop=("xy",), logprobs=entries)
    assert chunk is not None and chunk.logprobs is not None
    assert [entry.token_id for entry in chunk.logprobs] == chunk.token_ids == list(b"axy")


def test_one_batch_for_each_frontend_a_step() -> None:
    feed = Feed()
    messages = feed.send(feed.chunk("a", b"a"), feed.chunk("b", b"b", frontend=1), feed.chunk("c", b"c"))
    assert [(frontend, [chunk.rid for chunk in batch.chunks]) for frontend, batch in messages] == [(0, ["a", "c"]), (1, ["b"])]


def test_unknown_request_is_reported_to_its_frontend() -> None:
    feed = Feed()
    chunk = TokenChunk("lost", 1, 5, [97])
    assert feed.send(chunk) == [(1, Detokenizer404(rid="lost", epoch=1))]
    assert feed.send(TokenChunk("lost", 7, 5, [97])) == []
    assert len(feed.core) == 0


def test_known_tokens_are_skipped_and_missing_ones_are_reported() -> None:
    feed = Feed()
    feed.one("a", b"ab")
    assert feed.send(TokenChunk("a", 0, 1, list(b"bc")))[0][1].chunks == [TextChunk("a", 2, "c", [99], at=2)]
    assert feed.send(TokenChunk("a", 0, 9, [97])) == [(0, Detokenizer404(rid="a", epoch=1))]
    assert len(feed.core) == 0


def test_output_that_is_sent_again_gives_the_text_it_would_have_given() -> None:
    feed = Feed()
    assert feed.one("a", b"one <st", stop=("<stop>",)) == TextChunk("a", 0, "one ", list(b"one <st"))
    other = Feed()
    again = TokenChunk("a", 0, 0, list(b"one <sto"), start=DetokenizeParams(stop=("<stop>",)), logprobs=[TokenLogprob(111, -1.0)])
    (chunk,) = other.send(again)[0][1].chunks
    assert chunk == TextChunk("a", 0, "one ", list(b"one <sto"), logprobs=[TokenLogprob(111, -1.0, (), b"o")])
    assert other.send(TokenChunk("a", 0, 8, list(b"ry")))[0][1].chunks == [TextChunk("a", 8, "<story", list(b"ry"), at=4)]
    assert other.send(again, TokenChunk("a", 0, 8, list(b"p>")))[0][1].chunks[-1] == TextChunk("a", 8, "", list(b"p>"), Finish("stop", "<stop>"), at=4)


def test_logprobs_of_output_that_is_sent_again_belong_to_its_last_tokens() -> None:
    feed = Feed()
    chunk = TokenChunk("a", 0, 0, list(b"wxyz"), logprobs=[TokenLogprob(121, -1.0), TokenLogprob(122, -2.0)], start=DetokenizeParams(stop=("z",)))
    (text,) = feed.send(chunk)[0][1].chunks
    assert (text.text, text.token_ids, text.finish) == ("wxy", list(b"wxyz"), Finish("stop", "z"))
    assert [entry.token_id for entry in text.logprobs] == [121, 122]
    chunk = TokenChunk("b", 0, 0, list(b"wxyz"), logprobs=[TokenLogprob(122, -2.0)], start=DetokenizeParams(stop=("y",)))
    (text,) = feed.send(chunk)[0][1].chunks
    assert text.token_ids == list(b"wxy") and not text.logprobs


def test_abort_forgets_the_request() -> None:
    feed = Feed()
    feed.one("a", b"\xe6")
    feed.core.take(AbortReq(rid="a", epoch=1))
    feed.core.take(AbortReq(rid="never", epoch=1))
    assert len(feed.core) == 0
    assert feed.core.drain() == []


def test_newer_epoch_ends_the_older_and_older_messages_are_counted() -> None:
    feed = Feed(epoch=3)
    feed.core.take(BatchTokenIDOutput(epoch=3, chunks=[feed.chunk("a", b"a")]))
    feed.core.take(BatchTokenIDOutput(epoch=4, chunks=[TokenChunk("b", 0, 0, [98], start=DetokenizeParams())]))
    feed.core.take(BatchTokenIDOutput(epoch=3, chunks=[TokenChunk("a", 0, 1, [97])]))
    assert feed.core.drain() == [(0, BatchStrOutput(epoch=4, chunks=[TextChunk("b", 0, "b", [98])]))]
    assert len(feed.core) == 1
    assert feed.meter.snapshot().counters == {'llmd_wire_stale_messages_total{channel="detokenizer"}': 1}


def test_ended_requests_are_remembered_in_bounded_number_and_live_ones_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ENDED", 16)
    feed = Feed()
    live = [f"live{n}" for n in range(600)]
    feed.send(*(feed.chunk(rid, b"a", stop=("!",)) for rid in live))
    feed.send(*(feed.chunk(f"short{n}", b"x!", stop=("!",)) for n in range(600)))
    assert len(feed.core) == 600
    assert len(feed.core._ended) == 16
    messages = feed.send(*(feed.chunk(rid, b"b!") for rid in live))
    assert {chunk.text for chunk in messages[0][1].chunks} == {"b"}
    assert len(feed.core) == 0


def test_forgotten_frontend_learns_it_with_the_next_chunk() -> None:
    feed = Feed()
    feed.send(feed.chunk("a", b"a"), feed.chunk("b", b"b", frontend=1))
    feed.core.forget(0)
    assert feed.send(feed.chunk("a", b"a"), feed.chunk("b", b"b", frontend=1)) == [
        (1, BatchStrOutput(epoch=1, chunks=[TextChunk("b", 1, "b", [98], at=1)])),
        (0, Detokenizer404(rid="a", epoch=1)),
    ]


@settings(max_examples=300)
@given(
    st.lists(st.lists(st.integers(0, TABLE.size - 1), max_size=4), min_size=1, max_size=12),
    st.lists(st.text("a\ufffd日", min_size=1, max_size=3), max_size=2),
    st.booleans(),
)
def test_joined_stream_is_the_full_decode_up_to_the_first_stop(chunks: list[list[int]], stops: list[str], skip: bool) -> None:
    feed = Feed()
    out: list[TextChunk] = []
    for at, ids in enumerate(chunks):
        chunk = feed.one("a", ids, stop=tuple(stops), skip=skip, finish=LENGTH if at == len(chunks) - 1 else None)
        out += [chunk] if chunk else []
    decoder = TABLE.decoder(skip_special_tokens=skip)
    full = decoder.feed([id for ids in chunks for id in ids]) + decoder.flush()
    cut = min((full.find(stop) for stop in stops if stop in full), default=len(full))
    assert "".join(chunk.text for chunk in out) == full[:cut]
    assert [chunk.finish is not None for chunk in out] == [False] * (len(out) - 1) + [True]
    assert all(chunk.text for chunk in out[:-1])
    assert [chunk.first for chunk in out] == [sum(len(c.token_ids) for c in out[:at]) for at in range(len(out))]
    assert len(feed.core) == 0


def test_much_output_is_taken_in_by_pieces_and_sent_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WEIGHT", 500)
    feed, sent = Feed(), list[TextChunk]()

    def pause() -> None:
        for _, batch in feed.core.drain():
            assert isinstance(batch, BatchStrOutput)
            sent.extend(batch.chunks)

    feed.core._pause = pause
    ids = [97 + i % 26 for i in range(3000)]
    logprobs = [TokenLogprob(id, -float(i), ((id, -1.0),)) for i, id in enumerate(ids)][100:]
    prompt = [TokenLogprob(1, None)]
    rest: list[tuple[int, Any]] = feed.send(feed.chunk("a", ids, logprobs=logprobs, prompt_logprobs=prompt, finish=LENGTH))
    assert len(sent) >= 5
    chunks = sent + [chunk for _, batch in rest for chunk in batch.chunks]
    assert "".join(c.text for c in chunks) == bytes(ids).decode()
    assert [id for c in chunks for id in c.token_ids] == ids
    assert [e.logprob for c in chunks for e in c.logprobs or ()] == [-float(i) for i in range(100, 3000)]
    assert [len(c.prompt_logprobs or ()) for c in chunks if c.prompt_logprobs] == [1]
    assert [c.finish for c in chunks] == [None] * (len(chunks) - 1) + [LENGTH]
    assert len(feed.core) == 0


def test_a_stop_string_in_a_piece_ends_the_pieces_behind_it() -> None:
    feed = Feed()
    ((_, batch),) = feed.send(feed.chunk("a", b"x" * 300 + b"END" + b"y" * 900, stop=("END",), finish=LENGTH))
    assert "".join(c.text for c in batch.chunks) == "x" * 300
    assert batch.chunks[-1].finish == Finish("stop", "END")
    assert feed.core.drain() == []


def test_an_epoch_that_nobody_has_is_left_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("llmd.detokenizer.detokenizer.time.monotonic", lambda: now)
    feed = Feed(epoch=3)
    assert feed.one("a", b"x") is not None
    feed.epoch = 999
    feed.core.take(BatchTokenIDOutput(epoch=999, chunks=[]))
    feed.epoch = 3
    assert feed.one("a", b"x") is None
    now = 100.5
    assert feed.one("b", b"x") is None
    now = 101.5
    assert feed.send(feed.chunk("b", b"x")) == [(0, Detokenizer404(rid="b", epoch=3))]
    assert feed.one("c", b"x") is not None
