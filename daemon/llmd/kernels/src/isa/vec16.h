// Sixteen floats as one value on every ISA: one ZMM register, two YMM registers, or an array that the compiler may vectorise.
//
// A KV tile holds 16 slots, so attention and everything around it work in sixteens; sums over lanes then have one order on all ISAs.
// Memory may be unaligned everywhere. `n` lanes of a partial load or store are the first ones; the others load as 0.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define VEC_INLINE static inline __attribute__((always_inline))

namespace llmd::LLMD_ISA_NS {

constexpr int W = 16;

VEC_INLINE float bits_to_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

VEC_INLINE uint32_t float_to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

// Round to nearest even; NaN stays NaN.
VEC_INLINE uint16_t to_bf16(float value) {
    const uint32_t bits = float_to_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
    return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

#if defined(__AVX512F__)

struct V {
    __m512 v;
};
VEC_INLINE V splat(float x) { return {_mm512_set1_ps(x)}; }
VEC_INLINE V load(const float* p) { return {_mm512_loadu_ps(p)}; }
VEC_INLINE V load(const float* p, int n) { return {_mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p)}; }
VEC_INLINE void store(float* p, V a) { _mm512_storeu_ps(p, a.v); }
VEC_INLINE void store(float* p, V a, int n) { _mm512_mask_storeu_ps(p, __mmask16((1u << n) - 1), a.v); }
VEC_INLINE V add(V a, V b) { return {_mm512_add_ps(a.v, b.v)}; }
VEC_INLINE V sub(V a, V b) { return {_mm512_sub_ps(a.v, b.v)}; }
VEC_INLINE V mul(V a, V b) { return {_mm512_mul_ps(a.v, b.v)}; }
VEC_INLINE V div(V a, V b) { return {_mm512_div_ps(a.v, b.v)}; }
VEC_INLINE V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// 1 / a to an ulp or two, for a >= 1: a division takes as long as sixteen products
VEC_INLINE V inverse(V a) {
    const __m512 guess = _mm512_rcp14_ps(a.v);
    return {_mm512_mul_ps(guess, _mm512_fnmadd_ps(a.v, guess, _mm512_set1_ps(2.0f)))};
}
// b where one of them is NaN
VEC_INLINE V max(V a, V b) { return {_mm512_max_ps(a.v, b.v)}; }
VEC_INLINE V min(V a, V b) { return {_mm512_min_ps(a.v, b.v)}; }
VEC_INLINE V round(V a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// a * 2**n for whole n of -126..127 and a in 0.5..2
VEC_INLINE V scale2(V a, V n) { return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a.v), _mm512_slli_epi32(_mm512_cvtps_epi32(n.v), 23)))}; }
// a where x < limit, else b (also where x is NaN)
VEC_INLINE V where_less(V x, V limit, V a, V b) { return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_LT_OQ), b.v, a.v)}; }
// bit i: lane i of a > b
VEC_INLINE uint32_t greater(V a, V b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ); }
VEC_INLINE uint32_t equal(V a, V b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ); }
// a in lanes lo..hi-1, else b
VEC_INLINE V in_lanes(int lo, int hi, V a, V b) { return {_mm512_mask_blend_ps(__mmask16(((1u << hi) - 1) & ~((1u << lo) - 1)), b.v, a.v)}; }
// 16 pairs of bf16 as their first and their second numbers
VEC_INLINE void load_bf16_pairs(const void* p, V& first, V& second) {
    const __m512i raw = _mm512_loadu_si512(p);
    first.v = _mm512_castsi512_ps(_mm512_slli_epi32(raw, 16));
    second.v = _mm512_castsi512_ps(_mm512_and_si512(raw, _mm512_set1_epi32(int(0xffff0000u))));
}
// 16 quadruples of int8 as their four numbers
VEC_INLINE void load_i8_quads(const void* p, V out[4]) {
    const __m512i raw = _mm512_loadu_si512(p);
    out[0].v = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(raw, 24), 24));
    out[1].v = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(raw, 16), 24));
    out[2].v = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(raw, 8), 24));
    out[3].v = _mm512_cvtepi32_ps(_mm512_srai_epi32(raw, 24));
}
// 16 bf16, rounded to nearest even; NaN stays NaN
VEC_INLINE void store_bf16(uint16_t* p, V a) {
    const __m512i bits = _mm512_castps_si512(a.v), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    const __m512i result = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(result));
}
// 16 bf16
VEC_INLINE V load_bf16(const uint16_t* p) {
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16))};
}
// lanes 2i and 2i + 1 change places
VEC_INLINE V swap_pairs(V a) { return {_mm512_permute_ps(a.v, 0xb1)}; }
VEC_INLINE void halves(V a, __m256& low, __m256& high) {
    low = _mm512_castps512_ps256(a.v);
    high = _mm512_extractf32x8_ps(a.v, 1);
}

#elif defined(__AVX2__)

struct V {
    __m256 a, b;
};
VEC_INLINE __m256i lanes(int n) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)); }
VEC_INLINE V splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
VEC_INLINE V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
VEC_INLINE V load(const float* p, int n) { return {_mm256_maskload_ps(p, lanes(n)), _mm256_maskload_ps(p + 8, lanes(n - 8))}; }
VEC_INLINE void store(float* p, V x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
VEC_INLINE void store(float* p, V x, int n) {
    _mm256_maskstore_ps(p, lanes(n), x.a);
    _mm256_maskstore_ps(p + 8, lanes(n - 8), x.b);
}
VEC_INLINE V add(V x, V y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
VEC_INLINE V sub(V x, V y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
VEC_INLINE V mul(V x, V y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
VEC_INLINE V div(V x, V y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
VEC_INLINE V inverse(V x) { return div(splat(1.0f), x); }
VEC_INLINE V fma(V x, V y, V z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
VEC_INLINE V max(V x, V y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
VEC_INLINE V min(V x, V y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
VEC_INLINE __m256 round8(__m256 x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
VEC_INLINE V round(V x) { return {round8(x.a), round8(x.b)}; }
VEC_INLINE __m256 scale8(__m256 a, __m256 n) { return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23))); }
VEC_INLINE V scale2(V x, V n) { return {scale8(x.a, n.a), scale8(x.b, n.b)}; }
VEC_INLINE V where_less(V x, V limit, V a, V b) {
    return {_mm256_blendv_ps(b.a, a.a, _mm256_cmp_ps(x.a, limit.a, _CMP_LT_OQ)), _mm256_blendv_ps(b.b, a.b, _mm256_cmp_ps(x.b, limit.b, _CMP_LT_OQ))};
}
VEC_INLINE uint32_t greater(V a, V b) {
    return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a.a, b.a, _CMP_GT_OQ))) | uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a.b, b.b, _CMP_GT_OQ))) << 8;
}
VEC_INLINE uint32_t equal(V a, V b) {
    return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a.a, b.a, _CMP_EQ_OQ))) | uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a.b, b.b, _CMP_EQ_OQ))) << 8;
}
VEC_INLINE V in_lanes(int lo, int hi, V a, V b) {
    const __m256i low = _mm256_andnot_si256(lanes(lo), lanes(hi)), high = _mm256_andnot_si256(lanes(lo - 8), lanes(hi - 8));
    return {_mm256_blendv_ps(b.a, a.a, _mm256_castsi256_ps(low)), _mm256_blendv_ps(b.b, a.b, _mm256_castsi256_ps(high))};
}
VEC_INLINE void load_bf16_pairs(const void* p, V& first, V& second) {
    const __m256i* at = static_cast<const __m256i*>(p);
    const __m256i low = _mm256_loadu_si256(at), high = _mm256_loadu_si256(at + 1), mask = _mm256_set1_epi32(int(0xffff0000u));
    first = {_mm256_castsi256_ps(_mm256_slli_epi32(low, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(high, 16))};
    second = {_mm256_castsi256_ps(_mm256_and_si256(low, mask)), _mm256_castsi256_ps(_mm256_and_si256(high, mask))};
}
VEC_INLINE __m256 byte8(__m256i raw, int left) { return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(raw, left), 24)); }
VEC_INLINE void load_i8_quads(const void* p, V out[4]) {
    const __m256i* at = static_cast<const __m256i*>(p);
    const __m256i low = _mm256_loadu_si256(at), high = _mm256_loadu_si256(at + 1);
    for (int i = 0; i < 4; i++) out[i] = {byte8(low, 24 - 8 * i), byte8(high, 24 - 8 * i)};
}
VEC_INLINE __m256i bf16x8(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}
VEC_INLINE void store_bf16(uint16_t* p, V x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(_mm256_packus_epi32(bf16x8(x.a), bf16x8(x.b)), 0xd8));
}
VEC_INLINE __m256 bf16_at(const uint16_t* p) {
    const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
}
VEC_INLINE V load_bf16(const uint16_t* p) { return {bf16_at(p), bf16_at(p + 8)}; }
VEC_INLINE V swap_pairs(V x) { return {_mm256_permute_ps(x.a, 0xb1), _mm256_permute_ps(x.b, 0xb1)}; }
VEC_INLINE void halves(V x, __m256& low, __m256& high) {
    low = x.a;
    high = x.b;
}

#else

struct V {
    float v[16];
};
#define LLMD_LANES(expression)                                     \
    V out;                                                         \
    for (int i = 0; i < 16; i++) out.v[i] = (expression);          \
    return out
VEC_INLINE V splat(float x) { LLMD_LANES(x); }
VEC_INLINE V load(const float* p) { LLMD_LANES(p[i]); }
VEC_INLINE V load(const float* p, int n) { LLMD_LANES(i < n ? p[i] : 0.0f); }
VEC_INLINE void store(float* p, V a) { memcpy(p, a.v, sizeof a.v); }
VEC_INLINE void store(float* p, V a, int n) { memcpy(p, a.v, size_t(n) * 4); }
VEC_INLINE V add(V a, V b) { LLMD_LANES(a.v[i] + b.v[i]); }
VEC_INLINE V sub(V a, V b) { LLMD_LANES(a.v[i] - b.v[i]); }
VEC_INLINE V mul(V a, V b) { LLMD_LANES(a.v[i] * b.v[i]); }
VEC_INLINE V div(V a, V b) { LLMD_LANES(a.v[i] / b.v[i]); }
VEC_INLINE V inverse(V a) { LLMD_LANES(1.0f / a.v[i]); }
// Rounded twice: a true fused multiply-add would be a call of the C library here.
VEC_INLINE V fma(V a, V b, V c) { LLMD_LANES(a.v[i] * b.v[i] + c.v[i]); }
VEC_INLINE V max(V a, V b) { LLMD_LANES(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
VEC_INLINE V min(V a, V b) { LLMD_LANES(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
// Adding and taking off 1.5 * 2**23 leaves a whole number, rounded to even, for |a| < 2**22.
VEC_INLINE V round(V a) { LLMD_LANES((a.v[i] + 12582912.0f) - 12582912.0f); }
VEC_INLINE V scale2(V a, V n) { LLMD_LANES(bits_to_float(float_to_bits(a.v[i]) + (uint32_t(int(n.v[i])) << 23))); }
VEC_INLINE V where_less(V x, V limit, V a, V b) { LLMD_LANES(x.v[i] < limit.v[i] ? a.v[i] : b.v[i]); }
VEC_INLINE uint32_t greater(V a, V b) {
    uint32_t bits = 0;
    for (int i = 0; i < 16; i++) bits |= uint32_t(a.v[i] > b.v[i]) << i;
    return bits;
}
VEC_INLINE uint32_t equal(V a, V b) {
    uint32_t bits = 0;
    for (int i = 0; i < 16; i++) bits |= uint32_t(a.v[i] == b.v[i]) << i;
    return bits;
}
VEC_INLINE V in_lanes(int lo, int hi, V a, V b) { LLMD_LANES(i >= lo && i < hi ? a.v[i] : b.v[i]); }
VEC_INLINE void store_bf16(uint16_t* p, V a) {
    for (int i = 0; i < 16; i++) p[i] = to_bf16(a.v[i]);
}
VEC_INLINE V load_bf16(const uint16_t* p) { LLMD_LANES(bits_to_float(uint32_t(p[i]) << 16)); }
VEC_INLINE V swap_pairs(V a) { LLMD_LANES(a.v[i ^ 1]); }
VEC_INLINE void load_bf16_pairs(const void* p, V& first, V& second) {
    uint32_t raw[16];
    memcpy(raw, p, sizeof raw);
    for (int i = 0; i < 16; i++) first.v[i] = bits_to_float(raw[i] << 16), second.v[i] = bits_to_float(raw[i] & 0xffff0000u);
}
VEC_INLINE void load_i8_quads(const void* p, V out[4]) {
    const int8_t* at = static_cast<const int8_t*>(p);
    for (int i = 0; i < 64; i++) out[i % 4].v[i / 4] = float(at[i]);
}
#undef LLMD_LANES

#endif

// Sum and maximum of the lanes, by halves: the same order on every ISA.
#if defined(__AVX2__)
VEC_INLINE float sum(V x) {
    __m256 low, high;
    halves(x, low, high);
    const __m256 eight = _mm256_add_ps(low, high);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
VEC_INLINE float top(V x) {
    __m256 low, high;
    halves(x, low, high);
    const __m256 eight = _mm256_max_ps(low, high);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
#else
VEC_INLINE float sum(V x) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) x.v[i] += x.v[i + half];
    return x.v[0];
}
VEC_INLINE float top(V x) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) x.v[i] = x.v[i] > x.v[i + half] ? x.v[i] : x.v[i + half];
    return x.v[0];
}
#endif

// e**x to 2 units in the last place; exactly 1 at 0, exactly 0 below -87 (so at -inf), NaN at NaN; e**88 above 88.
// 2**n * 2**r with n whole and |r| <= 1/2; the polynomial is 2**r's Taylor series, whose 7th power is below 2**-26 there.
VEC_INLINE V exp(V x) {
    const V log2e_high = splat(1.44269502162933349609375f), log2e_low = splat(1.92596299e-8f), lowest = splat(-87.0f);
    const V y = min(splat(88.0f), max(lowest, x));
    const V n = round(mul(y, log2e_high));
    const V r = fma(y, log2e_low, fma(y, log2e_high, sub(splat(0.0f), n)));
    V p = splat(1.52527338e-5f);
    p = fma(p, r, splat(1.54035304e-4f));
    p = fma(p, r, splat(1.33335581e-3f));
    p = fma(p, r, splat(9.61812911e-3f));
    p = fma(p, r, splat(5.55041087e-2f));
    p = fma(p, r, splat(2.40226507e-1f));
    p = fma(p, r, splat(6.93147181e-1f));
    p = fma(p, r, splat(1.0f));
    return where_less(x, lowest, splat(0.0f), scale2(p, n));
}

// silu(gate) * up
VEC_INLINE V swiglu(V gate, V up) { return mul(mul(gate, up), inverse(add(splat(1.0f), exp(sub(splat(0.0f), gate))))); }

}  // namespace llmd::LLMD_ISA_NS
