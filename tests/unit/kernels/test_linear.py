"""The linear kernels: right on every instruction set, and a row's result the same bits whatever it is computed with."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from llmd.kernels.packing import FORMATS, rows_read
from llmd.kernels.shared_library import library
from tests.unit.kernels import native

pytestmark = pytest.mark.skipif(library() is None, reason="the native kernels are not built")

SHAPES = [(1, 32), (15, 64), (16, 96), (33, 160), (100, 576)]  # n not a multiple of the panel, k of the row block
ODD = [(7, 1), (40, 33), (65, 100)]  # any k will do for plain numbers
CASES = [(format, *shape) for format in FORMATS for shape in SHAPES] + [(format, *shape) for format in ("F32", "F16", "BF16") for shape in ODD]


def weights(format: str, n: int, k: int, seed: int = 0) -> tuple[native.Bytes, native.Floats]:
    """A packed matrix and its numbers."""
    floats = np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)
    kind = gguf.GGMLQuantizationType[format]
    source = np.ascontiguousarray(gguf.quants.quantize(floats, kind))
    memory = native.packed(format, n, k, source, format)
    return memory, native.unpacked(memory, format, n, k)


def activations(m: int, k: int, seed: int = 1) -> native.Floats:
    return np.random.default_rng(seed).standard_normal((m, k)).astype(np.float32)


def quantized_reference(isa: str, format: str, w: native.Floats, x: native.Floats, handle: int) -> np.ndarray:
    """The exact product of the weights and the activations as they were quantized, in float64."""
    memory = native.quantized_rows(x, handle)
    if isa == "amx":
        rounded = w if format == "BF16" else native.written_weights(w)
        assert np.abs(rounded - w).max() <= np.abs(w).max() / 256
        return native.read_rounded(memory, *x.shape)[0].astype(np.float64) @ rounded.T.astype(np.float64)
    q, d, _, _ = native.read_quantized(memory, *x.shape)
    rounded = (q.astype(np.float64) * d.astype(np.float64)[:, :, None]).reshape(x.shape)
    return rounded @ w.T.astype(np.float64)


@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize(("format", "n", "k"), CASES)
def test_equals_the_exact_product(isa: str, format: str, n: int, k: int) -> None:
    memory, w = weights(format, n, k)
    x, residual = activations(19, k), activations(19, n, seed=2)
    with native.using(isa), native.pool(2) as handle:
        exact = quantized_reference(isa, format, w, x, handle) if rows_read(format, k) == 1 else x.astype(np.float64) @ w.T.astype(np.float64)
        tolerance = 1e-6 * np.abs(x).max() * np.abs(w).max() * k
        assert np.abs(native.linear(memory, format, n, x, handle) - exact).max() < tolerance
        assert np.abs(native.linear(memory, format, n, x, handle, residual) - (exact + residual)).max() < tolerance


@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("format", FORMATS)
def test_a_row_has_the_same_bits_alone_and_in_any_batch_on_any_number_of_threads(isa: str, format: str) -> None:
    n, k = 200, 96
    memory, _ = weights(format, n, k)
    x = activations(130, k)
    with native.using(isa), native.pool(1) as one, native.pool(2) as two, native.pool(5) as five:
        alone = np.concatenate([native.linear(memory, format, n, x[i : i + 1], one) for i in range(len(x))])
        for m in (*range(2, 35), 48, 63, 64, 100, 130):
            for handle in (one, two, five):
                assert native.same_bits(native.linear(memory, format, n, x[:m], handle), alone[:m])
                start = len(x) - m
                assert native.same_bits(native.linear(memory, format, n, x[start:], handle), alone[start:])


def spread_out(shape: tuple[int, int], low: int, high: int, seed: int) -> native.Floats:
    """Numbers of the order of 10**low to 10**high."""
    random = np.random.default_rng(seed)
    return (random.standard_normal(shape) * 10.0 ** random.integers(low, high, shape)).astype(np.float32)


#: Powers of ten of activations and of weights, but for those of float16. Too small: to be a normal float32.
RANGES = {
    "wide": (-20, 20, -15, 15),
    "activations too small": (-43, -35, -5, 20),
    "weights too small": (20, 36, -43, -36),
    "results too small": (-45, -15, -30, -20),
    "results too large": (20, 37, -10, 18),
}


@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("format", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("numbers", RANGES)
def test_a_lone_row_has_the_same_bits_at_the_ends_of_the_range(isa: str, format: str, numbers: str) -> None:
    n, k = 72, 160
    x_low, x_high, w_low, w_high = RANGES[numbers]
    if format == "F16":
        w_low, w_high = -8, 4
    w = spread_out((n, k), w_low, w_high, seed=3)
    memory = native.packed(format, n, k, np.ascontiguousarray(gguf.quants.quantize(w, gguf.GGMLQuantizationType[format])), format)
    x = spread_out((40, k), x_low, x_high, seed=4)
    x[5, 7], x[6, 8], x[7] = np.inf, np.nan, 0.0
    with native.using(isa), native.pool(2) as handle:
        together = native.linear(memory, format, n, x, handle)
        alone = np.concatenate([native.linear(memory, format, n, row[None], handle) for row in x])
    no_number = np.isnan(together)
    assert (np.isnan(alone) == no_number).all()
    assert native.same_bits(alone[~no_number], together[~no_number])


@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("format", ["BF16", "Q4_1"])
@pytest.mark.parametrize("spare", [0, 16, 5])
def test_results_larger_than_the_caches_are_all_there(isa: str, format: str, spare: int) -> None:
    n, k = 4100, 32
    memory, _ = weights(format, n, k)
    x = activations(70, k)
    with native.using(isa), native.pool(2) as handle:
        apart = np.concatenate([native.linear(memory, format, n, x[i : i + 10], handle) for i in range(0, len(x), 10)])
        assert native.same_bits(native.linear(memory, format, n, x, handle, spare=spare), apart)


@pytest.mark.parametrize("format", FORMATS)
def test_every_instruction_set_gives_the_same_bits(format: str) -> None:
    n, k = 70, 288
    memory, _ = weights(format, n, k)
    x = activations(21, k)
    with native.pool(1) as handle:
        results = []
        for isa in native.isas():
            with native.using(isa):
                if isa == "amx":
                    continue  # it works on bf16
                results.append(native.linear(memory, format, n, x, handle))
    assert all(native.same_bits(result, results[0]) for result in results)


@pytest.mark.parametrize("isa", native.isas())
def test_extreme_quants_do_not_overflow(isa: str) -> None:
    """The largest magnitudes that eight bits hold, all of one sign: where sums of 16 bits would not do."""
    n, k = 16, 64
    for weight in (-128, 127):
        block = np.zeros((n, k // 32, 34), dtype=np.uint8)
        block[:, :, :2] = np.array([1.0], dtype=np.float16).view(np.uint8)
        block[:, :, 2:] = np.uint8(weight & 0xFF)
        memory = native.packed("Q8_0", n, k, block, "Q8_0")
        for x in (np.full((3, k), 127.0, np.float32), np.full((3, k), -127.0, np.float32)):
            with native.using(isa), native.pool(1) as handle:
                assert (native.linear(memory, "Q8_0", n, x, handle) == weight * x[0, 0] * k).all()


@pytest.mark.parametrize("isa", [isa for isa in native.isas() if isa != "amx"])
def test_quantized_activations_are_near_and_their_sums_right(isa: str) -> None:
    m, k = 35, 96
    x = activations(m, k) * np.logspace(-20, 20, m, dtype=np.float32)[:, None]
    x[3], x[4, :32] = 0.0, 1e-35
    with native.using(isa), native.pool(2) as handle:
        q, d, ds, s = native.read_quantized(native.quantized_rows(x, handle), m, k)
    groups = x.reshape(m, -1, 32)
    assert (np.abs(q * d[:, :, None] - groups) <= 0.5001 * np.abs(groups).max(axis=2, keepdims=True) / 127 + 1e-30).all()
    assert (q.sum(axis=2, dtype=np.int32) == s).all()
    assert (ds == d * s.astype(np.float32)).all()
    assert (np.abs(q.astype(int)) <= 127).all()


@pytest.mark.skipif("amx" not in native.isas(), reason="this CPU has no AMX")
def test_activations_for_amx_are_rounded_to_the_nearest_bf16() -> None:
    m, k = 35, 96
    x = activations(m, k) * np.logspace(-20, 20, m, dtype=np.float32)[:, None]
    x[3] = 0.0
    with native.using("amx"), native.pool(2) as handle:
        [rounded] = native.read_rounded(native.quantized_rows(x, handle), m, k)
    bits = x.view(np.uint32)
    assert (rounded.view(np.uint32) == ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000)).all()


@pytest.mark.skipif("amx" not in native.isas(), reason="this CPU has no AMX")
def test_activations_for_amx_are_split_into_all_of_a_float32() -> None:
    m, k = 35, 96
    x = activations(m, k) * np.logspace(-20, 20, m, dtype=np.float32)[:, None]
    with native.using("amx"), native.pool(2) as handle:
        parts = native.read_rounded(native.quantized_rows(x, handle, rows=3), m, k, rows=3)
    assert (parts.astype(np.float64).sum(axis=0) == x).all()
    assert (np.abs(parts[1]) <= np.abs(x) / 128).all()


@pytest.mark.skipif("amx" not in native.isas(), reason="this CPU has no AMX")
@pytest.mark.parametrize("format", ["F32", "F16"])
def test_split_numbers_lose_no_more_than_float32_does(format: str) -> None:
    n, k = 64, 1536
    memory, w = weights(format, n, k)
    x = activations(40, k)
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    errors = {}
    for isa in ("avx512", "amx"):
        with native.using(isa), native.pool(1) as handle:
            errors[isa] = float(np.sqrt(np.mean((native.linear(memory, format, n, x, handle) - exact) ** 2)))
    assert errors["amx"] < 1.5 * errors["avx512"]


@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("format", FORMATS)
def test_what_is_not_finite_shows_in_its_own_row_only(isa: str, bad: float, format: str) -> None:
    n, k = 40, 64
    memory, _ = weights(format, n, k)
    x = activations(4, k)
    good = x.copy()
    x[2, 17] = bad
    with native.using(isa), native.pool(1) as handle:
        result, expected = native.linear(memory, format, n, x, handle), native.linear(memory, format, n, good, handle)
    assert not np.isfinite(result[2]).any()
    assert native.same_bits(np.delete(result, 2, axis=0), np.delete(expected, 2, axis=0))


@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("format", ["Q4_0", "Q4_1", "Q8_0"])
def test_a_scale_that_is_not_finite_shows_in_its_own_output_only(isa: str, bad: float, format: str) -> None:
    n, k = 40, 64
    blocks = gguf.quants.quantize(np.random.default_rng(3).standard_normal((n, k)).astype(np.float32), gguf.GGMLQuantizationType[format])
    good = native.packed(format, n, k, np.ascontiguousarray(blocks), format)
    blocks[21, :2] = np.array([bad], dtype=np.float16).view(np.uint8)
    broken = native.packed(format, n, k, np.ascontiguousarray(blocks), format)
    x = activations(3, k)
    with native.using(isa), native.pool(1) as handle:
        result, expected = native.linear(broken, format, n, x, handle), native.linear(good, format, n, x, handle)
    assert not np.isfinite(result[:, 21]).any()
    assert native.same_bits(np.ascontiguousarray(np.delete(result, 21, axis=1)), np.ascontiguousarray(np.delete(expected, 21, axis=1)))


def test_no_rows_are_no_work() -> None:
    memory, _ = weights("Q4_1", 16, 32)
    with native.pool(2) as handle:
        assert native.linear(memory, "Q4_1", 16, np.zeros((0, 32), np.float32), handle).shape == (0, 16)


def test_arguments_that_cannot_be_are_refused() -> None:
    lib = native.lib()
    with native.pool(1) as handle:
        data = native.aligned(4096).ctypes.data
        assert lib.llmd_linear(handle, data, FORMATS["Q4_1"], 16, 33, data, 33, 1, data, 16, 0) == -1
        assert lib.llmd_linear(handle, data, 99, 16, 32, data, 32, 1, data, 16, 0) == -1
        assert lib.llmd_linear(handle, data, FORMATS["F32"], 16, 32, data, 32, -1, data, 16, 0) == -1
        assert lib.llmd_quantize_rows(handle, data, 33, 1, 33, 1, data) == -1
        assert lib.llmd_quantize_rows(handle, data, 32, 1, 32, 2, data) == -1
        assert lib.llmd_quant_rows_size(1, 33, 1) == -1
        with native.using("scalar"):
            assert lib.llmd_quant_rows_size(1, 32, 3) == -1
