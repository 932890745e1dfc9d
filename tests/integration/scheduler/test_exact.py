"""A real model under everything that a scheduler does to requests: each gets, bit for bit, what it would get alone without a cache."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from llmd.kernels.shared_library import library
from llmd.model import native
from llmd.model.batch import Runner
from llmd.model.loader import load_model
from llmd.model.native_loader import load_native
from llmd.model.native_runner import NativeRunner
from llmd.model.runner import ModelRunner
from llmd.sampling.sampler import Sampler
from llmd.scheduler.kv import KvManager
from llmd.scheduler.policy import Policy
from tests.models import boot_for, random_llama
from tests.unit.scheduler.harness import Bench

MakeRunner = Callable[[KvManager], Runner]
CONTEXT = 192


#: The reference, and the native kernels with weights and KV of several types.
RUNNERS: dict[str, dict[str, Any]] = {
    "torch": {"dtype": "float32"},
    "native": {"dtype": "float32"},
    "native-int8": {"quantization": "int8", "kv_cache_dtype": "int8"},
    "native-int4": {"quantization": "int4", "kv_cache_dtype": "bfloat16"},
}


@pytest.fixture(scope="module", params=RUNNERS)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MakeRunner:
    """Makes runners of one random tiny Llama over any pool."""
    directory = tmp_path_factory.mktemp("tiny")
    path = random_llama(directory / "model", seed=3)
    if request.param == "torch":
        boot = boot_for(path, directory / "cache", **RUNNERS[request.param])
        model = load_model(boot, lambda stage, done, total: None)
        return lambda kv: ModelRunner(model, kv.pages.num_slots, Sampler(boot.files.tokenizer_size))
    if library() is None:
        pytest.skip("the native kernels are not built")
    boot = boot_for(path, directory / "cache", **RUNNERS[request.param])
    packed = load_native(boot, lambda stage, done, total: None)
    kv_type = native.kv_dtype(boot.args.model)
    return lambda kv: NativeRunner(packed, kv.pages.num_slots, kv.pages.page_size, kv_type, 2, boot.files.tokenizer_size)


@pytest.fixture
def share(request: pytest.FixtureRequest) -> float:
    """How large a crowd is worth its time: torch takes ten times longer for each."""
    return 0.5 if request.node.callspec.params["runner"] == "torch" else 1.0


def requests(count: int, seed: int) -> list[tuple[list[int], int, dict[str, Any]]]:
    """(prompt, tokens, sampling): prompts share beginnings of several depths; greedy and seeded sampling, some with logprobs."""
    dice = random.Random(seed)
    trunk = dice.choices(range(250), k=64)
    made = []
    for number in range(count):
        own = dice.choices(range(250), k=dice.randrange(1, 40))
        sampling: dict[str, Any] = {"temperature": 0.0} if number % 2 else {"temperature": 1.0, "seed": number, "top_p": 0.9}
        if number % 5 == 0:
            sampling |= {"frequency_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": ((number, 3.0),)}
        made.append((trunk[: dice.choice([0, 5, 16, 33, 64])] + own, dice.randrange(20, 60), {**sampling, "ignore_eos": True, "logprobs": number % 3 - 1}))
    return made


def crowd(runner: MakeRunner, count: int, *, seed: int, policy: Policy = "fcfs", chunk: int = 24, page_size: int = 4, overlap: bool = True) -> None:
    """16 at once, memory for about six of them."""
    asked = requests(count, seed)
    bench = Bench(
        pages=6 * 64 // page_size,
        page_size=page_size,
        max_running=16,
        context=CONTEXT,
        chunk=chunk,
        max_queued=4,
        runner=runner,
        policy=policy,
        vocab=261,
        overlap=overlap,
    )
    bench.scheduler.decode.ratio.value = 0.1
    alone = Bench(pages=CONTEXT, page_size=1, max_running=1, context=CONTEXT, chunk=4096, radix=False, runner=runner, vocab=261)
    for number, (prompt, tokens, more) in enumerate(asked):
        bench.send(f"r{number}", prompt, tokens, priority=number % 3, **more)
        while bench.scheduler.in_flight + len(bench.source.queue) >= 16:
            bench.turn()
    bench.run()
    bench.close()
    assert bench.counter("llmd_requests_retracted_total") > 0 and bench.counter("llmd_prefix_cache_hit_tokens_total") > 0
    for number, (prompt, tokens, more) in enumerate(asked):
        rid = f"r{number}"
        alone.send(rid, prompt, tokens, **more)
        alone.run()
        assert bench.out.tokens[rid] == alone.out.tokens[rid], f"request {number}"
        assert bench.out.logprobs[rid] == alone.out.logprobs[rid], f"request {number}"
    assert bench.kv.counts.active == 0
    bench.kv.flush()
    assert bench.kv.pages.pages_free == bench.kv.pages.pages_total
    assert bench.counter("llmd_kv_accounting_errors_total") == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_a_crowd_gets_what_each_would_get_alone(runner: MakeRunner, share: float, overlap: bool) -> None:
    crowd(runner, int(60 * share), seed=1, overlap=overlap)


@pytest.mark.parametrize(("policy", "chunk", "page_size"), [("lpm", 7, 1), ("priority", 64, 16)])
def test_under_other_policies_chunks_and_pages_too(runner: MakeRunner, share: float, policy: Policy, chunk: int, page_size: int) -> None:
    crowd(runner, int(40 * share), seed=2, policy=policy, chunk=chunk, page_size=page_size)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority"])
def test_a_long_crowd(runner: MakeRunner, policy: Policy) -> None:
    crowd(runner, 600, seed=3, policy=policy)
