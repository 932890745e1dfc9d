// What happens to rows of activations between the linears. Each function takes one row or a part of one, and is called for rows in any order.
#pragma once

#include <cstdint>

#include "isa.h"

namespace llmd {

struct RowKernels {
    // y = x / sqrt(mean(x^2) + eps) * weight; y may be x.
    void (*rms_norm)(const float* x, const float* weight, int n, float eps, float* y);
    // Rotate `heads` heads of `dim` numbers in place. rotation: cos [dim] then sin [dim], signs included (see rotation()).
    // pairs: a pair is (2i, 2i + 1), else (i, i + dim / 2).
    void (*rotate)(float* x, int heads, int dim, const float* rotation, bool pairs);
    // y = silu(x[0..n)) * x[n..2n)
    void (*swiglu)(const float* x, int n, float* y);
    // y += x
    void (*add)(float* y, const float* x, int n);
};

namespace scalar { extern const RowKernels row_kernels; }
namespace avx2 { extern const RowKernels row_kernels; }
namespace avx512 { extern const RowKernels row_kernels; }

inline const RowKernels& row_kernels() { return select(scalar::row_kernels, avx2::row_kernels, avx512::row_kernels); }

}  // namespace llmd
