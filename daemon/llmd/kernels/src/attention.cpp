// See attention.h.
#include "attention.h"

#include <algorithm>

namespace llmd {

// As isa/attention.cpp carves it: per row, rounded up, three rows of numbers, a block's weights and four numbers; and gathered tiles.
size_t attention_scratch(const KvShape& kv, int heads) {
    const size_t rows = std::max<size_t>(size_t(heads), QUERY_ROWS) + 2 * TILE;
    return rows * (3 * size_t(kv.dim()) + BLOCK + 4) * sizeof(float) + size_t(BLOCK / TILE) * kv.head_bytes() + 64;
}

}  // namespace llmd
