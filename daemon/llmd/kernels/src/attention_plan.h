// How a step's attention is cut into pieces for threads. Which piece a key or a query is in changes no bit (attention.h).
#pragma once

#include <cstdint>
#include <vector>

#include "attention.h"

namespace llmd {

// A piece of a layer's attention, of one of three kinds:
//   count > 0              queries [first, first + count) of one span, one KV head
//   count = 0, pieces = 1  `spans` spans of one token each
//   count = 0, pieces > 1  some blocks of one such span; who finishes the last piece merges all blocks
struct AttentionItem {
    int span;
    int spans;
    int head;  // KV heads [head, head + heads)
    int heads;
    int first;
    int count;
    int block;         // blocks [block, block + blocks) of `all_blocks`, counted from the first that the window shows
    int blocks;
    int all_blocks;
    int pieces;
    int counter;       // of pieces that are done
    int64_t partials;  // floats before the token's partial results
    int64_t cost;
};

struct AttentionPlan {
    int window;
    std::vector<AttentionItem> items;
    int64_t partials;
    int counters;
};

// Fills `plan`, whose window is given.
void plan_attention(AttentionPlan& plan, const KvShape& kv, int heads, const std::vector<Span>& spans, int threads);

}  // namespace llmd
