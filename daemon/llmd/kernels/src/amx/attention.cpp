// Attention on the matrix unit (AMX) in bf16: queries and weights are rounded too, sums stay float32; an int8 cache becomes bf16 block by block. Decode and
// prefill go the same way, so that a token's bits do not depend on which of them it came through. A float32 cache goes as with AVX-512.
#include "../isa/attention_rows.h"
#include "../isa/attention_store.h"
#include "attention_keys.h"
#include "attention_products.h"
#include "attention_softmax.h"

namespace llmd::LLMD_ISA_NS {
namespace {

#ifdef AMX

// ---- rows ----

// The queries of `heads` KV heads' groups (more than one only of one token), so scaled that weights are powers of 2.
AMX void load_bf16_queries(const Where& at, int heads, const RowMemory& m) {
    const int dim = at.op.kv.dim(), real = at.op.kv.head_dim, group = heads * at.op.group();
    const V scale = splat(1.44269504f / __builtin_sqrtf(float(real)));
    for (int row = 0; row < at.tokens * group; row++) {
        const float* q = at.op.q + (at.span.row + at.first + row / group) * at.op.ldq + (at.head * at.op.group() + row % group) * real;
        for (int d = 0; d < depth(dim); d += W) {
            const __m256bh part = _mm512_cvtneps_pbh(mul(scale, real - d >= W ? load(q + d) : load(q + d, most(real - d, 0))).v);
            memcpy(m.q + row * depth(dim) + d, &part, sizeof part);
        }
    }
    written();
}

void clear_rows(const RowMemory& m, int rows, int dim) {
    memset(m.total, 0, size_t(rows) * size_t(width(dim)) * 4);
    for (int row = 0; row < rows; row++) m.max[row] = LOWEST;
}

// Adds what a block gave up to sixteen rows: their maxima and weighted values.
void add_block(const RowMemory& m, int rows, int dim, const float* max, const float* values, int64_t ld) {
    alignas(64) float before[W], now[W];
    const V one = splat(1.0f), old_max = load(m.max, rows), new_max = load(max, rows), together = llmd::LLMD_ISA_NS::max(old_max, new_max);
    store(before, {_mm512_scalef_ps(one.v, sub(old_max, together).v)});
    store(now, {_mm512_scalef_ps(one.v, sub(new_max, together).v)});
    store(m.max, together, rows);
    for (int row = 0; row < rows; row++) {
        const V x = splat(before[row]), y = splat(now[row]);
        float* total = m.total + row * width(dim);
        for (int d = 0; d < width(dim); d += W) store(total + d, fma(load(values + row * ld + d), y, mul(load(total + d), x)));
    }
}

void finish_rows(const Where& at, int heads, const RowMemory& m) {
    const int dim = at.op.kv.dim(), real = at.op.kv.head_dim, group = heads * at.op.group();
    for (int row = 0; row < at.tokens * group; row++) {
        float* out = at.op.out + (at.span.row + at.first + row / group) * at.op.ldo + (at.head * at.op.group() + row % group) * real;
        const float* total = m.total + row * width(dim);
        const V inverse = splat(1.0f / total[dim]);
        for (int d = 0; d < real; d += W) {
            const V value = mul(load(total + d), inverse);
            if (real - d >= W) store(out + d, value);
            else store(out + d, value, real - d);
        }
    }
}

// ---- a part: up to sixteen rows and a block of keys ----

struct Part {
    const Keys* keys = nullptr;
    int row = 0, rows = 0;
    int tiles = 0;  // of keys that any of the rows sees; 0: there is nothing to do
    float* scores = nullptr;
    Sight sight;
    alignas(64) float max[TILE];

    void begin(const Where& at, const Keys& of, int first, float* memory) {
        const int group = at.op.group();
        keys = &of;
        row = first;
        rows = least(TILE, at.tokens * group - first);
        scores = memory;
        int lo, hi;
        visible(at, of.block, (row + rows - 1) / group, of.cached.keys, lo, hi);
        tiles = (hi + TILE - 1) / TILE;
        sight.all = lo <= 0;
        visible(at, of.block, row / group, of.cached.keys, lo, hi);
        if (lo >= tiles * TILE) tiles = 0;
        sight.all &= hi >= tiles * TILE;
        if (sight.all) return;
        for (int i = 0; i < rows; i++) visible(at, of.block, (row + i) / group, of.cached.keys, sight.lo[i], sight.hi[i]);
    }

    ScoreWork score_work(const RowMemory& m, int dim) const { return {m.q + row * depth(dim), keys->k, scores, depth(dim)}; }
    ValueWork value_work(float* out, int dim) const { return {scores, keys->v, out, width(dim)}; }

    bool whole() const { return tiles == TILES && rows == TILE; }
};

// All rows of some tokens and all of their blocks, part by part. With heads of DIM numbers, the matrix unit computes the next part's scores and the last
// one's values while the vector unit weighs one; with DIM = 0, of any size, they take turns.
template <int DIM>
class Line {
  public:
    Line(const Where& at, const RowMemory& m)
        : at_(at), m_(m), end_(end_of(at)), dim_(at.op.kv.dim()), rows_(at.tokens * at.op.group()), block_(at.op.first_block(at.span.position + at.first)),
          ahead_(at.op, at.head, 1, &end_, 1, block_, end_.position / BLOCK + 1 - block_) {}

    AMX void run() {
        Part parts[3], *before = &parts[0], *now = &parts[1], *next = &parts[2];
        follow(*now);
        all_scores(now->score_work(m_, dim_), now->tiles, ahead_);
        while (now->tiles) {
            follow(*next);
            turn(*before, *now, *next);
            Part* const free = before;
            before = now;
            now = next;
            next = free;
        }
        add(*before);
    }

  private:
    const Where& at_;
    const RowMemory& m_;
    const Span end_;  // as if its first token were the last of the tile
    const int dim_, rows_;
    int block_, row_ = 0, parts_ = 0;
    Ahead ahead_;
    Keys keys_[3];  // a part's values are weighted two parts later: with sixteen rows or fewer, that is two blocks

    static Span end_of(const Where& at) {
        Span span = at.span;
        span.position += at.first + at.tokens - 1;
        return span;
    }

    // The next part in which there is something to do, or one without tiles.
    AMX void follow(Part& part) {
        part.tiles = 0;
        while (part.tiles == 0 && block_ <= end_.position / BLOCK) {
            Keys& keys = keys_[block_ % 3];
            if (row_ == 0) {
                ahead_.begin(TILES);
                fetch(keys, at_, block_, m_.block[block_ % 3], ahead_);
            }
            part.begin(at_, keys, row_, m_.scores[parts_ % 2]);
            row_ += TILE;
            if (row_ >= rows_) row_ = 0, block_++;
        }
        parts_++;
    }

    AMX void turn(const Part& before, Part& now, const Part& next) {
        written();
        if constexpr (DIM > 0) {
            if (before.whole() && now.whole() && now.sight.all && next.whole()) return turn_in_steps(before, now, next);
        }
        softmax(now.scores, now.rows, now.tiles, now.sight, now.max);
        if (before.tiles) add(before);
        if (next.tiles) all_scores(next.score_work(m_, dim_), next.tiles, ahead_);
    }

    AMX void turn_in_steps(const Part& before, Part& now, const Part& next) {
        const Steps<DIM> steps(before.value_work(m_.values[0], DIM), next.score_work(m_, DIM), ahead_);
        Softmax<true>{now.scores, TILE, TILES, now.sight}.run_between(now.max, steps);
        add_block(m_.from(before.row, DIM), TILE, DIM, before.max, m_.values[0], width(DIM));
        steps.finish();
    }

    AMX void add(const Part& part) {
        all_values(part.value_work(m_.values[0], dim_), part.tiles, ahead_);
        add_block(m_.from(part.row, dim_), part.rows, dim_, part.max, m_.values[0], width(dim_));
    }
};

AMX void tile_on_matrix(const Attention& op, const Span& span, int head, int first, int tokens, void* scratch) {
    if (op.kv.type == KV_F32) return tile(op, span, head, first, tokens, scratch);
    const Where at{op, span, head, first, tokens};
    const int rows = tokens * op.group();
    const RowMemory m = carve_rows(scratch, op.kv, rows);
    const unsigned before = no_tiny_numbers();
    configure(least(rows, TILE));
    load_bf16_queries(at, 1, m);
    clear_rows(m, rows, op.kv.dim());
    switch (op.kv.dim()) {
        case 64: Line<64>(at, m).run(); break;
        case 128: Line<128>(at, m).run(); break;
        default: Line<0>(at, m).run(); break;
    }
    finish_rows(at, 1, m);
    _tile_release();
    _mm_setcsr(before);
}

// ---- one token ----

// Blocks [block, block + n) of a head whose rows are m's from `first` on. Nothing has to wait for what comes of another block.
template <class Each>
AMX_INLINE void blocks_of_head(const Where& at, int block, int n, const RowMemory& m, int first, Ahead& ahead, const Each& each) {
    const int dim = at.op.kv.dim(), group = at.op.group();
    const RowMemory own = m.from(first, dim);
    Keys keys[Ahead::BLOCKS];
    Part parts[Ahead::BLOCKS];
    ahead.begin(least(n * TILES, at.span.position / TILE + 1 - block * TILES));
    for (int i = 0; i < n; i++) fetch(keys[i], at, block + i, m.block[i], ahead);
    for (int row = 0; row < group; row += TILE) {
        written();
        for (int i = 0; i < n; i++) {
            parts[i].begin(at, keys[i], row, m.scores[i]);
            all_scores(parts[i].score_work(own, dim), parts[i].tiles, ahead);
        }
        for (int i = 0; i < n; i++) softmax(parts[i].scores, parts[i].rows, parts[i].tiles, parts[i].sight, parts[i].max);
        written();
        for (int i = 0; i < n; i++) all_values(parts[i].value_work(m.values[i], dim), parts[i].tiles, ahead);
        for (int i = 0; i < n; i++) each(block + i, parts[i], m.values[i], first + row);
    }
}

// Blocks [block, end) of `heads` KV heads, a few of each head at a time, as Ahead asks for them. each(block, part, weighted values, row of the first head's).
template <class Each>
AMX_INLINE void blocks_of(const Where& at, int heads, int block, int end, const RowMemory& m, Ahead& ahead, const Each& each) {
    for (; block < end; block += Ahead::BLOCKS) {
        Where here = at;
        for (int h = 0; h < heads; h++, here.head++) blocks_of_head(here, block, least(Ahead::BLOCKS, end - block), m, h * at.op.group(), ahead, each);
    }
}

AMX void decode_on_matrix(const Attention& op, const Span* spans, int n, int head, int heads, void* scratch) {
    if (op.kv.type == KV_F32) return decode(op, spans, n, head, heads, scratch);
    const int dim = op.kv.dim(), rows = heads * op.group();
    const RowMemory m = carve_rows(scratch, op.kv, rows);
    Ahead ahead(op, head, heads, spans, n);
    const unsigned before = no_tiny_numbers();
    configure(least(op.group(), TILE));
    for (int i = 0; i < n; i++) {
        const Where at{op, spans[i], head, 0, 1};
        load_bf16_queries(at, heads, m);
        clear_rows(m, rows, dim);
        blocks_of(at, heads, op.first_block(spans[i].position), spans[i].position / BLOCK + 1, m, ahead,
                  [&](int, const Part& part, const float* values, int row) { add_block(m.from(row, dim), part.rows, dim, part.max, values, width(dim)); });
        finish_rows(at, heads, m);
    }
    _tile_release();
    _mm_setcsr(before);
}

// Partial results: the weighted values, the sum of the weights and the maximum.
AMX void blocks_on_matrix(const Attention& op, const Span& span, int head, int heads, int block, int n, float* partials, void* scratch) {
    if (op.kv.type == KV_F32) return blocks(op, span, head, heads, block, n, partials, scratch);
    const Where at{op, span, head, 0, 1};
    const int dim = op.kv.dim(), rows = heads * op.group(), ld = partial_size(op.kv);
    const RowMemory m = carve_rows(scratch, op.kv, rows);
    Ahead ahead(op, head, heads, &span, 1, block, n);
    const unsigned before = no_tiny_numbers();
    configure(least(op.group(), TILE));
    load_bf16_queries(at, heads, m);
    blocks_of(at, heads, block, block + n, m, ahead, [&](int index, const Part& part, const float* values, int row) {
        for (int r = 0; r < part.rows; r++) {
            float* out = partials + (int64_t(index - block) * rows + row + r) * ld;
            memcpy(out, values + r * width(dim), size_t(dim + 1) * 4);
            out[dim + 1] = part.max[r];
        }
    });
    _tile_release();
    _mm_setcsr(before);
}

void merge_blocks(const Attention& op, const Span& span, int head, int heads, const float* partials, int n, void* scratch) {
    if (op.kv.type == KV_F32) return merge(op, span, head, heads, partials, n, scratch);
    const Where at{op, span, head, 0, 1};
    const int dim = op.kv.dim(), rows = heads * op.group(), ld = partial_size(op.kv);
    const RowMemory m = carve_rows(scratch, op.kv, rows);
    const unsigned before = no_tiny_numbers();
    clear_rows(m, rows, dim);
    for (int i = 0; i < n; i++, partials += int64_t(rows) * ld) {
        for (int row = 0; row < rows; row += TILE) {
            const int count = least(TILE, rows - row);
            float max[TILE];
            for (int r = 0; r < count; r++) max[r] = partials[(row + r) * ld + dim + 1];
            add_block(m.from(row, dim), count, dim, max, partials + row * ld, ld);
        }
    }
    finish_rows(at, heads, m);
    _mm_setcsr(before);
}

#endif

}  // namespace

#ifdef AMX
extern const AttentionKernels attention_kernels = {store_tile, tile_on_matrix, decode_on_matrix, blocks_on_matrix, merge_blocks};
#else
extern const AttentionKernels attention_kernels = {store_tile, tile, decode, blocks, merge};
#endif

}  // namespace llmd::LLMD_ISA_NS
