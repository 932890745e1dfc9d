// K and V of new tokens on their way into the cache (../attention.h, ../kv.h).
#pragma once

#include "attention_common.h"

namespace llmd::LLMD_ISA_NS {
namespace {

// One token's K or V of one head; `word` and `number` find dimension d: words of 4 / P bytes.
void put_f32(char* plane, const float* x, int n, int dim, int lane, bool is_key) {
    float* out = reinterpret_cast<float*>(plane);
    for (int d = 0; d < n; d++) out[is_key ? d * TILE + lane : lane * dim + d] = x[d];
}

void put_bf16(char* plane, const float* x, int n, int dim, int lane, bool is_key) {
    uint16_t* values = reinterpret_cast<uint16_t*>(plane) + (lane / 2 * dim * 2 + lane % 2);
    uint32_t* keys = reinterpret_cast<uint32_t*>(plane) + lane;
    for (int d = 0; d < dim; d += W) {
        alignas(32) uint16_t part[W];
        store_bf16(part, n - d >= W ? load(x + d) : load(x + d, n - d));
        if (is_key) {
            uint32_t pairs[W / 2];
            memcpy(pairs, part, sizeof pairs);
            for (int i = 0; i < W / 2; i++) keys[(d / 2 + i) * TILE] = pairs[i];
        } else {
            for (int i = 0; i < W; i++) values[(d + i) * 2] = part[i];
        }
    }
}

// n numbers of a lane's vector from dimension `first` on. Returns the scale, `unit` or more bits of it being zero. A number that is not finite makes it so.
float put_i8(char* plane, const float* x, int first, int n, int dim, int lane, bool is_key, uint32_t unit) {
    float largest = 0.0f, poison = 0.0f;
    for (int d = first; d < first + n; d++) {
        const float magnitude = __builtin_fabsf(x[d]);
        largest = magnitude > largest ? magnitude : largest;
        poison += x[d] * 0.0f;
    }
    const bool usable = largest >= 1e-30f && poison == 0.0f;
    // Rounded up, so that no number comes to more than 127.
    const float scale = usable ? bits_to_float((float_to_bits(largest / 127.0f) + (unit - 1)) & ~(unit - 1)) : poison;
    const float inverse = usable ? 1.0f / scale : 0.0f;
    int8_t* out = reinterpret_cast<int8_t*>(plane);
    for (int d = first; d < first + n; d++) {
        const float value = usable ? x[d] * inverse : 0.0f;
        out[is_key ? (d / 4 * TILE + lane) * 4 + d % 4 : (lane / 4 * dim + d) * 4 + lane % 4] = int8_t(value + (value < 0.0f ? -0.5f : 0.5f));
    }
    return scale;
}

void put(const KvShape& kv, char* head, int lane, const float* k, const float* v) {
    const int n = kv.head_dim, dim = kv.dim();
    char* values = head + kv.plane_bytes();
    if (kv.type == KV_F32) {
        put_f32(head, k, n, dim, lane, true);
        put_f32(values, v, n, dim, lane, false);
    } else if (kv.type == KV_BF16) {
        put_bf16(head, k, n, dim, lane, true);
        put_bf16(values, v, n, dim, lane, false);
    } else {
        // Keys have a few dimensions that are much larger than the others, values have none.
        char* scales = values + kv.plane_bytes();
        for (int d = 0; d < n; d += TILE) {
            const float scale = put_i8(head, k, d, least(TILE, n - d), dim, lane, true, 1u << 16);
            reinterpret_cast<uint16_t*>(scales)[d + lane] = to_bf16(scale);
        }
        reinterpret_cast<float*>(scales + kv.key_scale_bytes())[lane] = put_i8(values, v, 0, n, dim, lane, false, 1);
    }
}

void store_tile(const Attention& op, const Span& span, int position_tile, const float* kv, int64_t ld, const int64_t* slots) {
    const KvShape& shape = op.kv;
    const int from = most(span.position, position_tile * TILE), to = least(span.position + span.rows, (position_tile + 1) * TILE);
    // A tile is cleared by who writes its first slot: its memory was another request's, and what lies behind the last slot is read.
    const bool fresh = shape.whole_tiles() && from == position_tile * TILE && to < (position_tile + 1) * TILE;
    for (int head = 0; head < shape.kv_heads; head++) {
        if (fresh) memset(op.cache + shape.offset(slots[span.row + from - span.position] / TILE, op.layer, head), 0, shape.head_bytes());
        for (int position = from; position < to; position++) {
            const int row = span.row + position - span.position;
            const float* k = kv + row * ld + head * shape.head_dim;
            const int64_t slot = slots[row];
            put(shape, op.cache + shape.offset(slot / TILE, op.layer, head), int(slot % TILE), k, k + shape.kv_heads * shape.head_dim);
        }
    }
}

}  // namespace
}  // namespace llmd::LLMD_ISA_NS
