// A block of attention in vectors: scores (queries x keys), softmax of each row, weighted values; all in float32.
#pragma once

#include "attention_ahead.h"

namespace llmd::LLMD_ISA_NS {
namespace {

// What a tile of queries works in, carved out of its scratch memory. R rows.
struct Work {
    float* q;        // [R, dim], scaled
    float* scores;   // [R, BLOCK] of one head, then weights
    float* values;   // [R, dim] of one block
    float* total;    // [R, dim] merged
    float* max;      // [R] of one block
    float* sum;      // [R] of one block
    float* old_max;  // [R] merged
    float* old_sum;  // [R] merged
    char* gathered;  // [TILES] tiles of one head

    // The same from row r on, for a head that is not the first.
    Work from(int r, int dim) const {
        return {q + r * dim, scores, values + r * dim, total + r * dim, max + r, sum + r, old_max + r, old_sum + r, gathered};
    }
};

Work carve(void* scratch, const KvShape& kv, int rows) {
    const size_t r = size_t(rows + TILE - 1) / TILE * TILE, dim = size_t(kv.dim());  // so that all begins at a line of the cache
    float* at = static_cast<float*>(scratch);
    const auto take = [&at](size_t n) { return (at += n) - n; };
    Work w;
    w.q = take(r * dim);
    w.scores = take(r * BLOCK);
    w.values = take(r * dim);
    w.total = take(r * dim);
    w.max = take(r);
    w.sum = take(r);
    w.old_max = take(r);
    w.old_sum = take(r);
    w.gathered = reinterpret_cast<char*>(at);
    return w;
}

// Register tiles: QR rows x KT key tiles for scores, QR rows x VT vectors of values.
#if defined(__AVX512F__)
constexpr int QR = 6, KT = 4, VT = 4;
#elif defined(__AVX2__)
constexpr int QR = 3, KT = 2, VT = 2;
#else
constexpr int QR = 2, KT = 1, VT = 1;
#endif

template <class T, int R>
void scores_of(const float* q, const BlockTiles& b, int dim, float* out, Ahead& ahead) {
    constexpr int P = T::P;
    for (int t0 = 0; t0 < b.count; t0 += KT) {
        V acc[R][KT];
        for (int r = 0; r < R; r++)
            for (int t = 0; t < KT; t++) acc[r][t] = splat(0.0f);
        for (int d = 0; d < dim; d += P) {
            V k[KT][P];
            for (int t = 0; t < KT; t++) {
                T::unpack(b.k[t0 + t] + d * (TILE * 4 / P), k[t]);
                if (!T::scaled) continue;
                const V scale = load_bf16(b.k_scales[t0 + t] + d / TILE * TILE);
                for (int p = 0; p < P; p++) k[t][p] = mul(k[t][p], scale);
            }
            ahead.ask(KT);
            for (int p = 0; p < P; p++)
                for (int r = 0; r < R; r++) {
                    const V x = splat(q[r * dim + d + p]);
                    for (int t = 0; t < KT; t++) acc[r][t] = fma(x, k[t][p], acc[r][t]);
                }
        }
        for (int r = 0; r < R; r++)
            for (int t = 0; t < KT; t++) store(out + r * BLOCK + (t0 + t) * TILE, acc[r][t]);
    }
}

template <class T, int R, int N>
void values_at(const float* weights, const char* const* tiles, int keys, int dim, int d, float* out, Ahead& ahead) {
    constexpr int P = T::P;
    V acc[R][N];
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) acc[r][n] = splat(0.0f);
    for (int key = 0; key < keys; key += P) {
        const char* at = tiles[key / TILE] + (key % TILE / P * dim + d) * 4;
        V v[N][P];
        for (int n = 0; n < N; n++) T::unpack(at + n * TILE * 4, v[n]);
        ahead.ask(N);
        for (int p = 0; p < P; p++)
            for (int r = 0; r < R; r++) {
                const V x = splat(weights[r * BLOCK + key + p]);
                for (int n = 0; n < N; n++) acc[r][n] = fma(x, v[n][p], acc[r][n]);
            }
    }
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) store(out + r * dim + d + n * TILE, acc[r][n]);
}

template <class T, int R>
void values_of(const float* weights, const char* const* tiles, int keys, int dim, float* out, Ahead& ahead) {
    int d = 0;
    for (; d + VT * TILE <= dim; d += VT * TILE) values_at<T, R, VT>(weights, tiles, keys, dim, d, out, ahead);
    for (; d < dim; d += TILE) values_at<T, R, 1>(weights, tiles, keys, dim, d, out, ahead);
}

// Calls step<R>(row) for all rows, R at most QR at a time. A row's arithmetic does not depend on R.
template <class Step>
void for_rows(int rows, Step step) {
    int row = 0;
    for (; row + QR <= rows; row += QR) step.template run<QR>(row);
    switch (rows - row) {
#if defined(__AVX512F__)
        case 5: return step.template run<5>(row);
        case 4: return step.template run<4>(row);
        case 3: return step.template run<3>(row);
#endif
#if defined(__AVX2__)
        case 2: return step.template run<2>(row);
#endif
        case 1: return step.template run<1>(row);
        default: return;
    }
}

template <class T>
struct Scores {
    const Work& w;
    const BlockTiles& b;
    int dim;
    Ahead& ahead;
    template <int R>
    void run(int row) const { scores_of<T, R>(w.q + row * dim, b, dim, w.scores + row * BLOCK, ahead); }
};

template <class T>
struct Values {
    const Work& w;
    const char* const* tiles;
    int keys, dim;
    Ahead& ahead;
    template <int R>
    void run(int row) const { values_of<T, R>(w.scores + row * BLOCK, tiles, keys, dim, w.values + row * dim, ahead); }
};

// Scores [lo, hi) of a row become weights, the others 0. `scales`: of each tile's values, or null.
void softmax(float* row, int tiles, int lo, int hi, const float* const* scales, float& max, float& sum_) {
    if (lo >= hi) {
        for (int t = 0; t < tiles; t++) store(row + t * TILE, splat(0.0f));
        max = LOWEST;
        sum_ = 0.0f;
        return;
    }
    const V nothing = splat(-__builtin_inff());
    V highest = splat(LOWEST);
    for (int t = 0; t < tiles; t++) {
        V s = load(row + t * TILE);
        const int from = lo - t * TILE, to = hi - t * TILE;
        if (from > 0 || to < TILE) s = in_lanes(least(most(from, 0), TILE), least(most(to, 0), TILE), s, nothing);
        highest = llmd::LLMD_ISA_NS::max(highest, s);
        store(row + t * TILE, s);
    }
    max = top(highest);
    const V reference = splat(max);
    V total = splat(0.0f);
    for (int t = 0; t < tiles; t++) {
        V p = exp(sub(load(row + t * TILE), reference));
        total = add(total, p);
        if (scales) p = mul(p, load(scales[t]));
        store(row + t * TILE, p);
    }
    sum_ = sum(total);
}

template <class T>
void one_block(const Where& at, int block, const Work& w, Ahead& ahead) {
    const BlockTiles b = block_tiles<T>(at, block, w.gathered);
    const int dim = at.op.kv.dim(), group = at.op.group();
    ahead.begin(b.count);
    for_rows(at.tokens * group, Scores<T>{w, b, dim, ahead});
    for (int token = 0, row = 0; token < at.tokens; token++) {
        int lo, hi;
        visible(at, block, token, b.keys, lo, hi);
        for (int g = 0; g < group; g++, row++) softmax(w.scores + row * BLOCK, b.count, lo, hi, T::scaled ? b.v_scales : nullptr, w.max[row], w.sum[row]);
    }
    for_rows(at.tokens * group, Values<T>{w, b.v, b.keys, dim, ahead});
}

// Fills w's values, max and sum.
void vector_block(const Where& at, int block, const Work& w, Ahead& ahead) {
    switch (at.op.kv.type) {
        case KV_F32: return one_block<F32>(at, block, w, ahead);
        case KV_BF16: return one_block<Bf16>(at, block, w, ahead);
        default: return one_block<I8>(at, block, w, ahead);
    }
}

}  // namespace
}  // namespace llmd::LLMD_ISA_NS
