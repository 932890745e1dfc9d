"""Pooled hidden states: what the forward pass gives for a text is what transformers gives, in one chunk or in several."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from llmd.model.batch import EmbedRequest, SampleRequest
from llmd.wire.messages import Pooling, SamplingParams
from tests.models import boot_for, random_llama
from tests.stepping import Stepper

TEXT = [72, 101, 108, 108, 111, 44, 32, 119, 111, 114, 108, 100, 33, 10, 0, 255, 7]


def reference(model: Path, ids: list[int], pooling: Pooling) -> npt.NDArray[np.float32]:
    """By transformers, in float32."""
    from transformers import AutoModel

    loaded = AutoModel.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode():
        states = loaded(torch.tensor([ids])).last_hidden_state[0]
    return {"last": states[-1], "cls": states[0], "mean": states.sum(0)}[pooling].numpy()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
def test_a_vector_is_that_of_transformers(tmp_path: Path, family: str, pooling: Pooling) -> None:
    model = random_llama(tmp_path / "m", family=family)
    stepper = Stepper(boot_for(model, tmp_path / "cache", dtype="float32"))
    embed = EmbedRequest(0, pooling)
    assert stepper.embed({1: TEXT}, [embed]) == []
    assert embed.vector is not None
    assert embed.vector.dtype == np.float32
    np.testing.assert_allclose(embed.vector, reference(model, TEXT, pooling), atol=1e-4 * (len(TEXT) if pooling == "mean" else 1))


def test_the_sum_of_chunks_is_the_whole_and_others_are_not_touched(tmp_path: Path) -> None:
    model = random_llama(tmp_path / "m")
    stepper = Stepper(boot_for(model, tmp_path / "cache", dtype="float32"))
    alone = stepper.step({3: [1, 2, 3]})[3].token_id
    total = np.zeros(64)
    for part in (TEXT[:5], TEXT[5:6], TEXT[6:]):
        embed = EmbedRequest(1, "mean")
        wanted = [SampleRequest(row=0, sampling=SamplingParams(max_new_tokens=1, temperature=0.0), position=0)]
        stepper.lengths[4] = 0
        (beside,) = stepper.embed({4: [1, 2, 3], 1: part}, [embed], wanted)
        assert beside.token_id == alone
        assert embed.vector is not None
        total += embed.vector
    np.testing.assert_allclose(total, reference(model, TEXT, "mean"), atol=1e-4 * len(TEXT))
