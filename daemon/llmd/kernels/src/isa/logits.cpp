// See ../logits.h.
#include "../logits.h"

#include "vec16.h"

namespace llmd::LLMD_ISA_NS {
namespace {

int least(int a, int b) { return a < b ? a : b; }

V load_upto(const float* p, int n) { return n >= W ? load(p) : load(p, n); }

bool scan(const float* x, int n, float* largest) {
    const V zero = splat(0.0f), nothing = splat(-__builtin_inff());
    V poison = zero;  // becomes NaN at the first number that is not finite
    for (int start = 0; start < n; start += CHUNK) {
        const int end = least(start + CHUNK, n);
        V high = nothing;
        for (int i = start; i < end; i += W) {
            const V v = load_upto(x + i, end - i);
            poison = fma(v, zero, poison);
            high = max(high, end - i >= W ? v : in_lanes(0, end - i, v, nothing));
        }
        *largest++ = top(high);
    }
    return sum(poison) == 0.0f;
}

double soften(const float* x, int n, float max, float temperature, float* weights, double* sums) {
    const V reference = splat(max), t = splat(temperature);
    double all = 0.0;
    for (int start = 0; start < n; start += CHUNK) {
        const int end = least(start + CHUNK, n);
        V total = splat(0.0f);
        for (int i = start; i < end; i += W) {
            V w = exp(div(sub(load_upto(x + i, end - i), reference), t));
            if (end - i < W) w = in_lanes(0, end - i, w, splat(0.0f));
            total = add(total, w);
            if (weights) end - i >= W ? store(weights + i, w) : store(weights + i, w, end - i);
        }
        const double part = double(sum(total));
        if (sums) *sums++ = part;
        all += part;
    }
    return all;
}

int select_ids(const float* x, int n, float floor, int32_t* ids) {
    const V limit = splat(floor);
    int found = 0;
    for (int i = 0; i < n; i += W) {
        const V v = load_upto(x + i, n - i);
        uint32_t bits = greater(v, limit) | equal(v, limit);
        if (n - i < W) bits &= (1u << (n - i)) - 1;
        for (; bits; bits &= bits - 1) ids[found++] = i + __builtin_ctz(bits);
    }
    return found;
}

}  // namespace

extern const LogitKernels logit_kernels = {scan, soften, select_ids};

}  // namespace llmd::LLMD_ISA_NS
