// See attention_plan.h.
#include "attention_plan.h"

#include <algorithm>

namespace llmd {
namespace {

constexpr int ITEMS_PER_THREAD = 4;
constexpr int BLOCK_COST = 3;  // of one token's block and KV head, which is all memory; each further token costs 1

struct Planner {
    AttentionPlan& plan;
    const Attention op;
    const std::vector<Span>& spans;
    int64_t share = 0;  // what an item should cost at most, where it can be cut

    int blocks_of(const Span& span, int first, int count) const {
        return (span.position + first + count - 1) / BLOCK + 1 - op.first_block(span.position + first);
    }

    template <class F>
    void for_tiles(const Span& span, F&& f) const {
        const int step = tile_tokens(op);
        for (int first = 0; first < span.rows; first += step) f(first, std::min(step, span.rows - first));
    }

    int64_t total() const {
        int64_t cost = 0;
        for (const Span& span : spans) {
            for_tiles(span, [&](int first, int count) { cost += int64_t(blocks_of(span, first, count)) * (count + BLOCK_COST - 1); });
        }
        return cost * op.kv.kv_heads;
    }

    void add_tiles(int s) {
        for_tiles(spans[size_t(s)], [&](int first, int count) {
            const int blocks = blocks_of(spans[size_t(s)], first, count);
            for (int head = 0; head < op.kv.kv_heads; head++)
                plan.items.push_back({s, 1, head, 1, first, count, 0, blocks, blocks, 1, 0, 0, int64_t(blocks) * (count + BLOCK_COST - 1)});
        });
    }

    // A decode joins the item of the one before, unless there is none or that is full.
    void add_decode(int s) {
        const int blocks = blocks_of(spans[size_t(s)], 0, 1);
        const int64_t cost = int64_t(blocks) * op.kv.kv_heads * BLOCK_COST;
        if (cost > share) return add_pieces(s, blocks);
        if (!plan.items.empty()) {
            AttentionItem& last = plan.items.back();
            if (last.count == 0 && last.pieces == 1 && last.span + last.spans == s && last.cost + cost <= share) {
                last.spans++;
                last.cost += cost;
                return;
            }
        }
        plan.items.push_back({s, 1, 0, op.kv.kv_heads, 0, 0, 0, blocks, blocks, 1, 0, 0, cost});
    }

    // A decode of more than its share: as many heads together as fit, since they lie together, and then as many blocks.
    void add_pieces(int s, int all) {
        const int heads = int(std::clamp<int64_t>(share / BLOCK_COST, 1, op.kv.kv_heads));
        const int blocks = int(std::clamp<int64_t>(share / (int64_t(heads) * BLOCK_COST), 1, all)), pieces = (all + blocks - 1) / blocks;
        for (int head = 0; head < op.kv.kv_heads; head += heads) {
            const int here = std::min(heads, op.kv.kv_heads - head);
            for (int block = 0; block < all; block += blocks) {
                const int n = std::min(blocks, all - block);
                plan.items.push_back({s, 1, head, here, 0, 0, block, n, all, pieces, plan.counters, plan.partials, int64_t(n) * here * BLOCK_COST});
            }
            if (pieces == 1) continue;
            plan.counters++;
            plan.partials += int64_t(all) * here * op.group() * partial_size(op.kv);
        }
    }
};

}  // namespace

void plan_attention(AttentionPlan& plan, const KvShape& kv, int heads, const std::vector<Span>& spans, int threads) {
    Planner planner{plan, Attention{kv, nullptr, 0, heads, plan.window, nullptr, nullptr, 0, 0}, spans};
    planner.share = threads == 1 ? INT64_MAX : planner.total() / (ITEMS_PER_THREAD * threads);
    plan.items.clear();
    plan.partials = 0;
    plan.counters = 0;
    for (int s = 0; s < int(spans.size()); s++) spans[size_t(s)].rows == 1 ? planner.add_decode(s) : planner.add_tiles(s);
    // The longest first, so that the threads end together.
    std::stable_sort(plan.items.begin(), plan.items.end(), [](const AttentionItem& a, const AttentionItem& b) { return a.cost > b.cost; });
}

}  // namespace llmd
