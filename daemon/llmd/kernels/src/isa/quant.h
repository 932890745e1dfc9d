// Quantizing 32 activations to int8, inline so that what produces them can do it on the way.
#pragma once

#include "../linear.h"
#include "simd.h"

namespace llmd {
namespace LLMD_ISA_NS {

// The largest magnitude of 32 floats. Compared as integers, so that a NaN is larger than an infinity, and that is larger than all else.
INLINE float largest_magnitude(const float* x) {
#if defined(__AVX512F__)
    const __m512i mask = _mm512_set1_epi32(0x7fffffff);
    const __m512i a = _mm512_and_si512(_mm512_loadu_si512(x), mask), b = _mm512_and_si512(_mm512_loadu_si512(x + 16), mask);
    const uint32_t bits = uint32_t(_mm512_reduce_max_epi32(_mm512_max_epi32(a, b)));
#else
    uint32_t bits = 0;
    for (int i = 0; i < GROUP; ++i) {
        uint32_t magnitude;
        memcpy(&magnitude, x + i, 4);
        magnitude &= 0x7fffffff;
        bits = magnitude > bits ? magnitude : bits;
    }
#endif
    float result;
    memcpy(&result, &bits, 4);
    return result;
}

// round-to-nearest-even(x * inverse) for 32 floats, and their sum. What does not fit an int32 (only where the scale is not finite) becomes anything.
INLINE int32_t round_group(const float* x, float inverse, int8_t* q) {
#if defined(__AVX512F__)
    const __m512 factor = _mm512_set1_ps(inverse);
    const __m512i a = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x), factor)), b = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + 16), factor));
    _mm_storeu_si128((__m128i*)q, _mm512_cvtsepi32_epi8(a));
    _mm_storeu_si128((__m128i*)(q + 16), _mm512_cvtsepi32_epi8(b));
    return _mm512_reduce_add_epi32(_mm512_add_epi32(a, b));
#elif defined(__AVX2__)
    const __m256 factor = _mm256_set1_ps(inverse);
    __m256i v[4], sums = _mm256_setzero_si256();
    for (int i = 0; i < 4; ++i) {
        v[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), factor));
        sums = _mm256_add_epi32(sums, v[i]);
    }
    const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
    _mm256_storeu_si256((__m256i*)q, _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
    const __m128i half = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    const __m128i pair = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(pair, _mm_shuffle_epi32(pair, 0xb1)));
#else
    int32_t sum = 0;
    for (int i = 0; i < GROUP; ++i) {
        const float scaled = x[i] * inverse;
        const int value = scaled >= -128.0f && scaled <= 127.5f ? int(lrintf(scaled)) : -128;
        q[i] = int8_t(value);
        sum += value;
    }
    return sum;
#endif
}

// Group g of row `row` of `out`, from 32 floats.
INLINE void quantize_group(const float* x, const QuantRows& out, int row, int g) {
    const float largest = largest_magnitude(x);
    const bool tiny = largest < 1e-30f;  // its inverse would not be finite; false for a NaN
    const float d = tiny ? 0.0f : largest / 127.0f;
    const int64_t at = out.at(row, g);
    const int32_t s = round_group(x, tiny ? 0.0f : 127.0f / largest, out.q + GROUP * at);
    out.d[at] = d;
    out.ds[at] = d * float(s);
    out.s[at] = s;
}

}  // namespace LLMD_ISA_NS
}  // namespace llmd
