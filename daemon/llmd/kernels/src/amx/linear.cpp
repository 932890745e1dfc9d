// Quantized linears on the matrix unit (AMX): 16 rows by 16 outputs by a group of 32 at once. The integers are the same, so the bits are.
#include "../linear.h"

#include "../isa/simd.h"
#include "../packed.h"

#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11
#define AMX __attribute__((target("amx-tile,amx-int8")))
#endif

namespace llmd {
namespace LLMD_ISA_NS {
namespace {

#ifdef AMX

constexpr int MIN_ROWS = 13;      // of a block of rows; below, vectors are as fast
constexpr int MAX_GROUPS = 1024;  // of a panel that is unpacked at once

// Groups that the unit is ahead of the vectors: what it stores can be read only some time later.
constexpr int AHEAD = 2, SUMS = 4;

// What a thread works on: a panel as signed bytes in the order that the unit reads, and the latest sums.
struct Scratch {
    alignas(64) int8_t weights[MAX_GROUPS][GROUP * PANEL];
    alignas(64) int32_t sums[SUMS][ROW_BLOCK][PANEL];
};
thread_local Scratch thread_scratch;

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_per_row[16] = {};
    uint8_t rows[16] = {};
};

// GCC's tile intrinsics do not say that they read memory.
INLINE void written(const void* p) { __asm__ volatile("" ::"r"(p) : "memory"); }

// Tile 0: sums; 1: activations, a row of 32 bytes each; 2: weights, 4 elements of 16 outputs in a row.
AMX void configure() {
    TileConfig config;
    config.bytes_per_row[0] = config.bytes_per_row[2] = 64, config.bytes_per_row[1] = GROUP;
    config.rows[0] = config.rows[1] = ROW_BLOCK, config.rows[2] = GROUP / 4;
    written(&config);
    _tile_loadconfig(&config);
}

template <int FORMAT>
INLINE void unpack(const uint8_t* words, int8_t* out) {
    if constexpr (FORMAT == FORMAT_Q8_0) {
        for (int j = 0; j < 8; ++j) _mm512_storeu_si512(out + 64 * j, _mm512_xor_si512(_mm512_loadu_si512(words + 64 * j), _mm512_set1_epi8(-128)));
    } else {
        const __m512i mask = _mm512_set1_epi8(15), bias = _mm512_set1_epi8(FORMAT == FORMAT_Q4_0 ? 8 : 0);
        for (int j = 0; j < 4; ++j) {
            const __m512i both = _mm512_loadu_si512(words + 64 * j);
            _mm512_storeu_si512(out + 64 * j, _mm512_sub_epi8(_mm512_and_si512(both, mask), bias));
            _mm512_storeu_si512(out + 64 * (4 + j), _mm512_sub_epi8(_mm512_and_si512(_mm512_srli_epi16(both, 4), mask), bias));
        }
    }
}

template <int FORMAT>
void unpack_panel(const QuantPanel& weights, Scratch& scratch) {
    for (int g = 0; g < weights.groups; ++g) {
        const char* next = weights.base + quant_panel_bytes(FORMAT, weights.groups * GROUP) + int64_t(g) * quant_group_bytes(FORMAT);
        for (int i = 0; i < quant_group_bytes(FORMAT); i += 64) __builtin_prefetch(next + i, 0, 2);
        unpack<FORMAT>(weights.quants(g), scratch.weights[g]);
    }
    written(&scratch);
}

// The sums of group g for a block of rows.
AMX INLINE void multiply(const int8_t* q, const Scratch& scratch, int g, int32_t (*sums)[PANEL]) {
    _tile_zero(0);
    _tile_loadd(1, q + int64_t(g) * ROW_BLOCK * GROUP, GROUP);
    _tile_loadd(2, scratch.weights[g], 64);
    _tile_dpbssd(0, 1, 2);
    _tile_stored(0, sums, 64);
}

template <int FORMAT>
INLINE void accumulate(const QuantPanel& weights, const QuantRows& x, int64_t at, int g, const int32_t (*sums)[PANEL], F* f) {
    const F scale = load_f16(weights.scales(g));
#pragma GCC unroll 16
    for (int r = 0; r < ROW_BLOCK; ++r) f[r] = fma(to_float(_mm512_loadu_si512(sums[r])), mul(scale, set1(x.d[at + r])), f[r]);
    if constexpr (FORMAT == FORMAT_Q4_1) {
        const F minimum = load_f16(weights.scales(g) + PANEL);
#pragma GCC unroll 16
        for (int r = 0; r < ROW_BLOCK; ++r) f[r] = fma(minimum, set1(x.ds[at + r]), f[r]);
    }
}

// `rows` rows of a whole block of rows; the others are computed too, from whatever is there, and dropped.
template <int FORMAT>
AMX void tile(const Linear& op, const QuantPanel& weights, Scratch& scratch, int panel, int row, int rows) {
    const int64_t first = op.xq.at(row, 0);
    const int8_t* q = op.xq.q + GROUP * first;
    F f[ROW_BLOCK];
#pragma GCC unroll 16
    for (int r = 0; r < ROW_BLOCK; ++r) f[r] = zero();
    for (int g = 0; g < AHEAD && g < weights.groups; ++g) multiply(q, scratch, g, scratch.sums[g]);
    for (int g = 0; g < weights.groups; ++g) {
        if (g + AHEAD < weights.groups) multiply(q, scratch, g + AHEAD, scratch.sums[(g + AHEAD) % SUMS]);
        accumulate<FORMAT>(weights, op.xq, first + int64_t(g) * ROW_BLOCK, g, scratch.sums[g % SUMS], f);
    }
    const int column = panel * PANEL, columns = min_int(op.w.n - column, PANEL);
#pragma GCC unroll 16
    for (int r = 0; r < ROW_BLOCK; ++r) {
        if (r >= rows) break;
        float* y = op.y + (row + r) * op.ldy + column;
        store_first(y, op.flags & LINEAR_ADD ? add(f[r], load_first(y, columns)) : f[r], columns);
    }
}

template <int FORMAT>
AMX void quant_block(const Linear& op, int panel0, int panel1, int row0, int row1) {
    Scratch* mine = &thread_scratch;
    __asm__("" : "+r"(mine));  // else its address, a call in a shared library, is looked up at each use
    Scratch& scratch = *mine;
    configure();
    written(op.xq.q);
    for (int panel = panel0; panel < panel1; ++panel) {
        const QuantPanel weights((char*)op.w.data, FORMAT, op.w.k, panel);
        unpack_panel<FORMAT>(weights, scratch);
        for (int row = row0; row < row1; row += ROW_BLOCK) tile<FORMAT>(op, weights, scratch, panel, row, min_int(row1 - row, ROW_BLOCK));
    }
    _tile_release();
}

void block(const Linear& op, int panel0, int panel1, int row0, int row1) {
    const int head = min_int(row1, (row0 + ROW_BLOCK - 1) / ROW_BLOCK * ROW_BLOCK);  // rows of a block begun by another tile
    const int tail = row1 - row1 % ROW_BLOCK;
    const int end = row1 - tail >= MIN_ROWS ? row1 : tail;
    if (!is_quantized(op.w.format) || op.w.k / GROUP > MAX_GROUPS || end <= head) return avx512::linear_kernels.block(op, panel0, panel1, row0, row1);
    if (row0 < head) avx512::linear_kernels.block(op, panel0, panel1, row0, head);
    if (op.w.format == FORMAT_Q4_0) quant_block<FORMAT_Q4_0>(op, panel0, panel1, head, end);
    if (op.w.format == FORMAT_Q4_1) quant_block<FORMAT_Q4_1>(op, panel0, panel1, head, end);
    if (op.w.format == FORMAT_Q8_0) quant_block<FORMAT_Q8_0>(op, panel0, panel1, head, end);
    if (end < row1) avx512::linear_kernels.block(op, panel0, panel1, end, row1);
}

#else  // a compiler that does not know it

void block(const Linear& op, int panel0, int panel1, int row0, int row1) { avx512::linear_kernels.block(op, panel0, panel1, row0, row1); }

#endif

void quantize(const float* x, int64_t ldx, const QuantRows& out, int row0, int row1) { avx512::linear_kernels.quantize(x, ldx, out, row0, row1); }

}  // namespace

extern const LinearKernels linear_kernels;
const LinearKernels linear_kernels = {quantize, block};

}  // namespace LLMD_ISA_NS
}  // namespace llmd
