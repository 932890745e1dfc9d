// The linear kernels. An output element's chain of operations depends on nothing but its row and column:
//   quantized: for each group in order, the exact integer sum i of the 32 products, then f = fma(float(i), scale * d, f), and for Q4_1 f = fma(minimum, ds, f);
//   otherwise: f = fma(w, x, f) for each k in order.
#include "../linear.h"

#include "../packed.h"
#include "quant.h"
#include "simd.h"

namespace llmd {
namespace LLMD_ISA_NS {
namespace {

// ---- quantized ----------------------------------------------------------------------------------------------------------------------------------

INLINE int32_t four_bytes(const int8_t* p) {
    int32_t word;
    memcpy(&word, p, 4);
    return word;
}

// sums[r] = sum over a group of q * a[r], for LANES outputs and R rows; w at the group's words of the first of those outputs.
// The weights are unsigned on the way (q + 8, q + 128); what that adds is BIAS * s. Where the ISA works with signed bytes, BIAS is 0 for Q8_0.
#if defined(__AVX512F__)

template <int FORMAT>
constexpr int BIAS = FORMAT == FORMAT_Q8_0 ? 128 : FORMAT == FORMAT_Q4_0 ? 8 : 0;

template <int FORMAT, int R>
INLINE void group_sums(const uint8_t* w, const int8_t* a, I* sums) {
    if constexpr (FORMAT == FORMAT_Q8_0) {
        for (int j = 0; j < 8; ++j) {
            const __m512i word = _mm512_loadu_si512(w + j * 64);
            for (int r = 0; r < R; ++r) sums[r] = _mm512_dpbusd_epi32(sums[r], word, _mm512_set1_epi32(four_bytes(a + r * GROUP + 4 * j)));
        }
    } else {
        const __m512i mask = _mm512_set1_epi8(15);
        for (int j = 0; j < 4; ++j) {
            const __m512i both = _mm512_loadu_si512(w + j * 64);
            const __m512i low = _mm512_and_si512(both, mask), high = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
            for (int r = 0; r < R; ++r) sums[r] = _mm512_dpbusd_epi32(sums[r], low, _mm512_set1_epi32(four_bytes(a + r * GROUP + 4 * j)));
            for (int r = 0; r < R; ++r) sums[r] = _mm512_dpbusd_epi32(sums[r], high, _mm512_set1_epi32(four_bytes(a + r * GROUP + 16 + 4 * j)));
        }
    }
}

#elif defined(__AVX2__)

template <int FORMAT>
constexpr int BIAS = FORMAT == FORMAT_Q4_0 ? 8 : 0;

template <int FORMAT, int R>
INLINE void group_sums(const uint8_t* w, const int8_t* a, I* sums) {
    const __m256i ones = _mm256_set1_epi16(1);
    if constexpr (FORMAT == FORMAT_Q8_0) {
        for (int j = 0; j < 8; ++j) {
            const __m256i word = _mm256_xor_si256(_mm256_loadu_si256((const __m256i*)(w + j * 64)), _mm256_set1_epi8(-128));
            const __m256i magnitude = _mm256_abs_epi8(word);  // 128 at most; 2 * 128 * 127 fits 16 bits
            for (int r = 0; r < R; ++r) {
                const __m256i x = _mm256_sign_epi8(_mm256_set1_epi32(four_bytes(a + r * GROUP + 4 * j)), word);
                sums[r] = _mm256_add_epi32(sums[r], _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, x), ones));
            }
        }
    } else {
        const __m256i mask = _mm256_set1_epi8(15);
        __m256i pairs[R];  // 8 sums of two products fit 16 bits: 8 * 2 * 15 * 127
        for (int r = 0; r < R; ++r) pairs[r] = _mm256_setzero_si256();
        for (int j = 0; j < 4; ++j) {
            const __m256i both = _mm256_loadu_si256((const __m256i*)(w + j * 64));
            const __m256i low = _mm256_and_si256(both, mask), high = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
            for (int r = 0; r < R; ++r) {
                pairs[r] = _mm256_add_epi16(pairs[r], _mm256_maddubs_epi16(low, _mm256_set1_epi32(four_bytes(a + r * GROUP + 4 * j))));
                pairs[r] = _mm256_add_epi16(pairs[r], _mm256_maddubs_epi16(high, _mm256_set1_epi32(four_bytes(a + r * GROUP + 16 + 4 * j))));
            }
        }
        for (int r = 0; r < R; ++r) sums[r] = _mm256_add_epi32(sums[r], _mm256_madd_epi16(pairs[r], ones));
    }
}

#else

template <int FORMAT>
constexpr int BIAS = FORMAT == FORMAT_Q4_0 ? 8 : 0;

template <int FORMAT, int R>
INLINE void group_sums(const uint8_t* w, const int8_t* a, I* sums) {
    for (int r = 0; r < R; ++r) {
        for (int i = 0; i < GROUP; ++i) {
            const int half = i % 16, q = FORMAT == FORMAT_Q8_0 ? int8_t(w[i / 4 * 64 + i % 4] ^ 0x80) : w[half / 4 * 64 + half % 4] >> (i < 16 ? 0 : 4) & 15;
            sums[r] += q * a[r * GROUP + i];
        }
    }
}

#endif

constexpr int ROWS = LANES == 16 ? 12 : LANES == 8 ? 4 : 2;  // rows at a time: what the registers hold

INLINE void put(const Linear& op, int row, int column, F value, bool past) {
    float* y = op.y + row * op.ldy + column;
    const int columns = op.w.n - column, flags = op.flags;
    if (columns >= LANES && past && reinterpret_cast<uintptr_t>(y) % (4 * LANES) == 0) {
        store_past_caches(y, value);
    } else if (columns >= LANES) {
        store(y, flags & LINEAR_ADD ? add(value, load(y)) : value);
    } else {
        store_first(y, flags & LINEAR_ADD ? add(value, load_first(y, columns)) : value, columns);
    }
}

// Weights come from memory much faster than the hardware, which stops at each page, would ask for them. The next panel lies behind this one.
constexpr int PREFETCH = 8192, PREFETCH_FP = 2048;  // bytes ahead

template <int BYTES>
INLINE void prefetch(const char* p) {
    for (int i = 0; i < BYTES; i += 64) __builtin_prefetch(p + i);
}

// R rows (within one block of rows) of LANES outputs of a panel, beginning with output `lane`.
template <int FORMAT, int R>
void quant_tile(const Linear& op, int panel, int lane, int row) {
    const int groups = op.w.k / GROUP;
    const QuantPanel weights((char*)op.w.data, FORMAT, op.w.k, panel);
    const int64_t first = op.xq.at(row, 0);
    F f[R];
    for (int r = 0; r < R; ++r) f[r] = zero();
    for (int g = 0; g < groups; ++g) {
        const int64_t at = first + int64_t(g) * ROW_BLOCK;
        I sums[R];
        for (int r = 0; r < R; ++r) sums[r] = set1_int(BIAS<FORMAT> ? -BIAS<FORMAT> * op.xq.s[at + r] : 0);
        group_sums<FORMAT, R>(weights.quants(g) + lane * 4, op.xq.q + GROUP * at, sums);
        prefetch<quant_group_bytes(FORMAT)>(weights.base + PREFETCH + int64_t(g) * quant_group_bytes(FORMAT));
        const F scale = load_f16(weights.scales(g) + lane);
        for (int r = 0; r < R; ++r) f[r] = fma(to_float(sums[r]), mul(scale, set1(op.xq.d[at + r])), f[r]);
        if constexpr (FORMAT == FORMAT_Q4_1) {
            const F minimum = load_f16(weights.scales(g) + PANEL + lane);
            for (int r = 0; r < R; ++r) f[r] = fma(minimum, set1(op.xq.ds[at + r]), f[r]);
        }
    }
    const int column = panel * PANEL + lane;
    const bool past = past_caches(op);
    for (int r = 0; r < R; ++r) put(op, row + r, column, f[r], past);
}

template <int FORMAT, int R>
INLINE void quant_rows_tile(const Linear& op, int panel, int row, int rows) {
    if constexpr (R > 1) {
        if (rows < R) return quant_rows_tile<FORMAT, R - 1>(op, panel, row, rows);
    }
    for (int lane = 0; lane < PANEL && panel * PANEL + lane < op.w.n; lane += LANES) quant_tile<FORMAT, R>(op, panel, lane, row);
}

template <int FORMAT>
void quant_block(const Linear& op, int panel0, int panel1, int row0, int row1) {
    for (int panel = panel0; panel < panel1; ++panel) {
        for (int row = row0; row < row1;) {
            const int rows = min_int(row1, (row / ROW_BLOCK + 1) * ROW_BLOCK) - row;
            const int pieces = (rows + ROWS - 1) / ROWS, piece = (rows + pieces - 1) / pieces;
            quant_rows_tile<FORMAT, ROWS>(op, panel, row, piece);
            row += piece;
        }
    }
}

// ---- unquantized --------------------------------------------------------------------------------------------------------------------------------

constexpr int ROWS_FP = LANES == 16 ? 12 : LANES == 8 ? 6 : 4;

// Vectors of LANES outputs at a time, for R rows: a whole panel where the registers hold it, so that it is read in one go.
template <int R>
constexpr int VECTORS = LANES == 16 ? 2 : LANES == 8 ? (R <= 2 ? 4 : 2) : 4;

template <int FORMAT>
struct Stored {
    using Type = uint16_t;
};
template <>
struct Stored<FORMAT_F32> {
    using Type = float;
};

INLINE F widen(const float* p, int) { return load(p); }
INLINE F widen(const uint16_t* p, int format) { return format == FORMAT_F16 ? load_f16(p) : load_bf16(p); }

template <int FORMAT, int R>
void fp_tile(const Linear& op, int panel, int lane, int row) {
    using T = typename Stored<FORMAT>::Type;
    const T* w = reinterpret_cast<const T*>((const char*)op.w.data + fp_panel_bytes(FORMAT, op.w.k) * panel) + lane;
    const float* x = op.x + row * op.ldx;
    constexpr int V = VECTORS<R>;
    F f[R][V];
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < V; ++v) f[r][v] = zero();
    }
    for (int i = 0; i < op.w.k; ++i, w += PANEL_FP, ++x) {
        prefetch<V * LANES * int(sizeof(T))>(reinterpret_cast<const char*>(w) + PREFETCH_FP);
        F weights[V];
        for (int v = 0; v < V; ++v) weights[v] = widen(w + v * LANES, FORMAT);
        for (int r = 0; r < R; ++r) {
            const F value = set1(x[r * op.ldx]);
            for (int v = 0; v < V; ++v) f[r][v] = fma(weights[v], value, f[r][v]);
        }
    }
    const bool past = past_caches(op);
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < V; ++v) {
            const int column = panel * PANEL_FP + lane + v * LANES;
            if (column < op.w.n) put(op, row + r, column, f[r][v], past);
        }
    }
}

template <int FORMAT, int R>
INLINE void fp_rows_tile(const Linear& op, int panel, int row, int rows) {
    if constexpr (R > 1) {
        if (rows < R) return fp_rows_tile<FORMAT, R - 1>(op, panel, row, rows);
    }
    for (int lane = 0; lane < PANEL_FP && panel * PANEL_FP + lane < op.w.n; lane += VECTORS<R> * LANES) fp_tile<FORMAT, R>(op, panel, lane, row);
}

template <int FORMAT>
void fp_block(const Linear& op, int panel0, int panel1, int row0, int row1) {
    const int pieces = (row1 - row0 + ROWS_FP - 1) / ROWS_FP;
    for (int panel = panel0; panel < panel1; ++panel) {
        for (int row = row0, i = 0; i < pieces; ++i) {
            const int rows = (row1 - row + pieces - i - 1) / (pieces - i);
            fp_rows_tile<FORMAT, ROWS_FP>(op, panel, row, rows);
            row += rows;
        }
    }
}

// -------------------------------------------------------------------------------------------------------------------------------------------------

void block(const Linear& op, int panel0, int panel1, int row0, int row1) {
    switch (op.w.format) {
        case FORMAT_F32: fp_block<FORMAT_F32>(op, panel0, panel1, row0, row1); break;
        case FORMAT_F16: fp_block<FORMAT_F16>(op, panel0, panel1, row0, row1); break;
        case FORMAT_BF16: fp_block<FORMAT_BF16>(op, panel0, panel1, row0, row1); break;
        case FORMAT_Q4_0: quant_block<FORMAT_Q4_0>(op, panel0, panel1, row0, row1); break;
        case FORMAT_Q4_1: quant_block<FORMAT_Q4_1>(op, panel0, panel1, row0, row1); break;
        case FORMAT_Q8_0: quant_block<FORMAT_Q8_0>(op, panel0, panel1, row0, row1); break;
    }
#if defined(__AVX2__)
    _mm_sfence();  // other threads read what went past the caches
#endif
}

void quantize(const float* x, int64_t ldx, const QuantRows& out, int row0, int row1) {
    for (int row = row0; row < row1; ++row) {
        for (int g = 0; g < out.k / GROUP; ++g) quantize_group(x + row * ldx + g * GROUP, out, row, g);
    }
}

}  // namespace

extern const LinearKernels linear_kernels;
const LinearKernels linear_kernels = {quantize, block, nullptr, 96, PANEL};  // the activations of 96 rows stay in L2

}  // namespace LLMD_ISA_NS
}  // namespace llmd
