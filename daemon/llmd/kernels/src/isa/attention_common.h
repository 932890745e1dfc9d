// What all ways of computing a block of attention share (../attention.h): where tiles lie, who sees what.
#pragma once

#include "../attention.h"

#include "vec16.h"

namespace llmd::LLMD_ISA_NS {
namespace {

constexpr int TILES = BLOCK / TILE;
constexpr float LOWEST = -1e30f;  // a maximum over nothing: finite, so that differences are numbers

int least(int a, int b) { return a < b ? a : b; }
int most(int a, int b) { return a > b ? a : b; }

// The three KV types: P numbers a word.
struct F32 {
    static constexpr int P = 1;
    static constexpr bool scaled = false;
    VEC_INLINE void unpack(const char* p, V out[1]) { out[0] = load(reinterpret_cast<const float*>(p)); }
};
struct Bf16 {
    static constexpr int P = 2;
    static constexpr bool scaled = false;
    VEC_INLINE void unpack(const char* p, V out[2]) { load_bf16_pairs(p, out[0], out[1]); }
};
struct I8 {
    static constexpr int P = 4;
    static constexpr bool scaled = true;
    VEC_INLINE void unpack(const char* p, V out[4]) { load_i8_quads(p, out); }
};

// One tile of queries and one block of keys.
struct Where {
    const Attention& op;
    const Span& span;
    int head;
    int first;  // token of the span
    int tokens;
};

// Scattered slots brought together into one tile of the cache's own form.
template <class T>
void gather(const Where& at, int position, int keys, char* out) {
    const KvShape& kv = at.op.kv;
    const int dim = kv.dim();
    memset(out, 0, kv.head_bytes());
    for (int i = 0; i < keys; i++) {
        const int slot = at.span.slots[position + i], lane = slot % TILE;
        const char* from = at.op.cache + kv.offset(slot / TILE, at.op.layer, at.head);
        constexpr int size = 4 / T::P;
        for (int d = 0; d < dim; d += T::P) memcpy(out + (d * TILE + i * T::P) * size, from + (d * TILE + lane * T::P) * size, 4);
        from += kv.plane_bytes();
        char* to = out + kv.plane_bytes();
        for (int d = 0; d < dim; d++)
            memcpy(to + ((i / T::P * dim + d) * T::P + i % T::P) * size, from + ((lane / T::P * dim + d) * T::P + lane % T::P) * size, size);
        if (T::scaled) {
            from += kv.plane_bytes();
            to += kv.plane_bytes();
            for (int d = 0; d < dim; d += TILE) memcpy(to + (d + i) * 2, from + (d + lane) * 2, 2);
            memcpy(to + kv.key_scale_bytes() + i * 4, from + kv.key_scale_bytes() + lane * 4, 4);
        }
    }
}

// The tiles of a block's keys, gathered ([TILES] tiles) where they lie scattered; as many as hold a key that a query of the tile may see.
struct BlockTiles {
    const char* k[2 * TILES];
    const char* v[TILES];
    const uint16_t* k_scales[2 * TILES];
    const float* v_scales[TILES];
    int keys;
    int count;
};

template <class T>
BlockTiles block_tiles(const Where& at, int block, char* gathered) {
    const Attention& op = at.op;
    const KvShape& kv = op.kv;
    BlockTiles b;
    b.keys = least(BLOCK, at.span.position + at.first + at.tokens - block * BLOCK);
    b.count = (b.keys + TILE - 1) / TILE;
    for (int t = 0; t < b.count; t++) {
        const int tile = at.span.tiles[block * TILES + t];
        if (tile >= 0) {
            b.k[t] = op.cache + kv.offset(tile, op.layer, at.head);
        } else {
            char* out = gathered + t * kv.head_bytes();
            gather<T>(at, block * BLOCK + t * TILE, least(TILE, b.keys - t * TILE), out);
            b.k[t] = out;
        }
        b.v[t] = b.k[t] + kv.plane_bytes();
        b.k_scales[t] = reinterpret_cast<const uint16_t*>(b.v[t] + kv.plane_bytes());
        b.v_scales[t] = reinterpret_cast<const float*>(b.v[t] + kv.plane_bytes() + kv.key_scale_bytes());
    }
    // Kernels that take several tiles at once may read one of them again.
    for (int t = b.count; t < 2 * TILES; t++) b.k[t] = b.k[b.count - 1], b.k_scales[t] = b.k_scales[b.count - 1];
    return b;
}

// Which of the block's keys token `token` of the tile sees: [lo, hi).
void visible(const Where& at, int block, int token, int keys, int& lo, int& hi) {
    const int position = at.span.position + at.first + token - block * BLOCK;
    hi = least(most(position + 1, 0), keys);
    lo = at.op.window ? most(position + 1 - at.op.window, 0) : 0;
}

}  // namespace
}  // namespace llmd::LLMD_ISA_NS
