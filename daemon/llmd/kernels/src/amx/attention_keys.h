// A block's keys and values as the matrix unit takes them, in bf16.
#pragma once

#include "../isa/attention_ahead.h"
#include "attention_memory.h"
#include "tiles.h"

#ifdef AMX
namespace llmd::LLMD_ISA_NS {
namespace {

struct Keys {
    BlockTiles cached;
    const char *k[TILES], *v[TILES];
    int block;
};

// Numbers of two vectors side by side.
AMX_INLINE __m512i pairs(V first, V second) {
    const __m512i counting = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i turns = _mm512_or_si512(_mm512_slli_epi32(_mm512_add_epi32(counting, _mm512_set1_epi32(16)), 16), counting);
    const __m512bh halves = _mm512_cvtne2ps_pbh(second.v, first.v);
    __m512i words;
    memcpy(&words, &halves, sizeof words);
    return _mm512_permutexvar_epi16(turns, words);
}

// The cache has a number of four slots side by side, a slot one scale.
AMX void expand_i8_values(const char* v, const float* scales, int dim, uint32_t* out, Ahead& ahead) {
    for (int slot = 0; slot < TILE; slot += 4, out += 2 * dim) {
        for (int d = 0; d < dim; d += TILE, v += 64) {
            V n[4];
            load_i8_quads(v, n);
            for (int i = 0; i < 2; i++)
                _mm512_storeu_si512(out + i * dim + d, pairs(mul(n[2 * i], splat(scales[slot + 2 * i])), mul(n[2 * i + 1], splat(scales[slot + 2 * i + 1]))));
        }
        ahead.ask(dim / TILE);
    }
}

// The cache has four numbers of a key side by side, sixteen of them one scale.
AMX void expand_i8_keys(const char* k, const uint16_t* scales, int dim, uint32_t* out, Ahead& ahead) {
    for (int d = 0; d < dim; d += TILE) {
        const V scale = load_bf16(scales + d);
        for (int i = 0; i < TILE; i += 4, k += 64, out += 2 * TILE) {
            V n[4];
            load_i8_quads(k, n);
            _mm512_storeu_si512(out, pairs(mul(n[0], scale), mul(n[1], scale)));
            _mm512_storeu_si512(out + TILE, pairs(mul(n[2], scale), mul(n[3], scale)));
        }
        ahead.ask(4);
    }
}

// A tile's keys, brought into `out` unless the cache has them as they should be.
AMX const char* keys_of(const Where& at, const BlockTiles& b, int t, uint32_t* out, Ahead& ahead) {
    const int dim = at.op.kv.dim();
    if (at.op.kv.type == KV_I8) expand_i8_keys(b.k[t], b.k_scales[t], dim, out, ahead);
    else if (dim == depth(dim)) return b.k[t];
    else memcpy(out, b.k[t], size_t(dim) * TILE * 2);
    memset(out + dim / 2 * TILE, 0, size_t(depth(dim) - dim) * TILE * 2);
    return reinterpret_cast<const char*>(out);
}

AMX void fetch(Keys& keys, const Where& at, int block, const KeyMemory& memory, Ahead& ahead) {
    const int dim = at.op.kv.dim();
    const bool i8 = at.op.kv.type == KV_I8;
    const BlockTiles& b = keys.cached = i8 ? block_tiles<I8>(at, block, memory.gathered) : block_tiles<Bf16>(at, block, memory.gathered);
    keys.block = block;
    for (int t = 0; t < b.count; t++) {
        keys.k[t] = keys_of(at, b, t, memory.keys + t * (TILE / 2 * depth(dim)), ahead);
        keys.v[t] = b.v[t];
        if (!i8) continue;
        uint32_t* out = memory.values + t * (TILE / 2 * dim);
        expand_i8_values(b.v[t], b.v_scales[t], dim, out, ahead);
        keys.v[t] = reinterpret_cast<const char*>(out);
    }
}

}  // namespace
}  // namespace llmd::LLMD_ISA_NS
#endif
