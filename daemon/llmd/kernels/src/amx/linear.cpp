// Quantized linears on the matrix unit (AMX): 16 rows by 16 outputs by a group of 32 at once. The unit multiplies a group's quants, which bf16 holds
// exactly, with activations rounded to bf16; the group's scale is applied to its sums here. Sums are float32 and added up group by group, so a row's result
// does not depend on the others.
//
// bf16 rather than the int8 of the other instruction sets, because activations then need no scale of a group, and lose less.
#include "../packed.h"
#include "linear_common.h"

namespace llmd {
namespace LLMD_ISA_NS {

void bf16_block(const Linear& op, int panel0, int panel1, int row0, int row1);
void bf16_gated(const Linear& op, const QuantRows& out, int group0, int group1, int row0, int row1);

namespace {

#ifdef AMX

constexpr int MAX_GROUPS = 512;  // of a panel kept written out; a longer one is written anew for each row block
constexpr int AHEAD = 2;         // groups that the unit is ahead of the sums, and the weights of the unit: what one stores the other can read only some time later
constexpr int SUMS = 4;          // > AHEAD

// What a thread works on: panels in the order that the unit reads, the latest sums, and gates and ups.
struct Scratch {
    alignas(64) uint16_t weights[4][MAX_GROUPS][GROUP * PANEL];
    alignas(64) float sums[SUMS][ROW_BLOCK][PANEL];
    alignas(64) float results[4][ROW_BLOCK][PANEL];
};
thread_local Scratch thread_scratch;

// Tile 0: sums of `rows` rows; 1: their activations, a row of 32 each; 2: weights, a pair of elements of 16 outputs in a row.
AMX void configure(int rows) {
    TileConfig config;
    config.bytes_per_row[0] = config.bytes_per_row[1] = config.bytes_per_row[2] = 64;
    config.rows[0] = config.rows[1] = uint8_t(rows), config.rows[2] = GROUP / 2;
    written();
    _tile_loadconfig(&config);
}

// (x & mask) | base
VEC_INLINE __m512i field(__m512i x, uint32_t mask, uint32_t base) { return _mm512_ternarylogic_epi32(x, _mm512_set1_epi32(int(mask)), _mm512_set1_epi32(int(base)), 0xea); }

// BASE + q for the two numbers of 4 bits that begin at bits 3 and 19 of each word, as a pair of bf16
constexpr float BASE = 16.0f;
VEC_INLINE __m512i pairs_of_4_bits(__m512i x) { return field(x, 0x00780078, 0x41804180); }

// q for the byte that begins at bit 8 of each word, as float32; packed bytes are q + 128
VEC_INLINE __m512i floats_of_8_bits(__m512i x) { return _mm512_castps_si512(_mm512_sub_ps(_mm512_castsi512_ps(field(x, 0x0000ff00, 0x47000000)), _mm512_set1_ps(32768.0f + 128.0f))); }

// The upper halves of two float32, which are all there is to them, as a pair of bf16
VEC_INLINE __m512i pairs(__m512i first, __m512i second) { return _mm512_mask_mov_epi16(_mm512_srli_epi32(first, 16), 0xaaaaaaaa, second); }

// Group g of a panel as the unit reads it: a row for each pair of elements (4j, 4j + 2), (4j + 1, 4j + 3), in it the pair of each output.
template <int FORMAT>
VEC_INLINE void write_group(const QuantPanel& panel, int g, uint16_t* out) {
    const uint8_t* words = panel.quants(g);
    const char* next = panel.base + quant_panel_bytes(FORMAT, panel.groups * GROUP) + int64_t(g) * quant_group_bytes(FORMAT);
    for (int i = 0; i < quant_group_bytes(FORMAT); i += 64) __builtin_prefetch(next + i, 0, 2);
    if constexpr (FORMAT == FORMAT_Q8_0) {
        for (int j = 0; j < 8; ++j) {
            const __m512i w = _mm512_loadu_si512(words + 64 * j);
            _mm512_storeu_si512(out + 64 * j, pairs(floats_of_8_bits(_mm512_slli_epi32(w, 8)), floats_of_8_bits(_mm512_srli_epi32(w, 8))));
            _mm512_storeu_si512(out + 64 * j + 32, pairs(floats_of_8_bits(w), floats_of_8_bits(_mm512_srli_epi32(w, 16))));
        }
    } else {
        for (int j = 0; j < 4; ++j) {
            const __m512i w = _mm512_loadu_si512(words + 64 * j);
            _mm512_storeu_si512(out + 64 * j, pairs_of_4_bits(_mm512_slli_epi32(w, 3)));
            _mm512_storeu_si512(out + 64 * j + 32, pairs_of_4_bits(_mm512_srli_epi32(w, 5)));
            _mm512_storeu_si512(out + 64 * (4 + j), pairs_of_4_bits(_mm512_srli_epi32(w, 1)));
            _mm512_storeu_si512(out + 64 * (4 + j) + 32, pairs_of_4_bits(_mm512_srli_epi32(w, 9)));
        }
    }
}

// sums = products of group g for a row block
AMX_INLINE void multiply(const uint16_t* x, const uint16_t* weights, float (*sums)[PANEL]) {
    _tile_zero(0);
    _tile_loadd(1, x, 64);
    _tile_loadd(2, weights, 64);
    _tile_dpbf16ps(0, 1, 2);
    _tile_stored(0, sums, 64);
}

VEC_INLINE __m512 halves(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }

// f += scale * (sums of (BASE + q) x) + (minimum - BASE * scale) * (sum of x), for each row
template <int FORMAT, int ROWS>
VEC_INLINE void accumulate(const QuantPanel& weights, int g, const float* row_sums, const float (*sums)[PANEL], __m512* f) {
    const __m512 scale = halves(weights.scales(g));
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) f[r] = _mm512_fmadd_ps(_mm512_load_ps(sums[r]), scale, f[r]);
    if constexpr (FORMAT == FORMAT_Q8_0) return;
    const __m512 offset = FORMAT == FORMAT_Q4_0 ? _mm512_mul_ps(scale, _mm512_set1_ps(-(BASE + 8.0f)))
                                                : _mm512_fnmadd_ps(scale, _mm512_set1_ps(BASE), halves(weights.scales(g) + PANEL));
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) f[r] = _mm512_fmadd_ps(offset, _mm512_set1_ps(row_sums[r]), f[r]);
}

// f = the sums of the row block that begins at `row`. WRITE: the panel is not written out yet.
template <int FORMAT, int ROWS, bool WRITE>
AMX_INLINE void block_sums(const QuantPanel& panel, const QuantRows& x, int row, Scratch& scratch, uint16_t (*weights)[GROUP * PANEL], __m512* f) {
    const uint16_t* at = x.bf16() + GROUP * x.at(row, 0);
    const float* row_sums = x.sums + x.at(row, 0);
    const auto begin = [&](int g) AMX { multiply(at + int64_t(g) * ROW_BLOCK * GROUP, weights[g % MAX_GROUPS], scratch.sums[g % SUMS]); };
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) f[r] = _mm512_setzero_ps();
    const int groups = panel.groups;
    if constexpr (WRITE) {
        for (int g = 0; g < 2 * AHEAD && g < groups; ++g) write_group<FORMAT>(panel, g, weights[g]);
        written();
    }
    for (int g = 0; g < AHEAD && g < groups; ++g) begin(g);
    for (int g = 0; g < groups; ++g) {
        if constexpr (WRITE) {
            if (g + 2 * AHEAD < groups) write_group<FORMAT>(panel, g + 2 * AHEAD, weights[(g + 2 * AHEAD) % MAX_GROUPS]);
        }
        written();
        if (g + AHEAD < groups) begin(g + AHEAD);
        written();
        accumulate<FORMAT, ROWS>(panel, g, row_sums + int64_t(g) * ROW_BLOCK, scratch.sums[g % SUMS], f);
    }
}

// y of a row block: `rows` rows, of ROWS that are computed.
template <int FORMAT, int ROWS, bool WRITE>
AMX void linear_tile(const Linear& op, const QuantPanel& panel, Scratch& scratch, int column, int row, int rows) {
    __m512 f[ROWS];
    block_sums<FORMAT, ROWS, WRITE>(panel, op.xq, row, scratch, scratch.weights[0], f);
    const int columns = least(op.w.n - column, PANEL);
    const bool past = past_caches(op);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
        if (r >= rows) break;
        put_row(op, op.y + (row + r) * op.ldy + column, V{f[r]}, columns, past);
    }
}

template <int FORMAT, int ROWS>
AMX void linear_panels(const Linear& op, Scratch& scratch, int panel0, int panel1, int row0, int row1) {
    configure(ROWS);
    for (int index = panel0; index < panel1; ++index) {
        const QuantPanel panel((char*)op.w.data, FORMAT, op.w.k, index);
        bool write = true;
        for (int row = row0; row < row1; row += ROW_BLOCK) {
            const int rows = least(row1 - row, ROW_BLOCK);
            write ? linear_tile<FORMAT, ROWS, true>(op, panel, scratch, index * PANEL, row, rows) : linear_tile<FORMAT, ROWS, false>(op, panel, scratch, index * PANEL, row, rows);
            write = panel.groups > MAX_GROUPS;
        }
    }
    _mm_sfence();  // other threads read what went past the caches
    _tile_release();
}

template <int FORMAT, int ROWS, bool WRITE>
AMX void result_tile(const QuantPanel& panel, const QuantRows& x, Scratch& scratch, int index, int row) {
    __m512 f[ROWS];
    block_sums<FORMAT, ROWS, WRITE>(panel, x, row, scratch, scratch.weights[index], f);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) _mm512_store_ps(scratch.results[index][r], f[r]);
}

// Two panels of gates and two of ups make a group.
template <int FORMAT, int ROWS>
AMX void gated_groups(const Linear& op, const QuantRows& out, Scratch& scratch, int group0, int group1, int row0, int row1) {
    configure(ROWS);
    const int ups = op.w.n / PANEL / 2;
    for (int g = group0; g < group1; ++g) {
        bool write = true;
        for (int row = row0; row < row1; row += ROW_BLOCK) {
            for (int i = 0; i < 4; ++i) {
                const QuantPanel panel((char*)op.w.data, FORMAT, op.w.k, 2 * g + i % 2 + (i < 2 ? 0 : ups));
                write ? result_tile<FORMAT, ROWS, true>(panel, op.xq, scratch, i, row) : result_tile<FORMAT, ROWS, false>(panel, op.xq, scratch, i, row);
            }
            const auto& f = scratch.results;
            for (int r = 0; r < least(row1 - row, ROW_BLOCK); ++r) {
                put_group(out, row + r, g, gate(load(f[0][r]), load(f[2][r])).v, gate(load(f[1][r]), load(f[3][r])).v);
            }
            write = op.w.k / GROUP > MAX_GROUPS;
        }
    }
    _tile_release();
}

AMX void quantize(const float* x, int64_t ldx, const QuantRows& out, int row0, int row1) {
    for (int row = row0; row < row1; ++row) {
        const float* at = x + row * ldx;
        for (int g = 0; g < out.k / GROUP; ++g, at += GROUP) put_group(out, row, g, _mm512_loadu_ps(at), _mm512_loadu_ps(at + PANEL));
    }
}

template <int FORMAT>
void quant_block(const Linear& op, int panel0, int panel1, int row0, int row1) {
    Scratch& scratch = once(thread_scratch);
    const int rows = row1 - row0;
    (rows <= 1   ? linear_panels<FORMAT, 1>
     : rows <= 4 ? linear_panels<FORMAT, 4>
     : rows <= 8 ? linear_panels<FORMAT, 8>
                 : linear_panels<FORMAT, ROW_BLOCK>)(op, scratch, panel0, panel1, row0, row1);
}

template <int FORMAT>
void gated_block(const Linear& op, const QuantRows& out, int group0, int group1, int row0, int row1) {
    Scratch& scratch = once(thread_scratch);
    const int rows = row1 - row0;
    (rows <= 1   ? gated_groups<FORMAT, 1>
     : rows <= 4 ? gated_groups<FORMAT, 4>
     : rows <= 8 ? gated_groups<FORMAT, 8>
                 : gated_groups<FORMAT, ROW_BLOCK>)(op, out, scratch, group0, group1, row0, row1);
}

void block(const Linear& op, int panel0, int panel1, int row0, int row1) {
    switch (op.w.format) {
        case FORMAT_Q4_0: return quant_block<FORMAT_Q4_0>(op, panel0, panel1, row0, row1);
        case FORMAT_Q4_1: return quant_block<FORMAT_Q4_1>(op, panel0, panel1, row0, row1);
        case FORMAT_Q8_0: return quant_block<FORMAT_Q8_0>(op, panel0, panel1, row0, row1);
        case FORMAT_BF16: return op.x ? avx512::linear_kernels.block(op, panel0, panel1, row0, row1) : bf16_block(op, panel0, panel1, row0, row1);
        default: return avx512::linear_kernels.block(op, panel0, panel1, row0, row1);
    }
}

void gated(const Linear& op, const QuantRows& out, int group0, int group1, int row0, int row1) {
    switch (op.w.format) {
        case FORMAT_Q4_0: return gated_block<FORMAT_Q4_0>(op, out, group0, group1, row0, row1);
        case FORMAT_Q4_1: return gated_block<FORMAT_Q4_1>(op, out, group0, group1, row0, row1);
        case FORMAT_Q8_0: return gated_block<FORMAT_Q8_0>(op, out, group0, group1, row0, row1);
        default: return bf16_gated(op, out, group0, group1, row0, row1);
    }
}

#endif

}  // namespace

extern const LinearKernels linear_kernels;
#ifdef AMX
const LinearKernels linear_kernels = {quantize, block, gated, 256};  // many rows: writing weights out is paid once a tile
#else  // never in use
const LinearKernels linear_kernels = {};
#endif

}  // namespace LLMD_ISA_NS
}  // namespace llmd
