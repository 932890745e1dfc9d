"""Microseconds a token in the detokenizer's hot path: `python -m tests.bench.bench_detokenizer [SMALL_DIR]`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from llmd.detokenizer.detokenizer import Detokenizer
from llmd.observability.totals import Meter
from llmd.tokenizer.token_bytes import TokenBytes
from llmd.wire.codec import Decoder, encode
from llmd.wire.messages import BatchTokenIDOutput, DetokenizeParams, DetokenizerInput, TokenChunk, TokenLogprob
from tests.unit.tokenizer import samples

REQUESTS, STEPS = 64, 500


def measure(table: TokenBytes, stop: tuple[str, ...], logprobs: bool) -> float:
    """Decode, detokenize and encode STEPS batches of one token for each of REQUESTS requests; microseconds a token."""
    frames = []
    for step in range(STEPS):
        chunks = []
        for n in range(REQUESTS):
            id = (step * 31 + n * 7) % table.size
            entries = [TokenLogprob(id, -1.0, ((id, -1.0), (1, -2.0)))] if logprobs else None
            start = DetokenizeParams(stop=stop) if step == 0 else None
            chunks.append(TokenChunk(f"request-{n}", 0, step, [id], logprobs=entries, start=start))
        frames.append(encode(BatchTokenIDOutput(epoch=1, chunks=chunks)))
    core = Detokenizer(table, epoch=1, frontends=1, meter=Meter())
    decoder: Decoder[BatchTokenIDOutput] = Decoder(DetokenizerInput)
    begin = time.perf_counter()
    for frame in frames:
        core.take(decoder.decode(frame))
        for _, message in core.drain():
            encode(message)
    return (time.perf_counter() - begin) / (REQUESTS * STEPS) * 1e6


def main() -> None:
    table = TokenBytes.load(Path(sys.argv[1])) if len(sys.argv) > 1 else TokenBytes.from_json(samples.byte_level())
    for name, stop, logprobs in (("plain", (), False), ("four stop strings", ("\n\n", "</s>", "User:", "never seen"), False), ("logprobs", (), True)):
        print(f"{name:<20} {measure(table, stop, logprobs):6.2f} us/token")


if __name__ == "__main__":
    main()
