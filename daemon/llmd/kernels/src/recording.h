// What has been recorded of a model's step: operations over buffers of fixed size.
#pragma once

#include <cstdint>
#include <vector>

#include "linear.h"
#include "step_plan.h"

namespace llmd {

enum class Kind : int { EMBED, RMS_NORM, LINEAR, ADD_BIAS, HEAD_NORM, ROPE_STORE, ATTENTION, QUANTIZE, SWIGLU, GATED, POOL, SELECT, SAMPLE, PLAN, KINDS };

// One operation; which fields count depends on its kind.
struct Op {
    Kind kind;
    int in = -1;
    int out = -1;
    int matrix = -1;
    int middle = -1;  // a buffer for what comes in between
    int layer = 0;
    int window = 0;
    int flags = 0;
    float eps = 0.0f;
    const float* weight = nullptr;
    const float* weight2 = nullptr;
};

// [rows, width] numbers, float32 or what `kind` says. The tail's are for rows whose logits are wanted.
struct BufferShape {
    Rows kind;
    bool tail;
    int rows;
    int width;

    // Rows of floats are so far apart: not a multiple of 1 KiB, for then a column's lines would all fall into a few sets of the caches.
    int64_t stride() const { return width % 256 ? width : width + 16; }
    size_t bytes() const { return kind ? size_t(quant_rows_size(rows, width, kind)) : size_t(rows) * size_t(stride()) * sizeof(float); }
};

struct Recording {
    // inverse_frequencies: [head_dim / 2]
    Recording(const ProgramShape& shape, const float* inverse_frequencies)
        : shape(shape), kv{shape.kv_type, shape.layers, shape.kv_heads, shape.head_dim, shape.page_size},
          inverse_frequencies(inverse_frequencies, inverse_frequencies + shape.head_dim / 2) {}

    const ProgramShape shape;
    const KvShape kv;
    const std::vector<float> inverse_frequencies;
    std::vector<BufferShape> buffers;
    std::vector<Matrix> matrices;
    std::vector<Op> body, tail;
    std::vector<int> windows;  // of attention
    char* cache = nullptr;
    int64_t slots = 0;
};

}  // namespace llmd
