// Scans over a row of logits.
#pragma once

#include <cstdint>

#include "isa.h"

namespace llmd {

constexpr int CHUNK = 256;  // ids that are scanned at once

static inline int chunks(int n) { return (n + CHUNK - 1) / CHUNK; }

struct LogitKernels {
    // The largest number of each chunk; false if one is NaN or infinite.
    bool (*scan)(const float* x, int n, float* largest);
    // e^((x - max) / temperature): sums of each chunk, and each weight where `weights` is not null. Returns the sum of all.
    double (*soften)(const float* x, int n, float max, float temperature, float* weights, double* sums);
    // ids of numbers >= floor, ascending; returns how many
    int (*select)(const float* x, int n, float floor, int32_t* ids);
};

namespace scalar { extern const LogitKernels logit_kernels; }
namespace avx2 { extern const LogitKernels logit_kernels; }
namespace avx512 { extern const LogitKernels logit_kernels; }

inline const LogitKernels& logit_kernels() { return select(scalar::logit_kernels, avx2::logit_kernels, avx512::logit_kernels); }

}  // namespace llmd
