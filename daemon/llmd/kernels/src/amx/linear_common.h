// What the linears on the matrix unit (AMX) share.
#pragma once

#include "../isa/vec16.h"
#include "../linear.h"
#include "tiles.h"

#ifdef LLMD_HAS_AMX
namespace llmd {
namespace LLMD_ISA_NS {
namespace {

VEC_INLINE int least(int a, int b) { return a < b ? a : b; }

// A thread's own T. Its address, a call in a shared library, is not to be looked up at each use.
template <class T>
T& once(T& mine) {
    T* at = &mine;
    __asm__("" : "+r"(at));
    return *at;
}

VEC_INLINE void put_row(const Linear& op, float* y, V x, int columns, bool past) {
    if (past && columns == PANEL && reinterpret_cast<uintptr_t>(y) % 64 == 0) return _mm512_stream_ps(y, x.v);
    store(y, op.flags & LINEAR_ADD ? add(load(y, columns), x) : x, columns);
}

// 16 numbers as bf16 in the order that tiles of activations have: of each four, the two in the middle change places.
AMX_INLINE __m256i ordered(__m512 x) {
    const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
    return _mm256_shuffle_epi8((__m256i)_mm512_cvtneps_pbh(x), order);
}

VEC_INLINE __m512 widened(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

// Group g of a row, from its two halves.
AMX_INLINE void put_group(const QuantRows& out, int row, int g, __m512 first, __m512 second) {
    const int64_t at = out.at(row, g);
    const __m256i a = ordered(first), b = ordered(second);
    _mm256_storeu_si256((__m256i*)(out.bf16() + GROUP * at), a);
    _mm256_storeu_si256((__m256i*)(out.bf16() + GROUP * at + PANEL), b);
    out.sums[at] = _mm512_reduce_add_ps(_mm512_add_ps(widened(a), widened(b)));
}

VEC_INLINE V gate(V x, V up) { return mul(mul(x, up), inverse(add(splat(1.0f), exp(sub(splat(0.0f), x))))); }

}  // namespace
}  // namespace LLMD_ISA_NS
}  // namespace llmd
#endif
