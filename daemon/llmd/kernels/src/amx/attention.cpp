// Attention on the matrix unit (AMX) where the cache is bf16: queries and weights are rounded to bf16 too, sums stay float32. Decode and prefill go the
// same way, so that a token's bits do not depend on which of them it came through. Other caches go as with AVX-512.
#include "../isa/attention_vectors.h"

#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11
#define AMX __attribute__((target("amx-tile,amx-bf16,avx512bf16")))
#endif

namespace llmd::LLMD_ISA_NS {
namespace {

#ifdef AMX

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_per_row[16] = {};
    uint8_t rows[16] = {};
};

// GCC's tile intrinsics do not say which memory they touch.
VEC_INLINE void touched(const void* p) { __asm__ volatile("" ::"r"(p) : "memory"); }

// Tiles 0..3: sums of `rows` rows x 16; 4 and 5: a row's 32 numbers, and 32 x 16 of the cache; 6 and 7: the same for 16.
AMX void configure(int rows) {
    TileConfig config;
    for (int i = 0; i < 8; i++) config.bytes_per_row[i] = 64, config.rows[i] = uint8_t(rows);
    config.rows[5] = 16;
    config.bytes_per_row[6] = 32;
    config.rows[7] = 8;
    touched(&config);
    _tile_loadconfig(&config);
}

AMX VEC_INLINE void zero_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

// Sums 0..3 beside each other: rows `stride` bytes apart; `count` of them are wanted.
AMX VEC_INLINE void store_sums(float* out, int stride, int count) {
    _tile_stored(0, out, stride);
    if (count > 1) _tile_stored(1, out + TILE, stride);
    if (count > 2) _tile_stored(2, out + 2 * TILE, stride);
    if (count > 3) _tile_stored(3, out + 3 * TILE, stride);
}

// Scores of a tile of rows. q: bf16 rows in place of w.q's floats, so `dim` floats apart.
AMX void tile_scores(const float* q, const char* const* keys, int count, int dim, float* out) {
    const int stride = dim * 4;
    for (int t = 0; t < count; t += 4) {
        zero_sums();
        int d = 0;
        for (; d + 32 <= dim; d += 32) {
            _tile_loadd(4, reinterpret_cast<const char*>(q) + d * 2, stride);
            _tile_loadd(5, keys[t] + d * 32, 64);
            _tile_dpbf16ps(0, 4, 5);
            _tile_loadd(5, keys[t + 1] + d * 32, 64);
            _tile_dpbf16ps(1, 4, 5);
            _tile_loadd(5, keys[t + 2] + d * 32, 64);
            _tile_dpbf16ps(2, 4, 5);
            _tile_loadd(5, keys[t + 3] + d * 32, 64);
            _tile_dpbf16ps(3, 4, 5);
        }
        if (d < dim) {
            _tile_loadd(6, reinterpret_cast<const char*>(q) + d * 2, stride);
            _tile_loadd(7, keys[t] + d * 32, 64);
            _tile_dpbf16ps(0, 6, 7);
            _tile_loadd(7, keys[t + 1] + d * 32, 64);
            _tile_dpbf16ps(1, 6, 7);
            _tile_loadd(7, keys[t + 2] + d * 32, 64);
            _tile_dpbf16ps(2, 6, 7);
            _tile_loadd(7, keys[t + 3] + d * 32, 64);
            _tile_dpbf16ps(3, 6, 7);
        }
        store_sums(out + t * TILE, BLOCK * 4, count - t);
    }
}

// Weighted values of a tile of rows. weights: bf16 rows in place of w.scores' floats, so BLOCK floats apart.
AMX void tile_values(const float* weights, const char* const* values, int count, int dim, float* out) {
    const int stride = dim * 4;
    for (int d = 0; d < dim; d += 4 * TILE) {
        const int wide = (dim - d) / TILE;  // sums that exist: the others repeat the first
        const int second = wide > 1 ? 64 : 0, third = wide > 2 ? 128 : 0, fourth = wide > 3 ? 192 : 0;
        zero_sums();
        for (int t = 0; t < count; t++) {
            const char* v = values[t] + d * 4;
            _tile_loadd(6, reinterpret_cast<const char*>(weights) + t * 32, BLOCK * 4);
            _tile_loadd(7, v, stride);
            _tile_dpbf16ps(0, 6, 7);
            _tile_loadd(7, v + second, stride);
            _tile_dpbf16ps(1, 6, 7);
            _tile_loadd(7, v + third, stride);
            _tile_dpbf16ps(2, 6, 7);
            _tile_loadd(7, v + fourth, stride);
            _tile_dpbf16ps(3, 6, 7);
        }
        store_sums(out + d, stride, wide);
    }
}

// 2**y for y <= 0, to 1e-4: what is then rounded to bf16 needs no more. Exactly 0 below -126, NaN at NaN.
VEC_INLINE V quick_exp2(V y) {
    const __mmask16 counts = _mm512_cmp_ps_mask(y.v, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    const V r = {_mm512_reduce_ps(y.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
    const V p = fma(fma(fma(splat(0.05508868f), r, splat(0.24260405f)), r, splat(0.69327624f)), r, splat(0.99992894f));
    return {_mm512_maskz_scalef_ps(counts, p.v, round(y).v)};
}

AMX VEC_INLINE void round_bf16(uint16_t* p, V a) {
    const __m256bh rounded = _mm512_cvtneps_pbh(a.v);
    memcpy(p, &rounded, sizeof rounded);
}

// As softmax in attention_vectors.h; the weights become bf16 in place.
AMX void bf16_softmax(float* row, int tiles, int lo, int hi, float& max, float& sum_) {
    uint16_t* weights = reinterpret_cast<uint16_t*>(row);
    if (lo >= hi) {
        memset(weights, 0, size_t(tiles) * TILE * 2);
        max = LOWEST;
        sum_ = 0.0f;
        return;
    }
    const V nothing = splat(-__builtin_inff());
    V highest = splat(LOWEST), score[TILES];
    for (int t = 0; t < tiles; t++) {
        const int from = lo - t * TILE, to = hi - t * TILE;
        score[t] = load(row + t * TILE);
        if (from > 0 || to < TILE) score[t] = in_lanes(least(most(from, 0), TILE), least(most(to, 0), TILE), score[t], nothing);
        highest = llmd::LLMD_ISA_NS::max(highest, score[t]);
    }
    max = top(highest);
    constexpr float LOG2E = 1.44269504f;
    const V reference = splat(-max * LOG2E), log2e = splat(LOG2E);
    V total = splat(0.0f);
    for (int t = 0; t < tiles; t++) {
        const V p = quick_exp2(fma(score[t], log2e, reference));
        total = add(total, p);
        round_bf16(weights + t * TILE, p);
    }
    sum_ = sum(total);
}

AMX void amx_block(const Where& at, int block, const Work& w) {
    const BlockTiles b = block_tiles<Bf16>(at, block, w);
    const int dim = at.op.kv.dim(), group = at.op.group(), rows = at.tokens * group;
    configure(least(rows, TILE));
    touched(&b);
    for (int row = 0; row < rows; row += TILE) tile_scores(w.q + row * dim, b.k, b.count, dim, w.scores + row * BLOCK);
    touched(w.scores);
    for (int token = 0, row = 0; token < at.tokens; token++) {
        int lo, hi;
        visible(at, block, token, b.keys, lo, hi);
        for (int g = 0; g < group; g++, row++) bf16_softmax(w.scores + row * BLOCK, b.count, lo, hi, w.max[row], w.sum[row]);
    }
    touched(w.scores);
    for (int row = 0; row < rows; row += TILE) tile_values(w.scores + row * BLOCK, b.v, b.count, dim, w.values + row * dim);
    touched(w.values);
    _tile_release();
}

struct Tiles {
    static void load(const Where& at, const Work& w) {
        load_queries(at, w);
        if (at.op.kv.type != KV_BF16) return;
        // In place: a row's bf16 take its first half.
        const int dim = at.op.kv.dim();
        for (int row = 0; row < at.tokens * at.op.group(); row++) {
            float* q = w.q + row * dim;
            for (int d = 0; d < dim; d += W) store_bf16(reinterpret_cast<uint16_t*>(q) + d, llmd::LLMD_ISA_NS::load(q + d));
        }
    }
    static void block(const Where& at, int index, const Work& w) { at.op.kv.type == KV_BF16 ? amx_block(at, index, w) : Vectors::block(at, index, w); }
};

#else
using Tiles = Vectors;
#endif

}  // namespace

extern const AttentionKernels attention_kernels = {store_tile, tile<Tiles>, block<Tiles>, merge};

}  // namespace llmd::LLMD_ISA_NS
