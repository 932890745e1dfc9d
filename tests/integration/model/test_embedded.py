"""The embedded model, pulled, checked and run: its greedy tokens are those of the reference implementation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmd.errors import ResourceError
from llmd.kernels.shared_library import library
from llmd.store import catalog
from llmd.store.pull import pull
from llmd.tokenizer.load import load_tokenizer
from tests.daemon import SLOW
from tests.models import boot_for
from tests.stepping import NativeStepper, Stepper, Steps

NAME = "smollm2-135m-instruct"
CASES: list[dict[str, Any]] = json.loads((Path(__file__).parents[2] / "data" / "reference_greedy.json").read_text())["cases"]
#: Where the reference's two best logits are nearer than this, another order of additions may choose the other.
TIE = 0.02


@pytest.fixture(scope="module")
def cache() -> Path:
    """The user's own cache, so that the model is fetched once on a machine."""
    directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llmd"
    try:
        pull(NAME, directory, lambda line: None)
    except ResourceError as error:
        pytest.skip(f"the embedded model cannot be pulled here: {error}")
    return directory


@pytest.fixture(scope="module", params=["torch", "native"])
def stepper(request: pytest.FixtureRequest, cache: Path) -> Steps:
    boot = boot_for(Path(NAME), cache, dtype="float32", threads=min(2, os.cpu_count() or 1))
    if request.param == "torch":
        return Stepper(boot, requests=len(CASES), context=128)
    if library() is None:
        pytest.skip("the native kernels are not built")
    return NativeStepper(boot, requests=len(CASES), context=128, page_size=16)


@pytest.mark.timeout(300)
def test_greedy_tokens_and_logprobs_are_the_references(stepper: Steps) -> None:
    open_cases = dict(enumerate(CASES, 1))
    results = {row: stepper.step({row: case["prompt_ids"]}, logprobs=0)[row] for row, case in open_cases.items()}
    ties = []
    for index in range(48):
        for row, case in list(open_cases.items()):
            expected, result = case["f32w"], results[row]
            if result.token_id != expected["token_ids"][index]:
                assert expected["top1_top2_logit_gap"][index] < TIE, f"{case['prompt']!r} differs at token {index}"
                ties.append((case["prompt"], index))
                del open_cases[row]
                continue
            assert result.logprob == pytest.approx(expected["logprobs"][index], abs=0.02)
            if index + 1 == len(expected["token_ids"]):
                del open_cases[row]
        if open_cases:  # all cases go on in one batch
            results = stepper.step({row: [results[row].token_id] for row in open_cases}, logprobs=0)
    assert not open_cases
    assert len(ties) <= 2, ties


def test_the_tokenizer_gives_the_references_ids(cache: Path) -> None:
    tokenizer = load_tokenizer(Path(boot_for(Path(NAME), cache).files.small_dir))
    for case in CASES:
        assert tokenizer.encode(case["prompt_text"], add_special_tokens=False) == case["prompt_ids"]
        assert tokenizer.decode(case["f32w"]["token_ids"], skip_special_tokens=True) == case["f32w"]["text"]


@pytest.mark.usefixtures("cache")
def test_two_pulls_at_once_do_no_harm(tmp_path: Path) -> None:
    code = f"from pathlib import Path; from llmd.store.pull import pull; print(pull({NAME!r}, Path({str(tmp_path)!r}), lambda line: None))"
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    found = [process.communicate(timeout=100 * SLOW)[0].strip() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert found[0] == found[1] == str(catalog.pulled_path(NAME, tmp_path))
    assert catalog.sha256_of(Path(found[0])) == catalog.find(NAME).sha256
    assert not list(Path(found[0]).parent.glob(".pull-*"))
