// See step_plan.h.
#include "step_plan.h"

#include <algorithm>
#include <cmath>

namespace llmd {
namespace {

constexpr int ROWS_PER_TILE = 16;    // whose rotations a thread works out at once

bool check_requests(const Step& step) {
    int64_t row = 0;
    for (int64_t r = 0; r < step.requests; r++) {
        const int64_t length = step.seq_lens[r], fresh = step.extend_lens[r], slot_row = step.req_pool_indices[r];
        if (fresh < 1 || length < fresh || length > step.table_columns || slot_row < 0 || slot_row >= step.table_rows) return false;
        if (row + fresh > step.tokens) return false;
        for (int64_t i = 0; i < fresh; i++, row++) {
            if (step.positions[row] != length - fresh + i) return false;
        }
    }
    return row == step.tokens;
}

bool check_wanted(const LogitRow& wish, int64_t tokens, int sampled_ids) {
    if (wish.row < 0 || wish.row >= tokens || wish.scored >= sampled_ids) return false;
    if (wish.seen_n < 0 || wish.bias_n < 0 || wish.banned_n < 0 || wish.top_n < 0) return false;
    if ((wish.seen_n && (!wish.seen || !wish.counts)) || (wish.bias_n && (!wish.bias_ids || !wish.biases)) || (wish.banned_n && !wish.banned)) return false;
    if (wish.top_n && (!wish.top_ids || !wish.top_logprobs)) return false;
    return wish.uniform >= 0.0 && wish.uniform < 1.0 && std::isfinite(wish.temperature) && wish.top_p >= 0.0 && wish.repetition > 0.0f;
}

}  // namespace

int check_step(const Step& step, const ProgramShape& shape, int64_t embeddings, int64_t slots) {
    if (step.tokens < 1 || step.requests < 1 || step.logit_rows < 0 || step.embed_rows < 0 || !check_requests(step)) return BAD_STEP;
    for (int64_t i = 0; i < step.tokens; i++) {
        if (step.input_ids[i] < 0 || step.input_ids[i] >= embeddings) return BAD_TOKEN;
        if (step.out_cache_loc[i] < 0 || step.out_cache_loc[i] >= slots) return BAD_SLOT;
    }
    for (int64_t i = 0; i < step.logit_rows; i++) {
        if (!check_wanted(step.wanted[i], step.tokens, shape.sampled_ids)) return BAD_ROW;
    }
    for (int64_t i = 0; i < step.embed_rows; i++) {
        const EmbedRow& embed = step.embeds[i];
        if (embed.first < 0 || embed.count < 1 || embed.first + embed.count > step.tokens || !embed.sum) return BAD_ROW;
    }
    return OK;
}

StepPlan::StepPlan(const ProgramShape& shape, const KvShape& kv, const float* inverse_frequencies)
    : shape_(shape), kv_(kv), frequencies_(inverse_frequencies, inverse_frequencies + kv.head_dim / 2) {}

void StepPlan::add_window(int window) {
    for (const AttentionPlan& plan : plans_) {
        if (plan.window == window) return;
    }
    plans_.push_back({window, {}, 0, 0});
}

const AttentionPlan& StepPlan::attention(int window) const {
    return *std::find_if(plans_.begin(), plans_.end(), [window](const AttentionPlan& plan) { return plan.window == window; });
}

int StepPlan::begin(const Step& step, int64_t slots) {
    if (tiles_.size() < size_t(step.requests)) tiles_.resize(size_t(step.requests));
    for (int64_t r = 0; r < step.requests; r++) {
        const int32_t* table = step.req_to_token + step.req_pool_indices[r] * step.table_columns;
        const int length = int(step.seq_lens[r]);
        std::vector<int32_t>& tiles = tiles_[size_t(r)];
        tiles.resize(size_t(length + TILE - 1) / TILE);
        for (int start = 0; start < length; start += TILE) {
            const int32_t first = table[start];
            const int count = std::min(TILE, length - start);
            bool inside = true, in_order = first % TILE == 0;
            for (int i = 0; i < count; i++) {
                inside &= table[start + i] >= 0 && table[start + i] < slots;
                in_order &= table[start + i] == first + i;
            }
            // With pages of whole tiles, clearing a page that is begun relies on its order.
            if (!inside || (kv_.whole_tiles() && !in_order)) return BAD_SLOT;
            tiles[size_t(start / TILE)] = kv_.whole_tiles() ? first / TILE : -1;
        }
    }
    int64_t row = 0;
    for (int64_t r = 0; r < step.requests; r++) {
        const int32_t* table = step.req_to_token + step.req_pool_indices[r] * step.table_columns + step.seq_lens[r] - step.extend_lens[r];
        for (int64_t i = 0; i < step.extend_lens[r]; i++, row++) {
            if (step.out_cache_loc[row] != table[i]) return BAD_SLOT;
        }
    }
    return OK;
}

void StepPlan::slice(const Step& step, int64_t row0, int rows, Pool& pool) {
    spans_.clear();
    stores_.clear();
    int64_t start = 0;
    for (int64_t r = 0; r < step.requests; start += step.extend_lens[r++]) {
        const int64_t from = std::max(start, row0), to = std::min(start + step.extend_lens[r], row0 + rows);
        if (from >= to) continue;
        const int position = int(step.positions[from]), count = int(to - from);
        const int32_t* slots = step.req_to_token + step.req_pool_indices[r] * step.table_columns;
        for (int tile = position / TILE; tile <= (position + count - 1) / TILE; tile++) stores_.push_back({int(spans_.size()), tile});
        spans_.push_back({int(from - row0), count, position, slots, tiles_[size_t(r)].data()});
    }
    plan_rotations(step, row0, rows, pool);
    for (AttentionPlan& plan : plans_) plan_attention(plan, kv_, shape_.heads, spans_, pool.threads());
}

void StepPlan::plan_rotations(const Step& step, int64_t row0, int rows, Pool& pool) {
    const int dim = kv_.head_dim, half = dim / 2;
    rotations_.resize(size_t(rows) * 2 * size_t(dim));
    const auto work = [&](int row) {
        float *cos = rotations_.data() + size_t(row) * 2 * size_t(dim), *sin = cos + dim;
        for (int i = 0; i < half; i++) {
            const float angle = float(step.positions[row0 + row]) * frequencies_[size_t(i)];
            const float c = std::cos(angle) * shape_.rope_scale, s = std::sin(angle) * shape_.rope_scale;
            const int first = shape_.rope_pairs ? 2 * i : i, second = shape_.rope_pairs ? 2 * i + 1 : i + half;
            cos[first] = cos[second] = c;
            sin[first] = -s;
            sin[second] = s;
        }
    };
    pool.run((rows + ROWS_PER_TILE - 1) / ROWS_PER_TILE, [&](int tile, int) {
        for (int row = tile * ROWS_PER_TILE; row < std::min(rows, (tile + 1) * ROWS_PER_TILE); row++) work(row);
    });
}

}  // namespace llmd
