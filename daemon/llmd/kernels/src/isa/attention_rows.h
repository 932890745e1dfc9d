// Queries, blocks one after the other, and merging, in float32 (../attention.h).
#pragma once

#include "attention_vectors.h"

namespace llmd::LLMD_ISA_NS {
namespace {

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

void tile(const Attention& op, const Span& span, int head, int first, int tokens, void* scratch) {
    const Where at{op, span, head, first, tokens};
    const int dim = op.kv.dim(), rows = tokens * op.group();
    const Work w = carve(scratch, op.kv, rows);
    Ahead none(op);
    load_queries(at, w);
    clear(w, rows, dim);
    const int last = (span.position + first + tokens - 1) / BLOCK;
    for (int block = op.first_block(span.position + first); block <= last; block++) {
        vector_block(at, block, w, none);
        merge_rows(w, rows, dim, w.max, w.sum, w.values, dim);
    }
    finish(at, w);
}

// One token's heads, and one block of them. Rows are heads' groups, one after the other.
void load_heads(const Where& at, int heads, const Work& w) {
    Where here = at;
    for (int h = 0; h < heads; h++, here.head++) load_queries(here, w.from(h * at.op.group(), at.op.kv.dim()));
}

void block_heads(const Where& at, int heads, int block, const Work& w, Ahead& ahead) {
    Where here = at;
    for (int h = 0; h < heads; h++, here.head++) vector_block(here, block, w.from(h * at.op.group(), at.op.kv.dim()), ahead);
}

void decode(const Attention& op, const Span* spans, int n, int head, int heads, void* scratch) {
    const int dim = op.kv.dim(), rows = heads * op.group();
    const Work w = carve(scratch, op.kv, rows);
    Ahead ahead(op, head, heads, spans, n);
    for (int i = 0; i < n; i++) {
        const Where at{op, spans[i], head, 0, 1};
        load_heads(at, heads, w);
        clear(w, rows, dim);
        for (int block = op.first_block(spans[i].position); block <= spans[i].position / BLOCK; block++) {
            block_heads(at, heads, block, w, ahead);
            merge_rows(w, rows, dim, w.max, w.sum, w.values, dim);
        }
        finish(at, w, heads);
    }
}

void blocks(const Attention& op, const Span& span, int head, int heads, int block, int n, float* partials, void* scratch) {
    const Where at{op, span, head, 0, 1};
    const int dim = op.kv.dim(), rows = heads * op.group(), ld = partial_size(op.kv);
    const Work w = carve(scratch, op.kv, rows);
    Ahead ahead(op, head, heads, &span, 1, block, n);
    load_heads(at, heads, w);
    for (int i = 0; i < n; i++) {
        block_heads(at, heads, block + i, w, ahead);
        for (int row = 0; row < rows; row++, partials += ld) {
            memcpy(partials, w.values + row * dim, size_t(dim) * 4);
            partials[dim] = w.max[row];
            partials[dim + 1] = w.sum[row];
        }
    }
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

}  // namespace
}  // namespace llmd::LLMD_ISA_NS
