// See attention.h.
#include "attention.h"

#include <algorithm>

namespace llmd {

// As isa/attention.cpp carves it: per row, rounded up, three rows of numbers, a block's weights and four numbers; gathered tiles, and
// int8 tiles as bf16.
size_t attention_scratch(const KvShape& kv, int heads) {
    const size_t rows = std::max<size_t>(size_t(heads), QUERY_ROWS) + 2 * TILE;
    const size_t expanded = kv.type == KV_I8 ? size_t(BLOCK / TILE) * 64 * size_t(kv.dim()) : 0;
    return rows * (3 * size_t(kv.dim()) + BLOCK + 4) * sizeof(float) + size_t(BLOCK / TILE) * kv.head_bytes() + expanded + 128;
}

}  // namespace llmd
