// See slices.h.
#include "slices.h"

#include <algorithm>

#include "linear.h"

namespace llmd {
namespace {

constexpr int MOST_THREADS = 4;   // the later of many slices have much more to look back at than the first ones
constexpr int FEWEST_ROWS = 48;   // of a slice: each reads all weights, which is to be worth it
constexpr int KEYS_PER_ROW = 16;  // of tokens that are decoded, and which lie in one slice: their attention is not shared

int64_t decoded_keys(const Step& step) {
    int64_t keys = 0;
    for (int64_t r = 0; r < step.requests; r++) keys += step.extend_lens[r] == 1 ? step.seq_lens[r] : 0;
    return keys;
}

}  // namespace

bool may_part(int threads) { return threads > 1 && threads <= MOST_THREADS; }

int rows_apart(const Step& step, const ProgramShape& shape, int threads) {
    if (!may_part(threads) || step.tokens < int64_t(threads) * FEWEST_ROWS) return 0;
    if (step.embed_rows || step.logit_rows > shape.max_logits) return 0;  // sums go from slice to slice; the tail runs once
    if (decoded_keys(step) > step.tokens * KEYS_PER_ROW) return 0;
    const int64_t most = int64_t(threads) * shape.max_rows, slices = (step.tokens + most - 1) / most * threads;
    const int64_t rows = (step.tokens + slices - 1) / slices;
    return int(std::min<int64_t>(shape.max_rows, (rows + ROW_BLOCK - 1) / ROW_BLOCK * ROW_BLOCK));
}

}  // namespace llmd
