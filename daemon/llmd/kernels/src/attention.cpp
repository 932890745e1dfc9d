// See attention.h.
#include "attention.h"

#include <algorithm>

namespace llmd {

// What isa/attention_vectors.h and amx/attention_memory.h carve it into, the larger term of each kind.
size_t attention_scratch(const KvShape& kv, int heads) {
    const size_t rows = std::max<size_t>(size_t(heads), QUERY_ROWS) + 2 * TILE, tiles = 3 * BLOCK / TILE, dim = size_t(kv.dim());
    const size_t of_rows = rows * (3 * dim + BLOCK + 4), of_parts = 2 * TILE * (BLOCK + dim + TILE);
    return (of_rows + of_parts) * sizeof(float) + tiles * (kv.head_bytes() + TILE * (4 * dim + 4 * TILE)) + 1024;
}

}  // namespace llmd
