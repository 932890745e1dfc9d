"""The native program gives the torch modules' logits, and a token's bits depend on its own request's tokens alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from llmd.kernels.library import ISAS, library
from tests.models import boot_for, random_llama
from tests.programs import NativeStepper, load
from tests.stepping import Stepper
from tests.unit.model.test_forward import VARIANTS, tokens

pytestmark = pytest.mark.skipif(library() is None, reason="the native kernels are not built")
AVAILABLE = [] if (lib := library()) is None else ISAS[: lib.llmd_isa_best() + 1]


@pytest.fixture(params=AVAILABLE)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set of this CPU in turn."""
    lib = library()
    assert lib is not None
    before = lib.llmd_isa()
    lib.llmd_isa_set(ISAS.index(request.param))
    yield request.param
    lib.llmd_isa_set(before)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logprobs_equal_torch(tmp_path: Path, isa: str, variant: str, page_size: int) -> None:
    boot = boot_for(random_llama(tmp_path / "m", **VARIANTS[variant]), tmp_path / "cache", dtype="float32")
    reference = Stepper(boot, context=512)
    native = NativeStepper(load(boot), page_size=page_size, context=512)
    ids = tokens(200)
    expected = reference.prompt_logprobs(1, ids)
    assert native.prompt_logprobs(1, ids) == pytest.approx(expected, abs=1e-4)
    reference.step({2: ids[:150]})
    native.step({2: ids[:150]})
    for index in range(150, 160):
        one, other = reference.step({2: [ids[index]]}, logprobs=3)[2], native.step({2: [ids[index]]}, logprobs=3)[2]
        assert other.token_id == one.token_id
        assert other.logprob == pytest.approx(one.logprob, abs=1e-4)
        assert [id for id, _ in other.top] == [id for id, _ in one.top]
        assert np.allclose([value for _, value in other.top], [value for _, value in one.top], atol=1e-4)
