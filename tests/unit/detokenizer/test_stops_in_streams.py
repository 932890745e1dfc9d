"""What a frontend has of a request with stop strings at its end, against an oracle, whatever became of processes and messages meanwhile."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from llmd.detokenizer.detokenizer import Detokenizer
from llmd.observability.totals import Meter
from llmd.tokenizer.token_bytes import TokenBytes
from llmd.wire.messages import BatchStrOutput, BatchTokenIDOutput, DetokenizeParams, Finish, TextChunk, TokenChunk, TokenLogprob
from tests.unit.tokenizer import samples

TABLE = TokenBytes.from_json(samples.byte_level())
#: Letters, a special token that is not shown, the halves of a character, and a token of six characters.
IDS = [*b"abab", TABLE.size - 2, *"é".encode(), 256]
STOPS = st.lists(st.text("abé", min_size=1, max_size=6) | st.sampled_from(["a hell", "lo", "ob"]), min_size=1, max_size=4)


class Client:
    """A frontend's side of one request: takes what is new of each chunk, as `Flights` does."""

    def __init__(self) -> None:
        self.text, self.ids, self.logprobs = "", list[int](), list[int]()
        self.finish: Finish | None = None

    def take(self, chunk: TextChunk) -> None:
        assert self.finish is None, "nothing comes behind the finish"
        known = len(self.ids) - chunk.first
        assert known >= 0 and len(self.text) >= chunk.at
        new = chunk.token_ids[known:]
        self.text += chunk.text[len(self.text) - chunk.at :]
        self.ids += new
        if new:
            self.logprobs += [entry.token_id for entry in (chunk.logprobs or [])[-len(new) :]]
        self.finish = chunk.finish


class Engine:
    """Schedulers and detokenizers of one request that makes `ids`, and may be lost between any two messages."""

    def __init__(self, ids: list[int], params: DetokenizeParams) -> None:
        self.ids, self.params, self.client = ids, params, Client()
        self.epoch, self.sent, self.kept = 0, 0, 0
        self.lose("engine")

    def lose(self, what: str) -> None:
        """`engine`: both, and the new ones go on from what the client has. `detokenizer`: the scheduler sends all of its output again."""
        if what == "engine":
            self.epoch += 1
            self.kept = self.sent = len(self.client.ids)
        self.core = Detokenizer(TABLE, epoch=self.epoch, frontends=1, meter=Meter())
        self.fresh = True

    def step(self, tokens: int) -> None:
        """One message with the next `tokens`, the end of the request with the last."""
        first, self.sent = 0 if self.fresh else self.sent, min(len(self.ids), self.sent + tokens)
        ids = self.ids[first : self.sent]
        logprobs = [TokenLogprob(id, -1.0) for id in self.ids[max(first, self.kept) : self.sent]]
        finish = Finish("length") if self.sent == len(self.ids) else None
        chunk = TokenChunk("a", 0, first, ids, finish, logprobs or None, self.params if self.fresh else None)
        self.fresh = False
        self.core.take(BatchTokenIDOutput(epoch=self.epoch, chunks=[chunk]))
        for _, message in self.core.drain():
            assert isinstance(message, BatchStrOutput)
            for text in message.chunks:
                self.client.take(text)


def expected(ids: list[int], params: DetokenizeParams) -> tuple[str, list[int], Finish]:
    """The answer, by the text as a whole and by each place in it."""
    decoder, text, ends = TABLE.decoder(skip_special_tokens=params.skip_special_tokens), "", [0]
    for id in ids:
        text += decoder.feed([id])
        ends.append(len(text))
    text += decoder.flush()
    ends[-1] = len(text)
    found = []
    for stop in params.stop:
        for at in range(len(text)):
            count = next(count for count, end in enumerate(ends) if end >= min(len(text), at + len(stop)))
            if text.startswith(stop, at) and count > params.min_tokens:
                found.append((at, len(stop), stop, count))
    if not found:
        return text, ids, Finish("length")
    at, size, stop, count = min(found)
    return text[: at + size if params.include_stop else at], ids[:count], Finish("stop", stop)


@settings(max_examples=600)
@given(
    st.lists(st.sampled_from(IDS), min_size=1, max_size=24),
    STOPS,
    st.integers(0, 5),
    st.booleans(),
    st.lists(st.integers(1, 4) | st.sampled_from(["engine", "detokenizer"]), max_size=12),
)
def test_the_answer_does_not_depend_on_messages_nor_on_processes_that_die(
    ids: list[int], stops: list[str], least: int, include_stop: bool, events: list[int | str]
) -> None:
    params = DetokenizeParams(stop=tuple(stops), min_tokens=least, include_stop=include_stop)
    engine = Engine(ids, params)
    for event in [*events, len(ids)]:
        if engine.client.finish is not None:
            break
        if isinstance(event, str):
            engine.lose(event)
        else:
            engine.step(event)
    client = engine.client
    assert (client.text, client.ids, client.finish) == expected(ids, params)
    assert client.logprobs == client.ids
