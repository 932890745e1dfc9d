"""Slices that threads take each for itself: the same bits as one thread's, whatever is in a step; and when it is done."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmd.kernels import llama
from llmd.kernels.program import KV_TYPES, KernelError, Program
from llmd.kernels.steps import EMBED_ROW, LOGIT_ROW, Steps, step_of
from llmd.model.batch import EmbedRequest, SampleRequest, SampleResult
from llmd.model.native_loader import NativeModel
from llmd.wire.messages import SamplingParams
from tests.models import boot_for, random_llama
from tests.programs import ProgramStepper, load
from tests.unit.kernels.native import isas, using
from tests.unit.model.test_forward import VARIANTS, tokens

pytestmark = pytest.mark.skipif(not isas(), reason="the native kernels are not built")


@pytest.fixture(params=isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set of this CPU in turn."""
    with using(request.param):
        yield request.param


def stepper(model: NativeModel, threads: int, **options: Any) -> ProgramStepper:
    return ProgramStepper(model, threads=threads, context=1024, **options)


def rows_apart(native: ProgramStepper, new: dict[int, list[int]], *, wanted: int = 1, embeds: int = 0) -> int:
    """Of a step that appends `new`; it is not run."""
    before = native.lengths.copy()
    rows, sums = np.zeros(wanted, dtype=LOGIT_ROW), np.zeros(embeds, dtype=EMBED_ROW)
    batch = native.batch(new)
    native.lengths[:] = before
    return native.program.rows_apart(step_of(batch, rows, sums))


#: Steps one after the other: prompts, chunks of them that begin and end within tiles and slices, tokens that are decoded beside them.
STEPS: list[dict[int, list[int]]] = [
    {1: tokens(201)},
    {2: tokens(77, 1), 1: [5], 3: tokens(215, 2), 4: tokens(3, 3)},
    {1: [7], 2: tokens(390, 4), 4: [9]},
    {3: tokens(301, 5), 2: [2], 1: tokens(30, 6), 5: tokens(100, 7)},
    {1: [1], 2: [2], 3: [3], 4: [4], 5: [5]},
]


def all_steps(native: ProgramStepper) -> tuple[list[dict[int, SampleResult]], bytes]:
    """What comes of STEPS, and what the cache holds then."""
    results = [native.step(new, logprobs=3) for new in STEPS]
    return results, native.program.cache.tobytes()


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("page_size", [1, 16])
def test_the_bits_are_those_of_one_thread(tmp_path: Path, isa: str, kv_type: str, page_size: int) -> None:
    model = load(boot_for(random_llama(tmp_path / "m"), tmp_path / "cache"))
    options: dict[str, Any] = {"kv_type": kv_type, "page_size": page_size}
    expected = all_steps(stepper(model, 1, **options))
    for threads, max_rows in ((2, 256), (2, 16), (3, 48), (4, 256)):
        native = stepper(model, threads, shape={"max_rows": max_rows}, **options)
        assert rows_apart(native, STEPS[2]) > 0
        assert all_steps(native) == expected


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_bits_are_those_of_one_thread_in_every_kind_of_model(tmp_path: Path, variant: str) -> None:
    model = load(boot_for(random_llama(tmp_path / "m", **VARIANTS[variant]), tmp_path / "cache"))
    assert all_steps(stepper(model, 2)) == all_steps(stepper(model, 1))


def test_again_and_again_they_are_the_same(tmp_path: Path) -> None:
    model = load(boot_for(random_llama(tmp_path / "m"), tmp_path / "cache"))
    native = stepper(model, 3, shape={"max_rows": 16})
    ids, found = tokens(900), []
    for _ in range(60):
        native.lengths[:] = 0
        found.append(native.step({1: ids}, logprobs=5)[1])
    native.lengths[:] = 0
    assert rows_apart(native, {1: ids}) == 16 and all(result == found[0] for result in found)


def test_a_refused_step_leaves_the_next_one_as_it_would_be(tmp_path: Path) -> None:
    native = stepper(load(boot_for(random_llama(tmp_path / "m"), tmp_path / "cache")), 2)
    good = native.step({1: tokens(300)}, logprobs=0)[1]
    native.lengths[:] = 0
    batch = native.batch({1: tokens(300)})
    batch.out_cache_loc[250] += 1
    with pytest.raises(KernelError, match="slot"):
        native.runner.step(batch, [SampleRequest(row=0, sampling=SamplingParams(max_new_tokens=1), position=0)])
    native.lengths[:] = 0
    assert native.step({1: tokens(300)}, logprobs=0)[1] == good


def test_what_is_recorded_after_a_step_counts_in_the_next_and_layers_come_in_any_order(tmp_path: Path) -> None:
    model = load(boot_for(random_llama(tmp_path / "m"), tmp_path / "cache"))
    config, ids, found = model.config, tokens(300), []
    for threads in (1, 2):
        native = stepper(model, threads)
        program = native.program = Program(native.pool, native.program.shape, model.frequencies)
        recorder = llama._Llama(program, config, model.matrices, model.vectors)
        x = program.embed(recorder.matrix("embed"), program.buffer(config.hidden_size))
        program.set_cache(native.slots)
        first = native.batch({1: ids}), np.zeros(0, dtype=LOGIT_ROW), np.zeros(0, dtype=EMBED_ROW)
        program.run(step_of(*first))
        for layer in reversed(range(config.num_layers)):
            recorder.layer(layer, x)
        recorder.tail(x)
        native.lengths[:] = 0
        native.runner = Steps(program)
        found.append(native.step({1: ids}, logprobs=2)[1])
        assert threads == 1 or rows_apart(native, {2: ids}) > 0
    assert found[0] == found[1]


def test_when_threads_take_slices(tmp_path: Path) -> None:
    model = load(boot_for(random_llama(tmp_path / "m"), tmp_path / "cache"))
    two = stepper(model, 2)
    # Each has enough to do, and as many slices as the other.
    assert [rows_apart(two, {1: tokens(n)}) for n in (1, 95, 96, 130, 500, 512, 513, 1000)] == [0, 0, 48, 80, 256, 256, 144, 256]
    assert [rows_apart(stepper(model, threads), {1: tokens(600)}) for threads in (1, 3, 4, 5)] == [0, 208, 160, 0]
    # Sums of embeddings go from slice to slice, and more rows of logits than fit are computed slice by slice.
    assert rows_apart(two, {1: tokens(600)}, embeds=1) == 0
    assert rows_apart(two, {1: tokens(600)}, wanted=two.program.shape.max_logits) > 0
    assert rows_apart(two, {1: tokens(600)}, wanted=two.program.shape.max_logits + 1) == 0
    # What is decoded lies in one slice: little of it does no harm.
    two.lengths[2:8] = 1000
    decoded = {row: [1] for row in range(2, 8)}
    assert rows_apart(two, {**decoded, 1: tokens(700)}) > 0
    assert rows_apart(two, {**decoded, 1: tokens(300)}) == 0


def test_what_needs_all_rows_in_order_gets_them(tmp_path: Path) -> None:
    model = load(boot_for(random_llama(tmp_path / "m"), tmp_path / "cache"))
    ids, vectors, logprobs = tokens(500), [], []
    for threads in (1, 2):
        native = stepper(model, threads)
        embeds = [EmbedRequest(0, "mean")]
        native.embed({1: ids}, embeds)
        vectors.append(embeds[0].vector)
        native.lengths[:] = 0
        logprobs.append(native.prompt_logprobs(1, ids))
    assert vectors[0] is not None
    assert vectors[1] is not None
    assert (vectors[0] == vectors[1]).all() and logprobs[0] == logprobs[1]
