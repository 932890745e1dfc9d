"""The size of the KV pool, and what is said when it cannot work."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from llmd.errors import ConfigError
from llmd.memory.budget import KvRequest, plan_kv

MIB = 2**20
ASK = KvRequest(kv_bytes_per_token=1024, context_length=8192, page_size=16, max_running_requests=64, free_before=2048 * MIB, free_after=2000 * MIB)


def test_auto_is_requests_times_two_thousand_tokens() -> None:
    budget = plan_kv(ASK)
    assert budget.tokens == 64 * 2048 and budget.context_length == 8192 and not budget.clamped
    assert plan_kv(replace(ASK, context_length=512)).tokens == 64 * 512


def test_auto_takes_a_quarter_of_free_memory_at_most() -> None:
    assert plan_kv(replace(ASK, free_after=100 * MIB)).tokens == 25 * 1024


def test_auto_holds_one_full_context_however_few_may_run() -> None:
    budget = plan_kv(replace(ASK, max_running_requests=1))
    assert budget.tokens == 8192 and "one full context" in budget.explain


def test_a_fraction_leaves_its_share_of_what_was_free_before() -> None:
    budget = plan_kv(replace(ASK, mem_fraction_static=0.5))
    assert budget.tokens == (2000 - 1024) * 1024
    assert plan_kv(replace(ASK, on_gpu=True)).tokens > budget.tokens


def test_max_total_tokens_is_taken_as_it_is_in_whole_pages() -> None:
    assert plan_kv(replace(ASK, max_total_tokens=9999)).tokens == 9984


@pytest.mark.parametrize("ask", [replace(ASK, max_total_tokens=1000), replace(ASK, free_after=20 * MIB), replace(ASK, mem_fraction_static=0.02)])
def test_too_small_a_pool_is_refused_and_each_suggestion_works(ask: KvRequest) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_kv(ask)
    message = caught.value.message
    assert "needs 8192" in message
    context, total = re.search(r"model\.context_length: (\d+)", message), re.search(r"memory\.max_total_tokens: (\d+)", message)
    assert total
    assert plan_kv(replace(ask, max_total_tokens=int(total[1]))).context_length == 8192
    if context:
        assert plan_kv(replace(ask, context_length=int(context[1]))).context_length == int(context[1])
        clamped = plan_kv(replace(ask, clamp_context=True))
        assert clamped.clamped and int(context[1]) <= clamped.context_length <= clamped.tokens


@pytest.mark.parametrize("ask", [replace(ASK, mem_fraction_static=0.02), replace(ASK, max_total_tokens=1000, page_size=4096)])
def test_each_of_two_settings_works_where_not_even_a_page_fits(ask: KvRequest) -> None:
    with pytest.raises(ConfigError, match="holds 0 tokens") as caught:
        plan_kv(ask)
    message = caught.value.message
    total = re.search(r"memory\.max_total_tokens: (\d+)", message)
    fraction, page = re.search(r"mem_fraction_static: ([0-9.]+)", message), re.search(r"page_size: (\d+) with memory.clamp_context", message)
    assert total and plan_kv(replace(ask, max_total_tokens=int(total[1])))
    assert fraction or page
    if fraction:
        assert plan_kv(replace(ask, mem_fraction_static=float(fraction[1]))).context_length == 8192
    if page:
        assert plan_kv(replace(ask, page_size=int(page[1]), clamp_context=True)).clamped


def test_memory_too_small_for_a_full_context_names_what_fits() -> None:
    ask = replace(ASK, free_after=4 * MIB, mem_fraction_static=0.02)
    with pytest.raises(ConfigError) as caught:
        plan_kv(ask)
    found = re.search(r"memory\.max_total_tokens: (\d+) with model\.context_length: (\d+)", caught.value.message)
    assert found and plan_kv(replace(ask, max_total_tokens=int(found[1]), context_length=int(found[2])))


def test_nothing_left_for_kv_is_refused_even_where_clamping_is_allowed() -> None:
    with pytest.raises(ConfigError, match="holds 0 tokens"):
        plan_kv(replace(ASK, free_after=0, clamp_context=True))


def test_more_kv_than_free_memory_is_refused_with_a_size_that_works() -> None:
    ask = replace(ASK, max_total_tokens=3_000_000)
    with pytest.raises(ConfigError, match="2000 MiB are free") as caught:
        plan_kv(ask)
    found = re.search(r"set memory\.max_total_tokens: (\d+)", caught.value.message)
    assert found and plan_kv(replace(ask, max_total_tokens=int(found[1]))).tokens == int(found[1])
