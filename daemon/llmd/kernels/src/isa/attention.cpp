// See ../attention.h. A tile's work on one block: scores (queries x keys), softmax of each row, weighted values; then merging.
#include "../attention.h"

#include "vec16.h"

namespace llmd::LLMD_ISA_NS {
namespace {

// Register tiles: QR rows x KT key tiles for scores, QR rows x VT vectors of values.
#if defined(__AVX512F__)
constexpr int QR = 6, KT = 4, VT = 4;
#elif defined(__AVX2__)
constexpr int QR = 3, KT = 2, VT = 2;
#else
constexpr int QR = 2, KT = 1, VT = 1;
#endif

constexpr int TILES = BLOCK / TILE;
constexpr float LOWEST = -1e30f;  // a maximum over nothing: finite, so that differences are numbers

int least(int a, int b) { return a < b ? a : b; }
int most(int a, int b) { return a > b ? a : b; }

// The three KV types: P numbers a word.
struct F32 {
    static constexpr int P = 1;
    static constexpr bool scaled = false;
    VEC_INLINE void unpack(const char* p, V out[1]) { out[0] = load(reinterpret_cast<const float*>(p)); }
};
struct Bf16 {
    static constexpr int P = 2;
    static constexpr bool scaled = false;
    VEC_INLINE void unpack(const char* p, V out[2]) { load_bf16_pairs(p, out[0], out[1]); }
};
struct I8 {
    static constexpr int P = 4;
    static constexpr bool scaled = true;
    VEC_INLINE void unpack(const char* p, V out[4]) { load_i8_quads(p, out); }
};

// What a tile works in, carved out of its scratch memory. R rows.
struct Work {
    float* q;        // [R, dim], scaled
    float* scores;   // [R, BLOCK], then weights
    float* values;   // [R, dim] of one block
    float* total;    // [R, dim] merged
    float* max;      // [R] of one block
    float* sum;      // [R] of one block
    float* old_max;  // [R] merged
    float* old_sum;  // [R] merged
    char* gathered;  // [TILES] tiles of one head
};

size_t padded(int rows) { return size_t(rows + QR + TILE - 1) / TILE * TILE; }

Work carve(void* scratch, const KvShape& kv, int rows) {
    const size_t r = padded(rows), dim = size_t(kv.dim());
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

// ---- one block ----

template <class T, int R>
void scores_of(const float* q, const char* const* tiles, int count, int dim, float* out) {
    constexpr int P = T::P;
    for (int t0 = 0; t0 < count; t0 += KT) {
        V acc[R][KT];
        for (int r = 0; r < R; r++)
            for (int t = 0; t < KT; t++) acc[r][t] = splat(0.0f);
        for (int d = 0; d < dim; d += P) {
            V k[KT][P];
            for (int t = 0; t < KT; t++) T::unpack(tiles[t0 + t] + d * (TILE * 4 / P), k[t]);
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
void values_at(const float* weights, const char* const* tiles, int keys, int dim, int d, float* out) {
    constexpr int P = T::P;
    V acc[R][N];
    for (int r = 0; r < R; r++)
        for (int n = 0; n < N; n++) acc[r][n] = splat(0.0f);
    for (int key = 0; key < keys; key += P) {
        const char* at = tiles[key / TILE] + (key % TILE / P * dim + d) * 4;
        V v[N][P];
        for (int n = 0; n < N; n++) T::unpack(at + n * TILE * 4, v[n]);
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
void values_of(const float* weights, const char* const* tiles, int keys, int dim, float* out) {
    int d = 0;
    for (; d + VT * TILE <= dim; d += VT * TILE) values_at<T, R, VT>(weights, tiles, keys, dim, d, out);
    for (; d < dim; d += TILE) values_at<T, R, 1>(weights, tiles, keys, dim, d, out);
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
    const char* const* tiles;
    int count, dim;
    template <int R>
    void run(int row) const { scores_of<T, R>(w.q + row * dim, tiles, count, dim, w.scores + row * BLOCK); }
};

template <class T>
struct Values {
    const Work& w;
    const char* const* tiles;
    int keys, dim;
    template <int R>
    void run(int row) const { values_of<T, R>(w.scores + row * BLOCK, tiles, keys, dim, w.values + row * dim); }
};

// Scores [lo, hi) of a row become weights, the others 0. `scales`: of each tile's keys and values, or null.
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
        if (scales) s = mul(s, load(scales[t]));
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
        if (scales) p = mul(p, load(scales[t] + TILE));
        store(row + t * TILE, p);
    }
    sum_ = sum(total);
}

// One tile of queries and one block of keys.
struct Where {
    const Attention& op;
    const Span& span;
    int head;
    int first;  // token of the span
    int tokens;
};

// Scattered slots brought together into one tile of the cache's own form.
template <class T>
void gather(const Where& at, int position, int keys, char* out) {
    const KvShape& kv = at.op.kv;
    const int dim = kv.dim();
    memset(out, 0, kv.head_bytes());
    for (int i = 0; i < keys; i++) {
        const int slot = at.span.slots[position + i], lane = slot % TILE;
        const char* from = at.op.cache + kv.offset(slot / TILE, at.op.layer, at.head);
        constexpr int size = 4 / T::P;
        for (int d = 0; d < dim; d += T::P) memcpy(out + (d * TILE + i * T::P) * size, from + (d * TILE + lane * T::P) * size, 4);
        from += kv.plane_bytes();
        char* to = out + kv.plane_bytes();
        for (int d = 0; d < dim; d++)
            memcpy(to + ((i / T::P * dim + d) * T::P + i % T::P) * size, from + ((lane / T::P * dim + d) * T::P + lane % T::P) * size, size);
        if (T::scaled) {
            from += kv.plane_bytes();
            to += kv.plane_bytes();
            memcpy(to + i * 4, from + lane * 4, 4);
            memcpy(to + (TILE + i) * 4, from + (TILE + lane) * 4, 4);
        }
    }
}

template <class T>
void one_block(const Where& at, int block, const Work& w) {
    const Attention& op = at.op;
    const KvShape& kv = op.kv;
    const int dim = kv.dim(), group = op.group(), start = block * BLOCK, position = at.span.position + at.first;
    const int keys = least(BLOCK, position + at.tokens - start), tiles = (keys + TILE - 1) / TILE;
    const char *k[TILES + KT], *v[TILES];
    const float* scales[TILES];
    for (int t = 0; t < tiles; t++) {
        const int tile = at.span.tiles[start / TILE + t];
        if (tile >= 0) {
            k[t] = op.cache + kv.offset(tile, op.layer, at.head);
        } else {
            char* out = w.gathered + t * kv.head_bytes();
            gather<T>(at, start + t * TILE, least(TILE, keys - t * TILE), out);
            k[t] = out;
        }
        v[t] = k[t] + kv.plane_bytes();
        scales[t] = reinterpret_cast<const float*>(v[t] + kv.plane_bytes());
    }
    for (int t = tiles; t % KT; t++) k[t] = k[tiles - 1];
    for_rows(at.tokens * group, Scores<T>{w, k, tiles, dim});
    for (int token = 0, row = 0; token < at.tokens; token++) {
        const int hi = least(most(position + token + 1 - start, 0), keys), lo = op.window ? most(position + token + 1 - op.window - start, 0) : 0;
        for (int g = 0; g < group; g++, row++) softmax(w.scores + row * BLOCK, tiles, lo, hi, T::scaled ? scales : nullptr, w.max[row], w.sum[row]);
    }
    for_rows(at.tokens * group, Values<T>{w, v, keys, dim});
}

void any_block(const Where& at, int block, const Work& w) {
    switch (at.op.kv.type) {
        case KV_F32: return one_block<F32>(at, block, w);
        case KV_BF16: return one_block<Bf16>(at, block, w);
        default: return one_block<I8>(at, block, w);
    }
}

// ---- a tile's queries, and what comes of them ----

// The queries' rows are token by token, the heads of the group one after the other, with the softmax's scale applied.
void load_queries(const Where& at, const Work& w) {
    const int dim = at.op.kv.dim(), real = at.op.kv.head_dim, group = at.op.group();
    const V scale = splat(1.0f / __builtin_sqrtf(float(real)));
    for (int row = 0; row < at.tokens * group; row++) {
        const float* q = at.op.q + (at.span.row + at.first + row / group) * at.op.ldq + (at.head * group + row % group) * real;
        for (int d = 0; d < dim; d += W) store(w.q + row * dim + d, mul(scale, real - d >= W ? load(q + d) : load(q + d, real - d)));
    }
}

void clear(const Work& w, int rows, int dim) {
    memset(w.total, 0, size_t(rows) * dim * 4);
    memset(w.old_sum, 0, size_t(rows) * 4);
    for (int row = 0; row < rows; row++) w.old_max[row] = LOWEST;
}

// The partial results `max`, `sum`, `values` of all rows are added to those before.
void merge_rows(const Work& w, int rows, int dim, const float* max, const float* sum, const float* values, int64_t ld) {
    for (int r0 = 0; r0 < rows; r0 += W) {
        float before[W], now[W];
        const int n = least(W, rows - r0);
        const V old_max = load(w.old_max + r0, n), new_max = load(max + r0, n), together = llmd::LLMD_ISA_NS::max(old_max, new_max);
        const V a = exp(sub(old_max, together)), b = exp(sub(new_max, together));
        store(before, a);
        store(now, b);
        store(w.old_max + r0, together, n);
        store(w.old_sum + r0, add(mul(load(w.old_sum + r0, n), a), mul(load(sum + r0, n), b)), n);
        for (int i = 0; i < n; i++) {
            const V x = splat(before[i]), y = splat(now[i]);
            float* total = w.total + (r0 + i) * dim;
            for (int d = 0; d < dim; d += W) store(total + d, add(mul(load(total + d), x), mul(load(values + (r0 + i) * ld + d), y)));
        }
    }
}

void finish(const Where& at, const Work& w) {
    const int dim = at.op.kv.dim(), real = at.op.kv.head_dim, group = at.op.group();
    for (int row = 0; row < at.tokens * group; row++) {
        float* out = at.op.out + (at.span.row + at.first + row / group) * at.op.ldo + (at.head * group + row % group) * real;
        const V sum = splat(w.old_sum[row]);
        for (int d = 0; d < real; d += W) {
            const V value = div(load(w.total + row * dim + d), sum);
            if (real - d >= W) store(out + d, value);
            else store(out + d, value, real - d);
        }
    }
}

void tile(const Attention& op, const Span& span, int head, int first, int tokens, void* scratch) {
    const Where at{op, span, head, first, tokens};
    const int dim = op.kv.dim(), rows = tokens * op.group();
    const Work w = carve(scratch, op.kv, rows);
    load_queries(at, w);
    clear(w, rows, dim);
    const int last = (span.position + first + tokens - 1) / BLOCK;
    for (int block = op.first_block(span.position + first); block <= last; block++) {
        any_block(at, block, w);
        merge_rows(w, rows, dim, w.max, w.sum, w.values, dim);
    }
    finish(at, w);
}

void block(const Attention& op, const Span& span, int head, int token, int index, float* partial, void* scratch) {
    const Where at{op, span, head, token, 1};
    const int dim = op.kv.dim();
    const Work w = carve(scratch, op.kv, op.group());
    load_queries(at, w);
    any_block(at, index, w);
    for (int g = 0; g < op.group(); g++) {
        float* row = partial + g * partial_size(op.kv);
        memcpy(row, w.values + g * dim, size_t(dim) * 4);
        row[dim] = w.max[g];
        row[dim + 1] = w.sum[g];
    }
}

void merge(const Attention& op, const Span& span, int head, int token, const float* partials, int blocks, void* scratch) {
    const Where at{op, span, head, token, 1};
    const int dim = op.kv.dim(), group = op.group(), ld = partial_size(op.kv);
    const Work w = carve(scratch, op.kv, group);
    clear(w, group, dim);
    for (int i = 0; i < blocks; i++) {
        const float* values = partials + int64_t(i) * group * ld;
        for (int g = 0; g < group; g++) {
            w.max[g] = values[g * ld + dim];
            w.sum[g] = values[g * ld + dim + 1];
        }
        merge_rows(w, group, dim, w.max, w.sum, values, ld);
    }
    finish(at, w);
}

// ---- storing ----

// One token's K or V of one head; `word` and `number` find dimension d: words of 4 / P bytes.
void put_f32(char* plane, const float* x, int n, int dim, int lane, bool is_key) {
    float* out = reinterpret_cast<float*>(plane);
    for (int d = 0; d < n; d++) out[is_key ? d * TILE + lane : lane * dim + d] = x[d];
}

void put_bf16(char* plane, const float* x, int n, int dim, int lane, bool is_key) {
    uint16_t* out = reinterpret_cast<uint16_t*>(plane);
    for (int d = 0; d < n; d++) out[is_key ? (d / 2 * TILE + lane) * 2 + d % 2 : (lane / 2 * dim + d) * 2 + lane % 2] = to_bf16(x[d]);
}

// Returns the scale. A number that is not finite makes it so.
float put_i8(char* plane, const float* x, int n, int dim, int lane, bool is_key) {
    float largest = 0.0f, poison = 0.0f;
    for (int d = 0; d < n; d++) {
        const float magnitude = __builtin_fabsf(x[d]);
        largest = magnitude > largest ? magnitude : largest;
        poison += x[d] * 0.0f;
    }
    const bool usable = largest >= 1e-30f && poison == 0.0f;
    const float inverse = usable ? 127.0f / largest : 0.0f;
    int8_t* out = reinterpret_cast<int8_t*>(plane);
    for (int d = 0; d < n; d++) {
        const float value = usable ? x[d] * inverse : 0.0f;
        out[is_key ? (d / 4 * TILE + lane) * 4 + d % 4 : (lane / 4 * dim + d) * 4 + lane % 4] = int8_t(value + (value < 0.0f ? -0.5f : 0.5f));
    }
    return usable ? largest / 127.0f : poison;
}

void put(const KvShape& kv, char* head, int lane, const float* k, const float* v) {
    const int n = kv.head_dim, dim = kv.dim();
    char* values = head + kv.plane_bytes();
    if (kv.type == KV_F32) {
        put_f32(head, k, n, dim, lane, true);
        put_f32(values, v, n, dim, lane, false);
    } else if (kv.type == KV_BF16) {
        put_bf16(head, k, n, dim, lane, true);
        put_bf16(values, v, n, dim, lane, false);
    } else {
        float* scales = reinterpret_cast<float*>(values + kv.plane_bytes());
        scales[lane] = put_i8(head, k, n, dim, lane, true);
        scales[TILE + lane] = put_i8(values, v, n, dim, lane, false);
    }
}

void store_tile(const Attention& op, const Span& span, int position_tile, const float* kv, int64_t ld, const int64_t* slots) {
    const KvShape& shape = op.kv;
    const int from = most(span.position, position_tile * TILE), to = least(span.position + span.rows, (position_tile + 1) * TILE);
    // A tile is cleared by who writes its first slot: its memory was another request's, and what lies behind the last slot is read.
    const bool fresh = shape.whole_tiles() && from == position_tile * TILE && to < (position_tile + 1) * TILE;
    for (int head = 0; head < shape.kv_heads; head++) {
        if (fresh) memset(op.cache + shape.offset(slots[span.row + from - span.position] / TILE, op.layer, head), 0, shape.head_bytes());
        for (int position = from; position < to; position++) {
            const int row = span.row + position - span.position;
            const float* k = kv + row * ld + head * shape.head_dim;
            const int64_t slot = slots[row];
            put(shape, op.cache + shape.offset(slot / TILE, op.layer, head), int(slot % TILE), k, k + shape.kv_heads * shape.head_dim);
        }
    }
}

}  // namespace

extern const AttentionKernels attention_kernels = {store_tile, tile, block, merge};

}  // namespace llmd::LLMD_ISA_NS
