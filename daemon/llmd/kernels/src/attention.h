// Attention over paged KV, for decode and (chunked) prefill alike.
//
// Keys come in blocks of BLOCK positions, counted from position 0. Each block gives a query row a partial result (maximum, sum, weighted values)
// that depends on that row and those keys alone; the partial results are merged in order. So a row's bits are the same however queries are
// tiled, whoever computes a block, and wherever the prompt was cut. All query heads of a KV head go through it together.
#pragma once

#include "isa.h"
#include "kv.h"

namespace llmd {

constexpr int BLOCK = 64;
constexpr int QUERY_ROWS = 384;  // query rows (tokens x heads of a group) of a tile at most, unless a single token has more

struct Attention {
    KvShape kv;
    char* cache;
    int layer;
    int heads;
    int window;      // tokens that a token looks back, itself included; 0: all
    const float* q;  // [rows, >= heads * head_dim], rotated
    float* out;      // [rows, heads * head_dim]
    int64_t ldq;
    int64_t ldo;

    LLMD_INLINE int group() const { return heads / kv.kv_heads; }
    LLMD_INLINE int first_block(int position) const { return window && position >= window ? (position - window + 1) / BLOCK : 0; }
};

// Floats of one row's partial result: maximum, sum, weighted values.
LLMD_INLINE static inline int partial_size(const KvShape& kv) { return kv.dim() + TILE; }
// Tokens of one tile, and bytes that a tile needs to work in.
LLMD_INLINE static inline int tile_tokens(const Attention& op) { return op.group() >= QUERY_ROWS ? 1 : QUERY_ROWS / op.group(); }
size_t attention_scratch(const KvShape& kv, int heads);

struct AttentionKernels {
    // K and V of the new tokens of `span` whose positions are in tile `position_tile` (positions 16 i ..) into the cache. kv: [rows, ld], K's heads
    // and then V's. `slots`: where each row of the step goes.
    void (*store)(const Attention& op, const Span& span, int position_tile, const float* kv, int64_t ld, const int64_t* slots);
    // All of attention for tokens [first, first + count) of the span and one KV head.
    void (*tile)(const Attention& op, const Span& span, int head, int first, int count, void* scratch);
    // The same for KV heads [head, head + heads) of `n` spans of one token each.
    void (*decode)(const Attention& op, const Span* spans, int n, int head, int heads, void* scratch);
    // The same for one span of one token, in pieces: the partial results [n, heads * group, partial_size] of blocks [block, block + n), and the merging of
    // all of them from first_block on.
    void (*blocks)(const Attention& op, const Span& span, int head, int heads, int block, int n, float* partials, void* scratch);
    void (*merge)(const Attention& op, const Span& span, int head, int heads, const float* partials, int n, void* scratch);
};

namespace scalar { extern const AttentionKernels attention_kernels; }
namespace avx2 { extern const AttentionKernels attention_kernels; }
namespace avx512 { extern const AttentionKernels attention_kernels; }
namespace amx { extern const AttentionKernels attention_kernels; }

inline const AttentionKernels& attention_kernels() {
    return current_isa() == ISA_AMX ? amx::attention_kernels : select(scalar::attention_kernels, avx2::attention_kernels, avx512::attention_kernels);
}

}  // namespace llmd
