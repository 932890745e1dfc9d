// A vector of floats as wide as the ISA has it (F: LANES of them; I: as many int32), and the few operations that the kernels need.
//
// Each operation is one rounding at most and rounds alike on every ISA, so a kernel that gives each output element its own chain of operations
// gives the same bits everywhere. Sums across a vector are not among them: `sum` has a fixed order per ISA only.
// Only for files in src/isa/ (see isa.h).
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

namespace llmd {
namespace LLMD_ISA_NS {

INLINE int min_int(int a, int b) { return a < b ? a : b; }

#if defined(__AVX512F__)

constexpr int LANES = 16;
using F = __m512;
using I = __m512i;

INLINE F zero() { return _mm512_setzero_ps(); }
INLINE F set1(float x) { return _mm512_set1_ps(x); }
INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
INLINE void store(float* p, F x) { _mm512_storeu_ps(p, x); }
INLINE void store_past_caches(float* p, F x) { _mm512_stream_ps(p, x); }  // aligned
INLINE F load_first(const float* p, int n) { return _mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p); }  // 0 <= n <= LANES; the rest is 0
INLINE void store_first(float* p, F x, int n) { _mm512_mask_storeu_ps(p, __mmask16((1u << n) - 1), x); }
INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
INLINE F max_(F a, F b) { return _mm512_max_ps(a, b); }
INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }  // a * b + c
INLINE float sum(F x) { return _mm512_reduce_add_ps(x); }
INLINE float max_of(F x) { return _mm512_reduce_max_ps(x); }
INLINE F load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
INLINE F load_bf16(const uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
INLINE I set1_int(int32_t x) { return _mm512_set1_epi32(x); }
INLINE F to_float(I x) { return _mm512_cvtepi32_ps(x); }

#elif defined(__AVX2__)

constexpr int LANES = 8;
using F = __m256;
using I = __m256i;

INLINE __m256i mask_of_first(int n) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)); }

INLINE F zero() { return _mm256_setzero_ps(); }
INLINE F set1(float x) { return _mm256_set1_ps(x); }
INLINE F load(const float* p) { return _mm256_loadu_ps(p); }
INLINE void store(float* p, F x) { _mm256_storeu_ps(p, x); }
INLINE void store_past_caches(float* p, F x) { _mm256_stream_ps(p, x); }
INLINE F load_first(const float* p, int n) { return _mm256_maskload_ps(p, mask_of_first(n)); }
INLINE void store_first(float* p, F x, int n) { _mm256_maskstore_ps(p, mask_of_first(n), x); }
INLINE F add(F a, F b) { return _mm256_add_ps(a, b); }
INLINE F sub(F a, F b) { return _mm256_sub_ps(a, b); }
INLINE F mul(F a, F b) { return _mm256_mul_ps(a, b); }
INLINE F div(F a, F b) { return _mm256_div_ps(a, b); }
INLINE F max_(F a, F b) { return _mm256_max_ps(a, b); }
INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
INLINE float sum(F x) {
    const __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}
INLINE float max_of(F x) {
    const __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 pair = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(pair, _mm_movehdup_ps(pair)));
}
INLINE F load_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
INLINE F load_bf16(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
INLINE I set1_int(int32_t x) { return _mm256_set1_epi32(x); }
INLINE F to_float(I x) { return _mm256_cvtepi32_ps(x); }

#else

constexpr int LANES = 1;
using F = float;
using I = int32_t;

INLINE F zero() { return 0.0f; }
INLINE F set1(float x) { return x; }
INLINE F load(const float* p) { return *p; }
INLINE void store(float* p, F x) { *p = x; }
INLINE void store_past_caches(float* p, F x) { *p = x; }
INLINE F load_first(const float* p, int n) { return n > 0 ? *p : 0.0f; }
INLINE void store_first(float* p, F x, int n) {
    if (n > 0) *p = x;
}
INLINE F add(F a, F b) { return a + b; }
INLINE F sub(F a, F b) { return a - b; }
INLINE F mul(F a, F b) { return a * b; }
INLINE F div(F a, F b) { return a / b; }
INLINE F max_(F a, F b) { return a > b ? a : b; }  // as the instruction: b where either is NaN
INLINE F fma(F a, F b, F c) { return fmaf(a, b, c); }
INLINE float sum(F x) { return x; }
INLINE float max_of(F x) { return x; }
INLINE F load_f16(const uint16_t* p) {
    const uint32_t sign = uint32_t(*p & 0x8000) << 16, magnitude = *p & 0x7fff;
    float value;
    if (magnitude < 0x400) {  // zero or subnormal: a multiple of 2^-24
        value = float(magnitude) * 0x1p-24f;
    } else {
        const uint32_t bits = magnitude >= 0x7c00 ? 0x7f800000 | (magnitude & 0x3ff) << 13 : (magnitude << 13) + (112u << 23);
        memcpy(&value, &bits, 4);
    }
    uint32_t bits;
    memcpy(&bits, &value, 4);
    bits |= sign;
    memcpy(&value, &bits, 4);
    return value;
}
INLINE F load_bf16(const uint16_t* p) {
    const uint32_t bits = uint32_t(*p) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
INLINE I set1_int(int32_t x) { return x; }
INLINE F to_float(I x) { return float(x); }

#endif

}  // namespace LLMD_ISA_NS
}  // namespace llmd
