// One row of split numbers without the matrix unit, and still the bits that the unit gives: packing weights, which a lone row uses once, would take most of
// the time.
//
// To an output, one instruction of the unit adds the products of 16 pairs so: those of the first numbers one after the other, each rounded into the sum; those
// of the second ones likewise; then the sum of the two. What is too small to be a normal float32 is 0 to it, wherever it comes up.
#pragma once

#include "weights.h"

#ifdef LLMD_HAS_AMX
namespace llmd {
namespace LLMD_ISA_NS {
namespace {

// Which parts of an activation and of a weight make the products, in the order in which the unit is given them.
struct Product {
    int x, w;
};
template <int FORMAT>
constexpr Product PRODUCTS[] = {{2, 0}, {1, 0}, {1, 1}, {0, 1}, {0, 0}};
template <>
constexpr Product PRODUCTS<FORMAT_F32>[] = {{2, 0}, {1, 0}, {1, 1}, {0, 1}, {0, 2}, {0, 0}};

template <int FORMAT>
constexpr int PRODUCT_COUNT = sizeof PRODUCTS<FORMAT> / sizeof(Product);

// The vector unit's control word with which it computes as the matrix unit always does: to the nearest, without exceptions (0x1f80), and with 0 for results and
// for operands that are too small to be normal.
constexpr unsigned AS_THE_UNIT = 0x1f80 | 1 << 15 | 1 << 6;

VEC_INLINE void set_control(unsigned word) {
    written();  // nothing that begins or ends in memory passes this
    _mm_setcsr(word);
    written();
}

// A group of a row as float32: of each part the first numbers of all pairs, then the second ones.
using RowGroup = float[ROWS_SPLIT][2][GROUP / 2];

VEC_INLINE void widen(const uint16_t* x, RowGroup out) {
    for (int part = 0; part < ROWS_SPLIT; ++part, x += ROW_BLOCK * GROUP) {
        V first, second;
        load_bf16_pairs(x, first, second);
        store(out[part][0], first), store(out[part][1], second);
    }
}

// A weight as its parts. The last is what the others leave, which is a bf16 by itself.
template <int FORMAT>
VEC_INLINE void split(V w, V* parts) {
    constexpr int LAST = weight_parts(FORMAT) - 1;
    for (int part = 0; part < LAST; ++part) {
        parts[part].v = upper(w.v);
        w.v = rest(w.v);
    }
    parts[LAST] = w;
}

// Adds the products of a group, whose weights are at w, to the sums of outputs 0 to 15 and 16 to 31 of a strip: both at once, since one chain of additions
// after the other would wait for itself.
template <int FORMAT>
VEC_INLINE void add_group(const char* w, const RowGroup x, V totals[2]) {
    using Weights = SplitStrip<FORMAT>;
    constexpr int COUNT = PRODUCT_COUNT<FORMAT>, ROW_BYTES = PANEL_FP * Weights::SIZE, HALF_BYTES = ROW_BYTES / 2;
    V sums[2][2][COUNT] = {};
#pragma GCC unroll 1
    for (int four = 0; four < GROUP / 4; ++four) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i, w += ROW_BYTES) {
            const int second = i / 2, pair = 2 * four + i % 2;  // pairs are of elements 4j and 4j + 2, 4j + 1 and 4j + 3
            for (int b = 0; b < ROW_BYTES; b += 64) __builtin_prefetch(w + Weights::PREFETCH_BYTES + b, 0, 2);
            written();  // these stay apart: gathered, as the compiler likes them, they take up to half as long again
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                V parts[3];
                split<FORMAT>({floats<FORMAT>(w + half * HALF_BYTES)}, parts);
#pragma GCC unroll 8
                for (int p = 0; p < COUNT; ++p)
                    sums[half][second][p] = fma(splat(x[PRODUCTS<FORMAT>[p].x][second][pair]), parts[PRODUCTS<FORMAT>[p].w], sums[half][second][p]);
            }
        }
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 8
        for (int p = 0; p < COUNT; ++p) totals[half] = add(totals[half], add(sums[half][0][p], sums[half][1][p]));
    }
}

// The sums of a strip for one row.
template <int FORMAT>
void multiply_row(const Linear& op, int index, int row, float* first, float* second) {
    const unsigned control = _mm_getcsr();
    set_control(AS_THE_UNIT);
    const SplitStrip<FORMAT> strip(op.w, index);
    V totals[2] = {splat(0.0f), splat(0.0f)};
    for (int g = 0; g < op.w.k / GROUP; ++g) {
        alignas(64) RowGroup x;
        widen(op.xq.bf16(row, g), x);
        add_group<FORMAT>(strip.group(g), x, totals);
    }
    store(first, totals[0]), store(second, totals[1]);
    set_control(control);
}

}  // namespace
}  // namespace LLMD_ISA_NS
}  // namespace llmd
#endif
