// Scratch memory of attention on the matrix unit.
#pragma once

#include "../isa/attention_common.h"

namespace llmd::LLMD_ISA_NS {
namespace {

// A row of weighted values has the sum of the weights behind the last dimension, sixteen times.
constexpr int width(int dim) { return dim + TILE; }

// Products take 32 numbers of a query and a key at a time, the last ones 0.
constexpr int depth(int dim) { return (dim + 31) / 32 * 32; }

// Of one block.
struct KeyMemory {
    char* gathered;    // [TILES] tiles of the cache
    uint32_t* keys;    // [TILES, depth / 2, TILE slots] pairs, unless the cache has them so
    uint32_t* values;  // [TILES, TILE / 2, dim] pairs, unless the cache has them so
};

// Of R rows of queries.
struct RowMemory {
    uint16_t* q;  // [R, depth] bf16, with the softmax's scale
    float* total;  // [R, width] merged
    float* max;  // [R] merged
    // Of sixteen rows and two blocks.
    float* scores[2];  // [TILE, BLOCK], then weights
    float* values[2];  // [TILE, width]
    KeyMemory block[3];

    // The same from row r on.
    RowMemory from(int r, int dim) const {
        RowMemory m = *this;
        m.q += r * depth(dim);
        m.total += r * width(dim);
        m.max += r;
        return m;
    }
};

class Carver {
  public:
    explicit Carver(void* memory) : at_(static_cast<char*>(memory)) {}

    template <class T>
    void take(T*& out, size_t n) {
        out = reinterpret_cast<T*>(at_);
        at_ += (n * sizeof(T) + 63) / 64 * 64;
    }

  private:
    char* at_;
};

// Sixteen rows more: the matrix unit takes that many, though there be fewer.
RowMemory carve_rows(void* scratch, const KvShape& kv, int rows) {
    const size_t r = size_t(rows) + TILE, dim = size_t(kv.dim());
    Carver carver(scratch);
    RowMemory m;
    carver.take(m.q, r * size_t(depth(kv.dim())));
    carver.take(m.total, r * (dim + TILE));
    carver.take(m.max, r);
    for (float*& scores : m.scores) carver.take(scores, TILE * BLOCK);
    for (float*& values : m.values) carver.take(values, TILE * (dim + TILE));
    for (KeyMemory& block : m.block) {
        carver.take(block.gathered, TILES * kv.head_bytes());
        carver.take(block.values, TILES * TILE / 2 * dim);
        carver.take(block.keys, TILES * TILE / 2 * size_t(depth(kv.dim())));
    }
    return m;
}

}  // namespace
}  // namespace llmd::LLMD_ISA_NS
