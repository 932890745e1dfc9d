// How K and V lie in memory: tiles of 16 token slots, each tile with all layers and heads one after the other.
//
// A tile of one layer and head is K, then V, then (int8) scales: bf16 [dim / 16][16 slots] of each 16 numbers of a key, float32 [16 slots] of values.
// P numbers that share 32 bits belong together:
//   K [dim / P][16 slots][P]    one vector is the same dimensions of 16 keys, so that scores of 16 keys need no sum across a vector
//   V [16 slots / P][dim][P]    one vector is 16 dimensions of P values
// with dim the head size rounded up to 16 (zeros behind). That is also what AVX-512's and AMX's products of bf16 pairs and int8 quadruples take.
//
// Slots of one tile that lie behind the last one written are zero, as long as pages are whole tiles (page_size % 16 == 0).
#pragma once

#include <cstddef>
#include <cstdint>

// A copy in each caller, whatever ISA it is compiled for (isa.h says why).
#define LLMD_INLINE __attribute__((always_inline))

namespace llmd {

constexpr int TILE = 16;

enum KvType : int { KV_F32 = 0, KV_BF16 = 1, KV_I8 = 2, KV_TYPES = 3 };

struct KvShape {
    int type;
    int layers;
    int kv_heads;
    int head_dim;
    int page_size;

    LLMD_INLINE int dim() const { return (head_dim + TILE - 1) / TILE * TILE; }
    LLMD_INLINE int per_word() const { return type == KV_F32 ? 1 : type == KV_BF16 ? 2 : 4; }
    LLMD_INLINE size_t plane_bytes() const { return size_t(TILE) * dim() * 4 / per_word(); }  // K or V of a tile and head
    LLMD_INLINE size_t key_scale_bytes() const { return size_t(2 * dim() + 63) / 64 * 64; }
    LLMD_INLINE size_t head_bytes() const { return 2 * plane_bytes() + (type == KV_I8 ? key_scale_bytes() + TILE * sizeof(float) : 0); }
    LLMD_INLINE size_t tile_bytes() const { return head_bytes() * kv_heads * layers; }
    LLMD_INLINE bool whole_tiles() const { return page_size % TILE == 0; }
    LLMD_INLINE size_t offset(int64_t tile, int layer, int head) const { return size_t(tile) * tile_bytes() + (size_t(layer) * kv_heads + head) * head_bytes(); }
};

// The new tokens of one request in a step, or in a slice of one.
struct Span {
    int row;               // of its first new token
    int rows;              // new tokens
    int position;          // of its first new token
    const int32_t* slots;  // of all its tokens from position 0
    const int32_t* tiles;  // of positions 16 i ..: the tile that holds them in order, or -1: they lie scattered
};

}  // namespace llmd
