// What operations do: each one spread over the lane's pool, or done at once by the caller where it is small.
#include <algorithm>
#include <cstring>

#include "lane.h"
#include "rows.h"

namespace llmd {
namespace {

constexpr int64_t NUMBERS_PER_TILE = 8192;  // of row-wise work: about a microsecond
constexpr int STORES_PER_TILE = 4;

}  // namespace

template <class F>
void Lane::for_rows(int rows, int64_t width, F&& f) {
    const int step = int(std::max<int64_t>(1, NUMBERS_PER_TILE / width));
    pool_.run((rows + step - 1) / step, [&](int tile, int thread) {
        for (int row = tile * step; row < std::min(rows, (tile + 1) * step); row++) f(row, thread);
    });
}

void Lane::execute(const Op& op, int rows) {
    switch (op.kind) {
        case Kind::EMBED: return embed(op, rows);
        case Kind::RMS_NORM: return rms_norm(op, rows);
        case Kind::LINEAR: return linear(pool_, linear_of(op, rows));
        case Kind::ADD_BIAS: {
            const Buffer& y = buffer(op.out);
            return for_rows(rows, y.width(), [&](int row, int) { row_kernels().add(y.row(row), op.weight, y.width()); });
        }
        case Kind::HEAD_NORM: return head_norm(op, rows);
        case Kind::ROPE_STORE: return rope_store(op);
        case Kind::ATTENTION: return attention(op);
        case Kind::QUANTIZE: {
            const Buffer &x = buffer(op.in), &y = buffer(op.out);
            return for_rows(rows, x.width(), [&](int row, int) { linear_kernels().quantize(x.floats(), x.stride(), y.quant(), row, row + 1); });
        }
        case Kind::SWIGLU: return swiglu(op, rows);
        case Kind::GATED: return run_gated(op, rows);
        case Kind::POOL: return pool_embeddings(op, rows);
        case Kind::SAMPLE: return sample(op, rows);
        default: return;
    }
}

void Lane::embed(const Op& op, int rows) {
    const Buffer& x = buffer(op.out);
    for (int row = 0; row < rows; row++) ids_[size_t(row)] = int32_t(step_->input_ids[row0_ + row]);
    for_rows(rows, x.width(), [&](int row, int) { unpack_rows(recording_.matrices[size_t(op.matrix)], &ids_[size_t(row)], 1, x.row(row), x.stride()); });
}

void Lane::rms_norm(const Op& op, int rows) {
    const Buffer &x = buffer(op.in), &y = buffer(op.out);
    for_rows(rows, x.width(), [&](int row, int thread) {
        float* out = y.kind() ? scratch_row(thread) : y.row(row);
        row_kernels().rms_norm(x.row(row), op.weight, x.width(), op.eps, out);
        if (y.kind()) linear_kernels().quantize(out, 0, y.quant(), row, row + 1);
    });
}

Linear Lane::linear_of(const Op& op, int rows) const {
    const Buffer &x = buffer(op.in), &y = buffer(op.out);
    const Matrix& w = recording_.matrices[size_t(op.matrix)];
    return {w, x.kind() ? nullptr : x.floats(), x.kind() ? x.quant() : QuantRows{}, y.floats(), x.stride(), y.stride(), rows, op.flags};
}

// A linear and swiglu in one where the kernels have that, else through `middle`.
void Lane::run_gated(const Op& op, int rows) {
    Op first = op, second = op;
    first.out = second.in = op.middle;
    const Buffer& y = buffer(op.out);
    if (y.kind() && GatedTiles::can(recording_.matrices[size_t(op.matrix)])) return gated(pool_, linear_of(first, rows), y.quant());
    linear(pool_, linear_of(first, rows));
    swiglu(second, rows);
}

void Lane::head_norm(const Op& op, int rows) {
    const Buffer& qkv = buffer(op.out);
    const int dim = recording_.shape.head_dim, heads = recording_.shape.heads + recording_.shape.kv_heads;
    for_rows(rows, qkv.width(), [&](int row, int) {
        float* x = qkv.row(row);
        for (int head = 0; head < heads; head++, x += dim) row_kernels().rms_norm(x, head < recording_.shape.heads ? op.weight : op.weight2, dim, op.eps, x);
    });
}

Attention Lane::attention_of(const Op& op) const {
    return {recording_.kv, recording_.cache, op.layer, recording_.shape.heads, op.window, nullptr, nullptr, 0, 0};
}

void Lane::rope_store(const Op& op) {
    const Buffer& qkv = buffer(op.out);
    const Attention attention = attention_of(op);
    const int dim = recording_.shape.head_dim, turned = recording_.shape.heads + recording_.shape.kv_heads;
    const int items = int(plan_.stores().size()), step = STORES_PER_TILE;
    const auto work = [&](const StoreItem& item) {
        const Span& span = plan_.spans()[size_t(item.span)];
        const int from = std::max(span.position, item.position_tile * TILE), to = std::min(span.position + span.rows, (item.position_tile + 1) * TILE);
        for (int row = span.row + from - span.position; row < span.row + to - span.position; row++)
            row_kernels().rotate(qkv.row(row), turned, dim, plan_.rotation(row), recording_.shape.rope_pairs);
        attention_kernels().store(attention, span, item.position_tile, qkv.floats() + recording_.shape.heads * dim, qkv.stride(), step_->out_cache_loc + row0_);
    };
    pool_.run((items + step - 1) / step, [&](int index, int) {
        for (int i = index * step; i < std::min(items, (index + 1) * step); i++) work(plan_.stores()[size_t(i)]);
    });
}

void Lane::attention(const Op& op) {
    const Buffer &qkv = buffer(op.in), &out = buffer(op.out);
    Attention attention = attention_of(op);
    attention.q = qkv.floats();
    attention.ldq = qkv.stride();
    attention.out = out.floats();
    attention.ldo = out.stride();
    const AttentionPlan& plan = plan_.attention(op.window);
    if (partials_.size() < size_t(plan.partials)) partials_.resize(size_t(plan.partials));
    if (counters_n_ < plan.counters) {
        counters_ = std::make_unique<std::atomic<int>[]>(size_t(plan.counters));
        counters_n_ = plan.counters;
    }
    for (int i = 0; i < plan.counters; i++) counters_[size_t(i)].store(0, std::memory_order_relaxed);
    pool_.run(int(plan.items.size()), [&](int i, int thread) { attention_item(attention, plan.items[size_t(i)], scratch_[size_t(thread)].get()); });
}

void Lane::attention_item(const Attention& op, const AttentionItem& item, void* scratch) {
    const Span& span = plan_.spans()[size_t(item.span)];
    const AttentionKernels& kernels = attention_kernels();
    if (item.count) return kernels.tile(op, span, item.head, item.first, item.count, scratch);
    if (item.pieces == 1) return kernels.decode(op, &span, item.spans, item.head, item.heads, scratch);
    float* partials = partials_.data() + item.partials;
    const int first = op.first_block(span.position);
    const int64_t before = int64_t(item.block) * item.heads * op.group() * partial_size(recording_.kv);
    kernels.blocks(op, span, item.head, item.heads, first + item.block, item.blocks, partials + before, scratch);
    if (counters_[size_t(item.counter)].fetch_add(1, std::memory_order_acq_rel) + 1 < item.pieces) return;
    kernels.merge(op, span, item.head, item.heads, partials, item.all_blocks, scratch);
}

void Lane::swiglu(const Op& op, int rows) {
    const Buffer &x = buffer(op.in), &y = buffer(op.out);
    for_rows(rows, x.width(), [&](int row, int thread) {
        float* out = y.kind() ? scratch_row(thread) : y.row(row);
        row_kernels().swiglu(x.row(row), y.width(), out);
        if (y.kind()) linear_kernels().quantize(out, 0, y.quant(), row, row + 1);
    });
}

// The final norm of the rows that embeddings are made of, added up.
void Lane::pool_embeddings(const Op& op, int rows) {
    const Buffer& x = buffer(op.in);
    pool_.run(int(step_->embed_rows), [&](int i, int thread) {
        const EmbedRow& embed = step_->embeds[i];
        const int64_t from = std::max(embed.first, row0_), to = std::min(embed.first + embed.count, row0_ + rows);
        if (from >= to) return;
        if (from == embed.first) std::fill_n(embed.sum, x.width(), 0.0);
        float* normed = scratch_row(thread);
        for (int64_t row = from; row < to; row++) {
            row_kernels().rms_norm(x.row(row - row0_), op.weight, x.width(), op.eps, normed);
            for (int d = 0; d < x.width(); d++) embed.sum[d] += double(normed[d]);
        }
    });
}

void Lane::sample(const Op& op, int rows) {
    const Buffer& logits = buffer(op.in);
    pool_.run(rows, [&](int row, int thread) { choosers_[size_t(thread)]->run(logits.row(row), *(*wanted_)[size_t(row)]); });
}

}  // namespace llmd
