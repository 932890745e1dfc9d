// The weights of up to sixteen rows of a block's scores: 2 to the scores less the row's maximum rounded up, as bf16. Their sums are left to the matrix unit.
//
// While the matrix unit works, one of the two vector ports does no products: adding, comparing and looking up cost half as much.
#pragma once

#include "../isa/attention_common.h"
#include "tiles.h"

#ifdef AMX
namespace llmd::LLMD_ISA_NS {
namespace {

// From here on what is too small for a normal number becomes 0: the CPU takes a hundred nanoseconds for a vector with such a result otherwise. Returns what
// _mm_setcsr takes to undo it.
VEC_INLINE unsigned no_tiny_numbers() {
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8000);
    return before;
}

// 2**y for y <= 0, to 1.2e-4 of it: linear in each sixteenth. 0 at -inf, NaN at NaN.
VEC_INLINE V quick_exp2(V y) {
    const V at = {_mm512_setr_ps(0.99988270f, 1.04415129f, 1.09037982f, 1.13865506f, 1.18906763f, 1.24171215f, 1.29668744f, 1.35409670f, 1.41404768f, 1.47665292f,
                                 1.54202993f, 1.61030143f, 1.68159556f, 1.75604616f, 1.83379297f, 1.91498192f)};
    const V slope = {_mm512_setr_ps(0.70829743f, 0.73965644f, 0.77240382f, 0.80660106f, 0.84231234f, 0.87960470f, 0.91854812f, 0.95921572f, 1.00168383f,
                                    1.04603216f, 1.09234396f, 1.14070616f, 1.19120954f, 1.24394889f, 1.29902321f, 1.35653588f)};
    constexpr int DOWN = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
    // The last place of numbers near this one is 1/16, so its last four bits are the sixteenth; what is more than 2**18 below has no need of it.
    const __m512i sixteenth = _mm512_castps_si512(_mm512_add_round_ps(y.v, _mm512_set1_ps(0x1.8p19f), DOWN));
    const V rest = {_mm512_reduce_ps(y.v, 4 << 4 | DOWN)};
    const V p = fma(rest, {_mm512_permutexvar_ps(sixteenth, slope.v)}, {_mm512_permutexvar_ps(sixteenth, at.v)});
    return {_mm512_scalef_ps(p.v, y.v)};  // 2**(y rounded down)
}

// Lane i: the largest of row i's sixteen numbers.
VEC_INLINE V largest_of_rows(const float* rows) {
    // Halves, then quarters, then numbers of two rows at a time; so ordered that row i comes out in lane i.
    constexpr int ORDER[TILE] = {0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15};
    __m512 x[TILE];
#pragma GCC unroll 16
    for (int i = 0; i < TILE; i++) x[i] = _mm512_loadu_ps(rows + ORDER[i] * TILE);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) x[i] = _mm512_max_ps(_mm512_shuffle_f32x4(x[i], x[i + 8], 0x44), _mm512_shuffle_f32x4(x[i], x[i + 8], 0xee));
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) x[i] = _mm512_max_ps(_mm512_shuffle_f32x4(x[i], x[i + 4], 0x88), _mm512_shuffle_f32x4(x[i], x[i + 4], 0xdd));
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) x[i] = _mm512_max_ps(_mm512_unpacklo_ps(x[i], x[i + 2]), _mm512_unpackhi_ps(x[i], x[i + 2]));
    const __m512d a = _mm512_castps_pd(x[0]), b = _mm512_castps_pd(x[1]);
    return {_mm512_max_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)))};
}

// Which keys of a block each of the rows sees: [lo, hi). `all`: all of those that are computed with.
struct Sight {
    bool all;
    int lo[TILE], hi[TILE];

    LLMD_INLINE __mmask16 lanes(int row, int tile) const {
        const int from = least(most(lo[row] - tile * TILE, 0), TILE), to = least(most(hi[row] - tile * TILE, 0), TILE);
        return __mmask16(((1u << to) - 1) & ~((1u << from) - 1));
    }
};

template <bool ALL>
struct Softmax {
    float* scores;  // rows BLOCK apart; the weights take the first half of a row's place
    int rows, tiles;
    const Sight& sight;

    LLMD_INLINE V largest(int row) const {
        V highest = splat(LOWEST);
        for (int t = 0; t < tiles; t++) {
            const V score = load(scores + row * BLOCK + t * TILE);
            highest.v = ALL ? _mm512_max_ps(highest.v, score.v) : _mm512_mask_max_ps(highest.v, sight.lanes(row, t), highest.v, score.v);
        }
        return highest;
    }

    LLMD_INLINE V weight(int row, int t, V reference) const {
        const V p = quick_exp2(sub(load(scores + row * BLOCK + t * TILE), reference));
        return {ALL ? p.v : _mm512_maskz_mov_ps(sight.lanes(row, t), p.v)};
    }

    AMX LLMD_INLINE void weigh(int row, V reference) const {
        uint16_t* out = reinterpret_cast<uint16_t*>(scores + row * BLOCK);
        for (int t = 0; t < tiles; t += 2) {
            const V first = weight(row, t, reference), second = t + 1 < tiles ? weight(row, t + 1, reference) : splat(0.0f);
            const __m512bh both = _mm512_cvtne2ps_pbh(second.v, first.v);
            memcpy(out + t * TILE, &both, sizeof both);
        }
    }

    // Sets the maxima of sixteen rows, rounded up, those behind the last one to anything.
    LLMD_INLINE void set_largest(const float* parts, float* max) const {
        store(max, {_mm512_roundscale_ps(largest_of_rows(parts).v, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC)});
    }

    AMX void run(float* max) const {
        alignas(64) float parts[TILE * TILE];
        for (int row = 0; row < rows; row++) store(parts + row * TILE, largest(row));
        set_largest(parts, max);
        for (int row = 0; row < rows; row++) weigh(row, splat(max[row]));
    }

    // The same for sixteen rows, with `steps` between.
    template <class Steps>
    AMX LLMD_INLINE void run_between(float* max, const Steps& steps) const {
        alignas(64) float parts[TILE * TILE];
        look_between<0>(parts, steps);
        set_largest(parts, max);
        weigh_between<0>(max, steps);
    }

  private:
    // Times that steps are taken: while looking, and while weighing.
    static constexpr int LOOKING = 4, WEIGHING = TILE;

    template <int INDEX, class Steps>
    AMX LLMD_INLINE void look_between(float* parts, const Steps& steps) const {
        if constexpr (INDEX < LOOKING) {
            steps.template run<INDEX, LOOKING + WEIGHING>();
            constexpr int SHARE = TILE / LOOKING;
            for (int row = INDEX * SHARE; row < (INDEX + 1) * SHARE; row++) store(parts + row * TILE, largest(row));
            look_between<INDEX + 1>(parts, steps);
        }
    }

    template <int INDEX, class Steps>
    AMX LLMD_INLINE void weigh_between(const float* max, const Steps& steps) const {
        if constexpr (INDEX < WEIGHING) {
            steps.template run<LOOKING + INDEX, LOOKING + WEIGHING>();
            weigh(INDEX, splat(max[INDEX]));
            weigh_between<INDEX + 1>(max, steps);
        }
    }
};

AMX void softmax(float* scores, int rows, int tiles, const Sight& sight, float* max) {
    if (sight.all) Softmax<true>{scores, rows, tiles, sight}.run(max);
    else Softmax<false>{scores, rows, tiles, sight}.run(max);
    written();
}

}  // namespace
}  // namespace llmd::LLMD_ISA_NS
#endif
