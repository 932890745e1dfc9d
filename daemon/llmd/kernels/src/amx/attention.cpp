// Attention on the matrix unit (AMX) in bf16: queries and weights are rounded too, sums stay float32. An int8 cache becomes bf16 block by block. Decode and
// prefill go the same way, so that a token's bits do not depend on which of them it came through. A float32 cache goes as with AVX-512.
#include "../isa/attention_vectors.h"
#include "tiles.h"

namespace llmd::LLMD_ISA_NS {
namespace {

#ifdef AMX

// Tiles 0..3: sums of `rows` rows x 16; 4 and 5: a row's 32 numbers, and 32 x 16 of the cache; 6 and 7: the same for 16.
AMX void configure(int rows) {
    TileConfig config;
    for (int i = 0; i < 8; i++) config.bytes_per_row[i] = 64, config.rows[i] = uint8_t(rows);
    config.rows[5] = 16;
    config.bytes_per_row[6] = 32;
    config.rows[7] = 8;
    written();
    _tile_loadconfig(&config);
}

AMX VEC_INLINE void zero_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

// Sums 0..N-1 beside each other: rows `stride` bytes apart.
template <int N>
AMX VEC_INLINE void store_sums(float* out, int stride) {
    _tile_stored(0, out, stride);
    if (N > 1) _tile_stored(1, out + TILE, stride);
    if (N > 2) _tile_stored(2, out + 2 * TILE, stride);
    if (N > 3) _tile_stored(3, out + 3 * TILE, stride);
}

// Scores of a tile of rows and N tiles of keys. q: bf16 rows in place of w.q's floats, so `dim` floats apart.
template <int N>
AMX void tile_scores(const float* q, const char* const* keys, int dim, float* out, Ahead& ahead) {
    const int stride = dim * 4;
    zero_sums();
    int d = 0;
    for (; d + 32 <= dim; d += 32) {
        _tile_loadd(4, reinterpret_cast<const char*>(q) + d * 2, stride);
        _tile_loadd(5, keys[0] + d * 32, 64);
        _tile_dpbf16ps(0, 4, 5);
        ahead.lines(16);
        if (N > 1) {
            _tile_loadd(5, keys[1] + d * 32, 64);
            _tile_dpbf16ps(1, 4, 5);
            ahead.lines(16);
        }
        if (N > 2) {
            _tile_loadd(5, keys[2] + d * 32, 64);
            _tile_dpbf16ps(2, 4, 5);
            ahead.lines(16);
        }
        if (N > 3) {
            _tile_loadd(5, keys[3] + d * 32, 64);
            _tile_dpbf16ps(3, 4, 5);
            ahead.lines(16);
        }
    }
    if (d < dim) {
        _tile_loadd(6, reinterpret_cast<const char*>(q) + d * 2, stride);
        _tile_loadd(7, keys[0] + d * 32, 64);
        _tile_dpbf16ps(0, 6, 7);
        if (N > 1) {
            _tile_loadd(7, keys[1] + d * 32, 64);
            _tile_dpbf16ps(1, 6, 7);
        }
        if (N > 2) {
            _tile_loadd(7, keys[2] + d * 32, 64);
            _tile_dpbf16ps(2, 6, 7);
        }
        if (N > 3) {
            _tile_loadd(7, keys[3] + d * 32, 64);
            _tile_dpbf16ps(3, 6, 7);
        }
        ahead.lines(8 * N);
    }
    store_sums<N>(out, BLOCK * 4);
}

AMX void all_scores(const float* q, const char* const* keys, int count, int dim, float* out, Ahead& ahead) {
    int t = 0;
    for (; t + 4 <= count; t += 4) tile_scores<4>(q, keys + t, dim, out + t * TILE, ahead);
    switch (count - t) {
        case 3: return tile_scores<3>(q, keys + t, dim, out + t * TILE, ahead);
        case 2: return tile_scores<2>(q, keys + t, dim, out + t * TILE, ahead);
        case 1: return tile_scores<1>(q, keys + t, dim, out + t * TILE, ahead);
        default: return;
    }
}

// Weighted values of a tile of rows, N times 16 dimensions of them. weights: bf16 rows in place of w.scores' floats, so BLOCK floats apart.
template <int N>
AMX void tile_values(const float* weights, const char* const* values, int d, int count, int dim, float* out, Ahead& ahead) {
    const int stride = dim * 4;
    zero_sums();
    for (int t = 0; t < count; t++) {
        const char* v = values[t] + d * 4;
        _tile_loadd(6, reinterpret_cast<const char*>(weights) + t * 32, BLOCK * 4);
        _tile_loadd(7, v, stride);
        _tile_dpbf16ps(0, 6, 7);
        ahead.lines(8);
        if (N > 1) {
            _tile_loadd(7, v + 64, stride);
            _tile_dpbf16ps(1, 6, 7);
            ahead.lines(8);
        }
        if (N > 2) {
            _tile_loadd(7, v + 128, stride);
            _tile_dpbf16ps(2, 6, 7);
            ahead.lines(8);
        }
        if (N > 3) {
            _tile_loadd(7, v + 192, stride);
            _tile_dpbf16ps(3, 6, 7);
            ahead.lines(8);
        }
    }
    store_sums<N>(out + d, stride);
}

AMX void all_values(const float* weights, const char* const* values, int count, int dim, float* out, Ahead& ahead) {
    int d = 0;
    for (; d + 4 * TILE <= dim; d += 4 * TILE) tile_values<4>(weights, values, d, count, dim, out, ahead);
    switch ((dim - d) / TILE) {
        case 3: return tile_values<3>(weights, values, d, count, dim, out, ahead);
        case 2: return tile_values<2>(weights, values, d, count, dim, out, ahead);
        case 1: return tile_values<1>(weights, values, d, count, dim, out, ahead);
        default: return;
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
AMX void bf16_softmax(float* row, int tiles, int lo, int hi, const float* const* scales, float& max, float& sum_, int lines, Ahead& ahead) {
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
        round_bf16(weights + t * TILE, scales ? mul(p, load(scales[t])) : p);
        ahead.lines(lines);
    }
    sum_ = sum(total);
}

// A line of an int8 tile as two of a bf16 one: the four numbers of each word become two words in two lines. Numbers up to 127 are bf16 as they are.
VEC_INLINE void expand_exact(const char* from, char* to, int second) {
    V n[4];
    load_i8_quads(from, n);
    for (int i = 0; i < 2; i++) {
        const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(n[2 * i].v), 16), high = _mm512_castps_si512(n[2 * i + 1].v);
        _mm512_storeu_si512(to + i * second, _mm512_or_si512(low, high));
    }
}

AMX VEC_INLINE void expand_scaled(const char* from, V scale, char* to) {
    // Numbers i and 16 + i side by side.
    const __m512i counting = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i turns = _mm512_or_si512(_mm512_slli_epi32(_mm512_add_epi32(counting, _mm512_set1_epi32(16)), 16), counting);
    V n[4];
    load_i8_quads(from, n);
    for (int i = 0; i < 2; i++) {
        const __m512bh halves = _mm512_cvtne2ps_pbh(mul(n[2 * i + 1], scale).v, mul(n[2 * i], scale).v);
        __m512i words;
        memcpy(&words, &halves, sizeof words);
        _mm512_storeu_si512(to + i * 64, _mm512_permutexvar_epi16(turns, words));
    }
}

// The block's int8 tiles as bf16 ones, keys with their scales; those of values are the softmax's business.
AMX void expand(BlockTiles& b, int dim, char* out, Ahead& ahead) {
    for (int t = 0; t < b.count; t++) {
        const char *k = b.k[t], *v = b.v[t];
        b.k[t] = out;
        for (int d = 0; d < dim; d += TILE) {
            const V scale = load_bf16(b.k_scales[t] + d);
            for (int i = 0; i < TILE; i += 4, k += 64, out += 128) expand_scaled(k, scale, out);
            ahead.ask(4);
        }
        b.v[t] = out;
        for (int slot = 0; slot < TILE; slot += 4, out += dim * 4) {
            for (int d = 0; d < dim; d += TILE, v += 64, out += 64) expand_exact(v, out, dim * 4);
            ahead.ask(4);
        }
    }
}

// Sixteen rows at a time, so that their scores stay near. Scores of the next sixteen are asked of the matrix unit before the softmax of these.
AMX void amx_block(const Where& at, const BlockTiles& b, int block, const float* const* scales, const Work& w, Ahead& ahead) {
    const int dim = at.op.kv.dim(), group = at.op.group(), rows = at.tokens * group;
    float *now = w.scores, *next = w.scores + TILE * BLOCK;
    int lo, hi;
    const int lines = most(24 / group, 1);  // a head's softmax goes on asking: about as many, whatever the group
    // Tiles of keys that rows up to `row` see.
    const auto tiles_of = [&](int row) {
        visible(at, block, (least(row + TILE, rows) - 1) / group, b.keys, lo, hi);
        return (hi + TILE - 1) / TILE;
    };
    written();
    int count = tiles_of(0);
    all_scores(w.q, b.k, count, dim, now, ahead);
    for (int row = 0; row < rows; row += TILE) {
        const int n = least(TILE, rows - row), here = count;
        if (row + TILE < rows) all_scores(w.q + (row + TILE) * dim, b.k, count = tiles_of(row + TILE), dim, next, ahead);
        written();
        for (int i = 0; i < n; i++) {
            visible(at, block, (row + i) / group, b.keys, lo, hi);
            bf16_softmax(now + i * BLOCK, here, lo, hi, scales, w.max[row + i], w.sum[row + i], lines, ahead);
        }
        written();
        all_values(now, b.v, here, dim, w.values + row * dim, ahead);
        float* const done = now;
        now = next;
        next = done;
    }
    written();
}

AMX void bf16_block(const Where& at, int block, const Work& w, Ahead& ahead) {
    const BlockTiles b = block_tiles<Bf16>(at, block, w);
    ahead.begin(b.count);
    amx_block(at, b, block, nullptr, w, ahead);
}

AMX void i8_block(const Where& at, int block, const Work& w, Ahead& ahead) {
    BlockTiles b = block_tiles<I8>(at, block, w);
    ahead.begin(b.count);
    expand(b, at.op.kv.dim(), w.expanded, ahead);
    written();
    amx_block(at, b, block, b.v_scales, w, ahead);
}

struct Tiles {
    static AMX void begin(const Attention& op, int rows) {
        if (op.kv.type != KV_F32) configure(least(rows, TILE));
    }
    static AMX void end(const Attention& op) {
        if (op.kv.type != KV_F32) _tile_release();
    }
    static void load(const Where& at, const Work& w) {
        load_queries(at, w);
        if (at.op.kv.type == KV_F32) return;
        // In place: a row's bf16 take its first half.
        const int dim = at.op.kv.dim();
        for (int row = 0; row < at.tokens * at.op.group(); row++) {
            float* q = w.q + row * dim;
            for (int d = 0; d < dim; d += W) store_bf16(reinterpret_cast<uint16_t*>(q) + d, llmd::LLMD_ISA_NS::load(q + d));
        }
        written();
    }
    static void block(const Where& at, int index, const Work& w, Ahead& ahead) {
        switch (at.op.kv.type) {
            case KV_BF16: return bf16_block(at, index, w, ahead);
            case KV_I8: return i8_block(at, index, w, ahead);
            default: return Vectors::block(at, index, w, ahead);
        }
    }
};

#else
using Tiles = Vectors;
#endif

}  // namespace

extern const AttentionKernels attention_kernels = {store_tile, tile<Tiles>, decode<Tiles>, blocks<Tiles>, merge};

}  // namespace llmd::LLMD_ISA_NS
