// See ../rows.h.
#include "../rows.h"

#include "vec16.h"

namespace llmd::LLMD_ISA_NS {
namespace {

V load_upto(const float* p, int n) { return n >= W ? load(p) : load(p, n); }

void store_upto(float* p, V x, int n) {
    if (n >= W) store(p, x);
    else store(p, x, n);
}

void rms_norm(const float* x, const float* weight, int n, float eps, float* y) {
    V squares = splat(0.0f);
    for (int i = 0; i < n; i += W) {
        const V v = load_upto(x + i, n - i);
        squares = fma(v, v, squares);
    }
    const V scale = splat(1.0f / __builtin_sqrtf(sum(squares) / float(n) + eps));
    for (int i = 0; i < n; i += W) store_upto(y + i, mul(mul(load_upto(x + i, n - i), scale), load_upto(weight + i, n - i)), n - i);
}

void rotate_pairs(float* x, int dim, const float* cos, const float* sin) {
    for (int i = 0; i < dim; i += W) {
        const int n = dim - i;
        const V v = load_upto(x + i, n);
        store_upto(x + i, fma(v, load_upto(cos + i, n), mul(swap_pairs(v), load_upto(sin + i, n))), n);
    }
}

void rotate_halves(float* x, int dim, const float* cos, const float* sin) {
    const int half = dim / 2;
    for (int i = 0; i < half; i += W) {
        const int n = half - i;
        const V low = load_upto(x + i, n), high = load_upto(x + half + i, n), c = load_upto(cos + i, n), s = load_upto(sin + half + i, n);
        store_upto(x + i, sub(mul(low, c), mul(high, s)), n);
        store_upto(x + half + i, fma(high, c, mul(low, s)), n);
    }
}

void rotate(float* x, int heads, int dim, const float* rotation, bool pairs) {
    for (int head = 0; head < heads; head++, x += dim) (pairs ? rotate_pairs : rotate_halves)(x, dim, rotation, rotation + dim);
}

void swiglu(const float* x, int n, float* y) {
    for (int i = 0; i < n; i += W) store_upto(y + i, swiglu(load_upto(x + i, n - i), load_upto(x + n + i, n - i)), n - i);
}

void add_row(float* y, const float* x, int n) {
    for (int i = 0; i < n; i += W) store_upto(y + i, add(load_upto(y + i, n - i), load_upto(x + i, n - i)), n - i);
}

}  // namespace

extern const RowKernels row_kernels = {rms_norm, rotate, swiglu, add_row};

}  // namespace llmd::LLMD_ISA_NS
