"""The native program gives the torch modules' logits, and a token's bits depend on its own request's tokens alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmd.kernels.program import KV_TYPES, KernelError, Pool, Program, Shape, Step
from llmd.model.batch import EmbedRequest, SampleRequest
from llmd.wire.messages import Pooling, SamplingParams
from tests.models import VOCAB, boot_for, random_llama
from tests.programs import ProgramStepper, load
from tests.stepping import Stepper
from tests.unit.kernels.native import isas, using
from tests.unit.model.test_forward import VARIANTS, tokens

pytestmark = pytest.mark.skipif(not isas(), reason="the native kernels are not built")


@pytest.fixture(params=isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set of this CPU in turn."""
    with using(request.param):
        yield request.param


@pytest.mark.parametrize("variant", VARIANTS)
def test_logprobs_equal_torch(tmp_path: Path, isa: str, variant: str) -> None:
    boot = boot_for(random_llama(tmp_path / "m", **VARIANTS[variant]), tmp_path / "cache", dtype="float32")
    reference = Stepper(boot, context=512)
    native = ProgramStepper(load(boot), page_size=1 if variant in ("mha", "mistral-window") else 16, context=512)
    ids = tokens(200)
    expected = reference.prompt_logprobs(1, ids)
    assert native.prompt_logprobs(1, ids) == pytest.approx(expected, abs=1e-4, rel=1e-5)
    reference.step({2: ids[:150]})
    native.step({2: ids[:150]})
    for index in range(150, 160):
        one, other = reference.step({2: [ids[index]]}, logprobs=3)[2], native.step({2: [ids[index]]}, logprobs=3)[2]
        assert other.token_id == one.token_id
        assert other.logprob == pytest.approx(one.logprob, abs=1e-4, rel=1e-5)
        assert [id for id, _ in other.top] == [id for id, _ in one.top]
        assert np.allclose([value for _, value in other.top], [value for _, value in one.top], atol=1e-4)


@pytest.mark.parametrize(("kv_type", "tolerance"), [("bfloat16", 0.05), ("int8", 0.1)])
@pytest.mark.parametrize("page_size", [1, 8, 48])
def test_other_kv_types_stay_near(tmp_path: Path, isa: str, kv_type: str, tolerance: float, page_size: int) -> None:
    boot = boot_for(random_llama(tmp_path / "m", head_dim=24), tmp_path / "cache", dtype="float32")
    native = ProgramStepper(load(boot), kv_type=kv_type, page_size=page_size, context=384)
    ids = tokens(200)
    difference = np.array(native.prompt_logprobs(1, ids)) - np.array(Stepper(boot).prompt_logprobs(1, ids))
    assert 0 < np.abs(difference).mean() < tolerance


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_what_others_left_in_a_page_is_never_seen(tmp_path: Path, isa: str, kv_type: str, page_size: int) -> None:
    native = ProgramStepper(load(boot_for(random_llama(tmp_path / "m"), tmp_path / "cache", dtype="float32")), kv_type=kv_type, page_size=page_size)
    native.program.cache[:] = 0xFF  # NaN in every type, or scales that are
    results = [native.step(new)[row] for row, new in ((1, {1: tokens(9), 2: tokens(3)}), (1, {1: [1], 2: [2]}), (2, {2: tokens(30), 1: [1]}))]
    assert all(result.finite for result in results)


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
def test_pooled_vectors_equal_torch(tmp_path: Path, pooling: Pooling) -> None:
    boot = boot_for(random_llama(tmp_path / "m"), tmp_path / "cache", dtype="float32")
    new = {1: tokens(40), 2: tokens(300, 1), 3: tokens(7, 2)}
    vectors = []
    for stepper in (Stepper(boot, context=512), ProgramStepper(load(boot), context=512)):
        embeds = [EmbedRequest(1, pooling), EmbedRequest(2, pooling)]
        wanted = [SampleRequest(row=0, sampling=SamplingParams(max_new_tokens=1, temperature=0.0), position=0)]
        assert len(stepper.embed(new, embeds, wanted)) == 1
        vectors.append([embed.vector for embed in embeds])
    for one, other, length in zip(*vectors, (300, 7), strict=True):
        assert one is not None
        assert other is not None
        np.testing.assert_allclose(one, other, atol=1e-4 * (length if pooling == "mean" else 1))


def test_a_bad_step_is_refused_and_the_next_one_works(tmp_path: Path) -> None:
    native = ProgramStepper(load(boot_for(random_llama(tmp_path / "m"), tmp_path / "cache", dtype="float32")))
    good = native.step({1: tokens(20)}, logprobs=0)[1]

    def refused(match: str, **changes: Any) -> None:
        native.lengths[:] = 0
        batch = native.batch({1: tokens(20)})
        wanted = SampleRequest(row=0, sampling=SamplingParams(max_new_tokens=1), position=0)
        for name, value in changes.items():
            if name == "scored":
                wanted.prompt_logprob_ids = [value]
            else:
                getattr(batch, name)[-1] = value
        with pytest.raises(KernelError, match=match):
            native.runner.step(batch, [wanted])

    for id in (-1, VOCAB, 2**40):
        refused("token id", input_ids=id)
    for slot in (-1, native.slots, 2**40, 0):
        refused("slot", out_cache_loc=slot)
    for position in (-1, 18, 20):
        refused("contradict", positions=position)
    refused("contradict", seq_lens=19)
    refused("contradict", seq_lens=2**40)
    refused("contradict", extend_lens=21)
    refused("contradict", extend_lens=0)
    refused("contradict", req_pool_indices=native.req_to_token.shape[0])
    refused("wanted row", scored=261)
    native.lengths[:] = 0
    native.req_to_token[1, 0] += 1
    native.req_to_token[1, 0] -= 1
    assert native.step({1: tokens(20)}, logprobs=0)[1] == good


def test_what_does_not_fit_is_refused_when_recorded() -> None:
    pool = Pool(1)
    shape = Shape(hidden=32, heads=2, kv_heads=1, head_dim=16, layers=1, vocab=40, sampled_ids=40)
    program = Program(pool, shape, np.ones(8, dtype=np.float32))
    x, other, quantized = program.buffer(32), program.buffer(48), program.buffer(32, kind=1)
    norm = np.ones(32, dtype=np.float32)
    for record in (
        lambda: program.rms_norm(x, norm, 1e-5, other),
        lambda: program.rms_norm(quantized, norm, 1e-5, x),
        lambda: program.attention(x, 0, other),
        lambda: program.rope_store(1, other),
        lambda: program.swiglu(x, other),
        lambda: program.linear(x, 0, other),
        lambda: program.sample(x),
        lambda: program.buffer(0),
        lambda: program.buffer(40, kind=1),
        lambda: program.add_bias(norm, other),
        lambda: program.set_cache(0),
        lambda: program.run(Step()),
    ):
        with pytest.raises(KernelError):
            record()
    with pytest.raises(KernelError):
        Program(pool, Shape(hidden=32, heads=3, kv_heads=2, head_dim=16, layers=1, vocab=40, sampled_ids=40), np.ones(8, dtype=np.float32))
    with pytest.raises(KernelError):
        Program(pool, shape, np.ones(7, dtype=np.float32))
