// Weights as the matrix unit (AMX) reads them: bf16, in tiles of a group of 32 elements by 16 outputs. What 4 or 8 bits stand for is computed in float16 and
// rounded to bf16, so that no scale is left to be applied to sums. Weights of 16 and 32 bits that are no bf16 are split into two and three, which are all of them.
//
// A tile has a row for each pair of elements (4j, 4j + 2) or (4j + 1, 4j + 3), in it the pair of each output.
#pragma once

#include "../isa/vec16.h"
#include "../packed.h"
#include "tiles.h"

#ifdef LLMD_HAS_AMX
namespace llmd {
namespace LLMD_ISA_NS {
namespace {

constexpr int STRIP = 2 * PANEL;  // outputs that are computed at once
using Tile = uint16_t[GROUP * PANEL];

// How many bf16 a weight is written as. Each has a tile of the first half of a strip, then one of the second.
constexpr int weight_parts(int format) { return format == FORMAT_F32 ? 3 : format == FORMAT_F16 ? 2 : 1; }

// Quantized weights are written out a little smaller than they are: a float16 becomes a bf16 by moving its bits, which leaves 5 bits of exponent between
// 2**-31 and 2**0, for weights of 2**-18 (less is not told apart) to 2**12.
constexpr float WEIGHT_UP = 0x1p4f, WRITTEN_DOWN = 0x1p-16f;
constexpr float sum_scale(int format) { return is_quantized(format) ? 1.0f / (WEIGHT_UP * WRITTEN_DOWN) : 1.0f; }

AMX_INLINE __m512h as_half(__m512i x) { return _mm512_castsi512_ph(x); }

// float16 to bf16 * WRITTEN_DOWN, rounded to nearest: as an integer of 16 bits it loses 3 bits, and the sign fills those that the exponent gains.
AMX_INLINE __m512i written_down(__m512h x) {
    const __m512i eighth = _mm512_mulhrs_epi16(_mm512_castph_si512(x), _mm512_set1_epi16(1 << 12));
    return _mm512_ternarylogic_epi32(eighth, _mm512_set1_epi16(short(0x8fff)), _mm512_set1_epi16(0x3000), 0xea);  // (eighth & first) | second
}

// 16 float16, times WEIGHT_UP, each twice
AMX_INLINE __m512h twice(const uint16_t* p) {
    const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return _mm512_mul_ph(as_half(_mm512_or_si512(low, _mm512_slli_epi32(low, 16))), _mm512_set1_ph(_Float16(WEIGHT_UP)));
}

// 0 to 15, twice
AMX_INLINE __m512i sixteen_halves() {
    const __m256i x = _mm256_castph_si256(_mm256_setr_ph(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    return _mm512_inserti64x4(_mm512_castsi256_si512(x), x, 1);
}

AMX_INLINE __mmask32 not_finite(__m512h x) { return _mm512_fpclass_ph_mask(x, 0x01 | 0x80 | 0x08 | 0x10); }  // NaNs and infinities

// A damaged scale shows, as it does where weights are computed in float32.
AMX void spoil(__mmask32 outputs, uint16_t* tile) {
    for (int row = 0; row < GROUP / 2; ++row) _mm512_mask_storeu_epi16(tile + 2 * PANEL * row, outputs, _mm512_set1_epi16(0x7fc0));
}

template <int FORMAT>
AMX_INLINE void write_tile(const QuantPanel& panel, int g, Tile out) {
    const uint8_t* words = panel.quants(g);
    const __m512h scale = twice(panel.scales(g));
    if constexpr (FORMAT == FORMAT_Q8_0) {
        const auto put = [&](int row, __m512i bytes) AMX {
            const __m512i field = _mm512_ternarylogic_epi32(bytes, _mm512_set1_epi16(0xff), _mm512_set1_epi16(0x6400), 0xea);  // 1024 + its number
            _mm512_store_si512(out + 32 * row, written_down(_mm512_mul_ph(_mm512_sub_ph(as_half(field), _mm512_set1_ph(1024 + 128)), scale)));
        };
        for (int j = 0; j < 8; ++j) {
            const __m512i w = _mm512_loadu_si512(words + 64 * j);
            put(2 * j, w);
            put(2 * j + 1, _mm512_srli_epi16(w, 8));
        }
        if (const __mmask32 bad = not_finite(scale)) spoil(bad, out);
    } else {
        const __m512h minimum = FORMAT == FORMAT_Q4_1 ? twice(panel.scales(g) + PANEL) : _mm512_mul_ph(scale, _mm512_set1_ph(-8));
        const __m512i numbers = sixteen_halves();
        const auto put = [&](int row, __m512i w) AMX {  // the lowest 4 bits of each half of a word; numbers are there twice, so that the fifth does not matter
            _mm512_store_si512(out + 32 * row, written_down(_mm512_fmadd_ph(as_half(_mm512_permutexvar_epi16(w, numbers)), scale, minimum)));
        };
        for (int j = 0; j < 4; ++j) {
            const __m512i w = _mm512_loadu_si512(words + 64 * j);
            put(2 * j, w);
            put(2 * j + 1, _mm512_srli_epi16(w, 8));
            put(8 + 2 * j, _mm512_srli_epi16(w, 4));
            put(8 + 2 * j + 1, _mm512_srli_epi16(w, 12));
        }
        if (const __mmask32 bad = not_finite(scale) | not_finite(minimum)) spoil(bad, out);
    }
}

// 32 outputs: two panels of a quantized matrix, one of another. Where the last of an odd number of panels would be, the one before it is taken again.
template <int FORMAT>
struct Strip {
    QuantPanel first, second;
    int64_t step;

    Strip(const Matrix& w, int index)
        : first((char*)w.data, FORMAT, w.k, 2 * index), second((char*)w.data, FORMAT, w.k, 2 * index + (2 * index + 1 < panels(w))), step(2 * quant_panel_bytes(FORMAT, w.k)) {}

    AMX void write(int g, Tile* out) const {
        for (int i = 0; i < quant_group_bytes(FORMAT); i += 64) {
            __builtin_prefetch((const char*)first.quants(0) + step + int64_t(g) * quant_group_bytes(FORMAT) + i, 0, 2);
            __builtin_prefetch((const char*)second.quants(0) + step + int64_t(g) * quant_group_bytes(FORMAT) + i, 0, 2);
        }
        write_tile<FORMAT>(first, g, out[0]);
        write_tile<FORMAT>(second, g, out[1]);
    }
};

// The tiles of a panel of bf16 share out its outputs by fours: the first has 0 to 3, 8 to 11 and so on.
template <>
struct Strip<FORMAT_BF16> {
    static constexpr int PREFETCH_BYTES = 8192;
    const char* panel;

    Strip(const Matrix& w, int index) : panel((const char*)w.data + fp_panel_bytes(FORMAT_BF16, w.k) * index) {}

    AMX void write(int g, Tile* out) const {
        const char* group = panel + int64_t(g) * GROUP * PANEL_FP * 2;
        for (int i = 0; i < GROUP / 2; ++i) {
            const char* first = group + (4 * (i / 2) + i % 2) * (PANEL_FP * 2);
            const __m512i a = _mm512_loadu_si512(first), b = _mm512_loadu_si512(first + 2 * PANEL_FP * 2);
            __builtin_prefetch(group + PREFETCH_BYTES + i * 128, 0, 2);
            __builtin_prefetch(group + PREFETCH_BYTES + i * 128 + 64, 0, 2);
            _mm512_store_si512(out[0] + 32 * i, _mm512_unpacklo_epi16(a, b));
            _mm512_store_si512(out[1] + 32 * i, _mm512_unpackhi_epi16(a, b));
        }
    }
};

// The first 8 binary digits of x, a bf16 that its upper half is; and what is left of x without them
VEC_INLINE __m512 upper(__m512 x) { return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(int(0xffff0000)))); }
VEC_INLINE __m512 rest(__m512 x) { return _mm512_sub_ps(x, upper(x)); }

// Upper halves as pairs of bf16
AMX_INLINE __m512i pairs(__m512 first, __m512 second) {
    return _mm512_ternarylogic_epi32(_mm512_srli_epi32(_mm512_castps_si512(first), 16), _mm512_castps_si512(second), _mm512_set1_epi32(int(0xffff0000)), 0xf8);  // a | (b & c)
}

template <int FORMAT>
VEC_INLINE __m512 floats(const char* p) {
    if constexpr (FORMAT == FORMAT_F32) return _mm512_loadu_ps(p);
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}

template <int FORMAT>
struct SplitStrip {
    static constexpr int SIZE = FORMAT == FORMAT_F32 ? 4 : 2, PREFETCH_BYTES = 8192, GROUP_BYTES = GROUP * PANEL_FP * SIZE;
    const char* panel;

    SplitStrip(const Matrix& w, int index) : panel((const char*)w.data + fp_panel_bytes(FORMAT, w.k) * index) {}

    const char* group(int g) const { return panel + int64_t(g) * GROUP_BYTES; }

    AMX void write(int g, Tile* out) const {
        for (int i = 0; i < GROUP / 2; ++i) {
            const char* pair = group(g) + (4 * (i / 2) + i % 2) * (PANEL_FP * SIZE);
            for (int b = 0; b < 2 * PANEL_FP * SIZE; b += 64) __builtin_prefetch(group(g) + PREFETCH_BYTES + i * 2 * PANEL_FP * SIZE + b, 0, 2);
            for (int half = 0; half < 2; ++half) {
                __m512 a = floats<FORMAT>(pair + half * PANEL * SIZE), b = floats<FORMAT>(pair + (half * PANEL + 2 * PANEL_FP) * SIZE);
                for (int part = 0; part < weight_parts(FORMAT); ++part) {
                    _mm512_store_si512(out[2 * part + half] + 32 * i, pairs(a, b));
                    a = rest(a), b = rest(b);
                }
            }
        }
    }
};
template <>
struct Strip<FORMAT_F16> : SplitStrip<FORMAT_F16> {
    using SplitStrip::SplitStrip;
};
template <>
struct Strip<FORMAT_F32> : SplitStrip<FORMAT_F32> {
    using SplitStrip::SplitStrip;
};

}  // namespace
}  // namespace LLMD_ISA_NS
}  // namespace llmd
#endif
