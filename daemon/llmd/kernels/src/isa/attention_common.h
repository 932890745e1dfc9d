// What all ways of computing a block of attention share (../attention.h): working memory, where tiles lie, queries, merging, storing.
#pragma once

#include "../attention.h"

#include "vec16.h"

namespace llmd::LLMD_ISA_NS {
namespace {

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
    float* scores;   // [R, BLOCK] of one head, then weights
    float* values;   // [R, dim] of one block
    float* total;    // [R, dim] merged
    float* max;      // [R] of one block
    float* sum;      // [R] of one block
    float* old_max;  // [R] merged
    float* old_sum;  // [R] merged
    char* gathered;  // [TILES] tiles of one head
    char* expanded;  // [TILES] int8 tiles of one head as bf16, at a line of the cache

    // The same from row r on, for a head that is not the first.
    Work from(int r, int dim) const {
        return {q + r * dim, scores, values + r * dim, total + r * dim, max + r, sum + r, old_max + r, old_sum + r, gathered, expanded};
    }
};

size_t padded(int rows) { return size_t(rows + TILE - 1) / TILE * TILE; }  // kernels may take more rows than there are, but no more than that

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
    w.expanded = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(w.gathered + TILES * kv.head_bytes()) + 63) / 64 * 64);
    return w;
}

// One tile of queries and one block of keys.
struct Where {
    const Attention& op;
    const Span& span;
    int head;
    int first;  // token of the span
    int tokens;
};

// Asks for cache memory some way ahead of who computes, in the order in which decodes read it: a decode waits for memory, its tiles lie apart, and each
// is too short for the CPU to foresee where it will read. A CPU drops what is asked for too fast, so whoever computes asks for a few lines every few
// instructions; and it reads from several places at once better than from one, so a block's tiles take turns.
class Ahead {
  public:
    // Of `spans`, or of blocks [block, block + blocks) of one.
    Ahead(const Attention& op, int head, int heads, const Span* spans, int n) : Ahead(op, head, heads, spans, n, op.first_block(spans->position), 1 << 30) {}
    Ahead(const Attention& op, int head, int heads, const Span* spans, int n, int block, int blocks)
        : op_(op), first_(head), heads_(heads), span_(spans), end_(spans + n), block_(block), blocks_(blocks), bytes_(int(op.kv.head_bytes())),
          slowly_(op.kv.type == KV_I8 ? 3 : 0) {
        begin_block();
        allow(op.kv.type == KV_I8 ? 1024 : 256);  // as measured: less leaves memory idle, more comes too early
        catch_up();
    }
    // Asks for nothing.
    explicit Ahead(const Attention& op) : op_(op), first_(0), heads_(0), span_(nullptr), end_(nullptr), block_(0), blocks_(0), bytes_(0), slowly_(0) {}

    // Called once for each head and block with the number of its tiles: so much more may be asked for.
    void begin(int tiles) {
        catch_up();
        allow(tiles * bytes_ / 64);
    }

    // The next n lines of 64 bytes, if they may be asked for.
    LLMD_INLINE void ask(int n) {
        if (left_ <= 0) return;
        for (int i = 0; i < n; i++) __builtin_prefetch(at_ + i * 64, 0, 2);
        left_ -= n;
        if ((at_ += n * 64) >= stop_) next_piece();
    }

    // Where n lines of bf16 are computed with: int8's are fewer, and most of them have been asked for where they became bf16.
    LLMD_INLINE void lines(int n) { ask(n >> slowly_); }

  private:
    static constexpr int PIECE = 1024;  // bytes of a tile, before the next one's turn

    const Attention& op_;
    const int first_, heads_;
    const Span* span_;
    const Span* const end_;
    int block_, blocks_;  // the present one, and how many of this span come with it
    const int bytes_;     // of a tile and head
    const int slowly_;
    int tile_ = 0, tiles_ = 0, head_ = 0, offset_ = 0, left_ = 0;
    const char *at_ = nullptr, *stop_ = nullptr;

    void allow(int n) {
        if (at_) left_ += n;
    }

    void catch_up() {
        while (left_ > 0) ask(8);
    }

    void begin_block() {
        tiles_ = least(TILES, span_->position / TILE + 1 - block_ * TILES);
        tile_ = head_ = offset_ = 0;
        begin_piece();
    }

    void begin_piece() {
        const int tile = span_->tiles[block_ * TILES + tile_];
        at_ = op_.cache + op_.kv.offset(most(tile, 0), op_.layer, first_ + head_) + offset_;
        stop_ = at_ + least(PIECE, bytes_ - offset_);
    }

    void next_piece() {
        if (++tile_ == tiles_) tile_ = 0, offset_ += PIECE;
        if (offset_ >= bytes_) offset_ = 0, head_++;
        if (head_ < heads_) return begin_piece();
        if (--blocks_ > 0 && span_->position >= (block_ + 1) * BLOCK) {
            block_++;
        } else if (++span_ == end_) {
            at_ = nullptr;
            left_ = 0;
            return;
        } else {
            block_ = op_.first_block(span_->position);
            blocks_ = 1 << 30;
        }
        begin_block();
    }
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
            for (int d = 0; d < dim; d += TILE) memcpy(to + (d + i) * 2, from + (d + lane) * 2, 2);
            memcpy(to + kv.key_scale_bytes() + i * 4, from + kv.key_scale_bytes() + lane * 4, 4);
        }
    }
}

// The tiles of a block's keys, gathered where they lie scattered; as many as hold a key that a query of the tile may see.
struct BlockTiles {
    const char* k[2 * TILES];
    const char* v[TILES];
    const uint16_t* k_scales[2 * TILES];
    const float* v_scales[TILES];
    int keys;
    int count;
};

template <class T>
BlockTiles block_tiles(const Where& at, int block, const Work& w) {
    const Attention& op = at.op;
    const KvShape& kv = op.kv;
    BlockTiles b;
    b.keys = least(BLOCK, at.span.position + at.first + at.tokens - block * BLOCK);
    b.count = (b.keys + TILE - 1) / TILE;
    for (int t = 0; t < b.count; t++) {
        const int tile = at.span.tiles[block * TILES + t];
        if (tile >= 0) {
            b.k[t] = op.cache + kv.offset(tile, op.layer, at.head);
        } else {
            char* out = w.gathered + t * kv.head_bytes();
            gather<T>(at, block * BLOCK + t * TILE, least(TILE, b.keys - t * TILE), out);
            b.k[t] = out;
        }
        b.v[t] = b.k[t] + kv.plane_bytes();
        b.k_scales[t] = reinterpret_cast<const uint16_t*>(b.v[t] + kv.plane_bytes());
        b.v_scales[t] = reinterpret_cast<const float*>(b.v[t] + kv.plane_bytes() + kv.key_scale_bytes());
    }
    // Kernels that take several tiles at once may read one of them again.
    for (int t = b.count; t < 2 * TILES; t++) b.k[t] = b.k[b.count - 1], b.k_scales[t] = b.k_scales[b.count - 1];
    return b;
}

// Which of the block's keys token `token` of the tile sees: [lo, hi).
void visible(const Where& at, int block, int token, int keys, int& lo, int& hi) {
    const int position = at.span.position + at.first + token - block * BLOCK;
    hi = least(most(position + 1, 0), keys);
    lo = at.op.window ? most(position + 1 - at.op.window, 0) : 0;
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

// heads: more than one only of one token.
void finish(const Where& at, const Work& w, int heads = 1) {
    const int dim = at.op.kv.dim(), real = at.op.kv.head_dim, group = heads * at.op.group();
    for (int row = 0; row < at.tokens * group; row++) {
        float* out = at.op.out + (at.span.row + at.first + row / group) * at.op.ldo + (at.head * at.op.group() + row % group) * real;
        const V sum = splat(w.old_sum[row]);
        for (int d = 0; d < real; d += W) {
            const V value = div(load(w.total + row * dim + d), sum);
            if (real - d >= W) store(out + d, value);
            else store(out + d, value, real - d);
        }
    }
}

// `Engine::begin(op, rows)` and `end` are around all work of a call (rows: of one head); `load(at, w)` prepares the queries; `block(at, index, w, ahead)`
// fills w's values, max and sum.
template <class Engine>
void tile(const Attention& op, const Span& span, int head, int first, int tokens, void* scratch) {
    const Where at{op, span, head, first, tokens};
    const int dim = op.kv.dim(), rows = tokens * op.group();
    const Work w = carve(scratch, op.kv, rows);
    Ahead none(op);
    Engine::begin(op, rows);
    Engine::load(at, w);
    clear(w, rows, dim);
    const int last = (span.position + first + tokens - 1) / BLOCK;
    for (int block = op.first_block(span.position + first); block <= last; block++) {
        Engine::block(at, block, w, none);
        merge_rows(w, rows, dim, w.max, w.sum, w.values, dim);
    }
    finish(at, w);
    Engine::end(op);
}

// One token's heads, and one block of them. Rows are heads' groups, one after the other. A kernel that writes more rows than a head has writes those of
// the next head, before that one's turn.
template <class Engine>
void load_heads(const Where& at, int heads, const Work& w) {
    Where here = at;
    for (int h = 0; h < heads; h++, here.head++) Engine::load(here, w.from(h * at.op.group(), at.op.kv.dim()));
}

template <class Engine>
void block_heads(const Where& at, int heads, int block, const Work& w, Ahead& ahead) {
    Where here = at;
    for (int h = 0; h < heads; h++, here.head++) Engine::block(here, block, w.from(h * at.op.group(), at.op.kv.dim()), ahead);
}

template <class Engine>
void decode(const Attention& op, const Span* spans, int n, int head, int heads, void* scratch) {
    const int dim = op.kv.dim(), rows = heads * op.group();
    const Work w = carve(scratch, op.kv, rows);
    Ahead ahead(op, head, heads, spans, n);
    Engine::begin(op, op.group());
    for (int i = 0; i < n; i++) {
        const Where at{op, spans[i], head, 0, 1};
        load_heads<Engine>(at, heads, w);
        clear(w, rows, dim);
        for (int block = op.first_block(spans[i].position); block <= spans[i].position / BLOCK; block++) {
            block_heads<Engine>(at, heads, block, w, ahead);
            merge_rows(w, rows, dim, w.max, w.sum, w.values, dim);
        }
        finish(at, w, heads);
    }
    Engine::end(op);
}

template <class Engine>
void blocks(const Attention& op, const Span& span, int head, int heads, int block, int n, float* partials, void* scratch) {
    const Where at{op, span, head, 0, 1};
    const int dim = op.kv.dim(), rows = heads * op.group(), ld = partial_size(op.kv);
    const Work w = carve(scratch, op.kv, rows);
    Ahead ahead(op, head, heads, &span, 1, block, n);
    Engine::begin(op, op.group());
    load_heads<Engine>(at, heads, w);
    for (int i = 0; i < n; i++) {
        block_heads<Engine>(at, heads, block + i, w, ahead);
        for (int row = 0; row < rows; row++, partials += ld) {
            memcpy(partials, w.values + row * dim, size_t(dim) * 4);
            partials[dim] = w.max[row];
            partials[dim + 1] = w.sum[row];
        }
    }
    Engine::end(op);
}

void merge(const Attention& op, const Span& span, int head, int heads, const float* partials, int n, void* scratch) {
    const Where at{op, span, head, 0, 1};
    const int dim = op.kv.dim(), rows = heads * op.group(), ld = partial_size(op.kv);
    const Work w = carve(scratch, op.kv, rows);
    clear(w, rows, dim);
    for (int i = 0; i < n; i++, partials += int64_t(rows) * ld) {
        for (int row = 0; row < rows; row++) {
            w.max[row] = partials[row * ld + dim];
            w.sum[row] = partials[row * ld + dim + 1];
        }
        merge_rows(w, rows, dim, w.max, w.sum, partials, ld);
    }
    finish(at, w, heads);
}

// ---- storing ----

// One token's K or V of one head; `word` and `number` find dimension d: words of 4 / P bytes.
void put_f32(char* plane, const float* x, int n, int dim, int lane, bool is_key) {
    float* out = reinterpret_cast<float*>(plane);
    for (int d = 0; d < n; d++) out[is_key ? d * TILE + lane : lane * dim + d] = x[d];
}

void put_bf16(char* plane, const float* x, int n, int dim, int lane, bool is_key) {
    uint16_t* values = reinterpret_cast<uint16_t*>(plane) + (lane / 2 * dim * 2 + lane % 2);
    uint32_t* keys = reinterpret_cast<uint32_t*>(plane) + lane;
    for (int d = 0; d < dim; d += W) {
        alignas(32) uint16_t part[W];
        store_bf16(part, n - d >= W ? load(x + d) : load(x + d, n - d));
        if (is_key) {
            uint32_t pairs[W / 2];
            memcpy(pairs, part, sizeof pairs);
            for (int i = 0; i < W / 2; i++) keys[(d / 2 + i) * TILE] = pairs[i];
        } else {
            for (int i = 0; i < W; i++) values[(d + i) * 2] = part[i];
        }
    }
}

// n numbers of a lane's vector from dimension `first` on. Returns the scale, `unit` or more bits of it being zero. A number that is not finite makes it so.
float put_i8(char* plane, const float* x, int first, int n, int dim, int lane, bool is_key, uint32_t unit) {
    float largest = 0.0f, poison = 0.0f;
    for (int d = first; d < first + n; d++) {
        const float magnitude = __builtin_fabsf(x[d]);
        largest = magnitude > largest ? magnitude : largest;
        poison += x[d] * 0.0f;
    }
    const bool usable = largest >= 1e-30f && poison == 0.0f;
    // Rounded up, so that no number comes to more than 127.
    const float scale = usable ? bits_to_float((float_to_bits(largest / 127.0f) + (unit - 1)) & ~(unit - 1)) : poison;
    const float inverse = usable ? 1.0f / scale : 0.0f;
    int8_t* out = reinterpret_cast<int8_t*>(plane);
    for (int d = first; d < first + n; d++) {
        const float value = usable ? x[d] * inverse : 0.0f;
        out[is_key ? (d / 4 * TILE + lane) * 4 + d % 4 : (lane / 4 * dim + d) * 4 + lane % 4] = int8_t(value + (value < 0.0f ? -0.5f : 0.5f));
    }
    return scale;
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
        // Keys have a few dimensions that are much larger than the others, values have none.
        char* scales = values + kv.plane_bytes();
        for (int d = 0; d < n; d += TILE) {
            const float scale = put_i8(head, k, d, least(TILE, n - d), dim, lane, true, 1u << 16);
            reinterpret_cast<uint16_t*>(scales)[d + lane] = to_bf16(scale);
        }
        reinterpret_cast<float*>(scales + kv.key_scale_bytes())[lane] = put_i8(values, v, 0, n, dim, lane, false, 1);
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
}  // namespace llmd::LLMD_ISA_NS
