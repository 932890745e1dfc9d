// Linear layers: y[m, n] = x[m, k] W^T (+ y), activations and results in float32.
//
// A weight matrix is *packed* once (pack) into bytes that hold no pointer, start at a multiple of 64 and may be mapped read-only from a file.
// The same bytes serve every ISA. Outputs are packed in panels of PANEL (PANEL_FP for the unquantized formats); two matrices with the same k whose
// first has a multiple of that many rows may be packed one after the other and used as one matrix (q, k, v; gate, up): see `row0` of pack.
//
// Every output element is reduced over k in one fixed order, whatever m, the tile, the thread. scalar, AVX2 and AVX-512 give the same bits, AMX its own.
//
// Quantized formats (with AMX, all formats) work on activations of their own kind (QuantRows). Making them is an operation of its own: once for q, k and v,
// and free to be fused with what produces x.
#pragma once

#include <cstddef>
#include <cstdint>

#include "isa.h"

namespace llmd {

constexpr int GROUP = 32;      // elements of k that share a scale
constexpr int PANEL = 16;      // outputs of a quantized panel
constexpr int PANEL_FP = 32;   // outputs of an unquantized panel

// How a matrix is packed. The numbers are part of the ABI and of the packed weight cache.
//   Q4_0, Q4_1: 4 bits, a scale (and a minimum) per group;  Q8: 8 bits, a scale per group.  All three hold what GGUF's types hold, bit for bit.
enum Format : int { FORMAT_F32 = 0, FORMAT_F16 = 1, FORMAT_BF16 = 2, FORMAT_Q4_0 = 3, FORMAT_Q4_1 = 4, FORMAT_Q8_0 = 5, FORMATS = 6 };

constexpr bool is_quantized(int format) { return format >= FORMAT_Q4_0; }

// What a linear reads its activations as: float32, or QuantRows of numbers that are rounded (int8 in groups of 32; with AMX, bf16) or split into SPLIT bf16,
// which are all of a float32. Part of the ABI; of QuantRows it is how many numbers stand for one.
enum Rows : int { ROWS_FLOAT = 0, ROWS_ROUNDED = 1, ROWS_SPLIT = 3 };

static inline Rows rows_read(int format, int k) {
    if (is_quantized(format)) return ROWS_ROUNDED;
    if (current_isa() != ISA_AMX || k % GROUP) return ROWS_FLOAT;
    return format == FORMAT_BF16 ? ROWS_ROUNDED : ROWS_SPLIT;
}

struct Matrix {
    const void* data;  // packed, aligned to 64
    int format;
    int n;  // outputs
    int k;  // inputs; a multiple of GROUP for the quantized formats
};

// Activations [m, k] quantized per row and group: x ~ q * d. s = sum of the group's q; ds = d * s. A group that holds a NaN or an infinity has a d that
// is not finite. Rows are kept in blocks of ROW_BLOCK, so that a tile of rows lies together:
//   q int8 [blocks, groups, ROW_BLOCK, GROUP] | d float [blocks, groups, ROW_BLOCK] | ds likewise | s int32 likewise
// in one piece of memory of quant_rows_size bytes, aligned to 64. With AMX there are instead
//   bf16 [blocks, groups, rows, ROW_BLOCK, GROUP], of each four numbers of a group the two in the middle exchanged,
// rounded to nearest even; of ROWS_SPLIT, the second is what the first leaves of the number, and the third what both do.
// Fill it with LinearKernels::quantize, or (but for AMX) group by group with isa/quant.h.
constexpr int ROW_BLOCK = 16;

struct QuantRows {
    int8_t* q;
    float* d;
    float* ds;
    int32_t* s;
    int k;
    Rows rows;

    // Where group g of a row has its scale in d, ds and s; its 32 numbers are at q + GROUP * at(row, g).
    __attribute__((always_inline)) int64_t at(int row, int g) const { return (int64_t(row / ROW_BLOCK) * (k / GROUP) + g) * ROW_BLOCK + row % ROW_BLOCK; }
    // Its 32 bf16; those of the next part are ROW_BLOCK * GROUP further on.
    __attribute__((always_inline)) uint16_t* bf16(int row, int g) const {
        return reinterpret_cast<uint16_t*>(q) + ((int64_t(row / ROW_BLOCK) * (k / GROUP) + g) * rows * ROW_BLOCK + row % ROW_BLOCK) * GROUP;
    }
};

static inline int64_t quant_row_groups(int m, int k) { return int64_t((m + ROW_BLOCK - 1) / ROW_BLOCK) * ROW_BLOCK * (k / GROUP); }

static inline int64_t quant_rows_size(int m, int k, Rows rows) { return quant_row_groups(m, k) * 2 * GROUP * rows; }  // enough for bf16, which is more than int8 takes

static inline QuantRows quant_rows(void* memory, int m, int k, Rows rows) {
    const int64_t groups = quant_row_groups(m, k);
    char* q = static_cast<char*>(memory);
    float* d = reinterpret_cast<float*>(q + groups * GROUP);
    return {reinterpret_cast<int8_t*>(q), d, d + groups, reinterpret_cast<int32_t*>(d + 2 * groups), k, rows};
}

enum LinearFlags : int { LINEAR_ADD = 1 };  // y += x W^T (a residual)

struct Linear {
    Matrix w;
    const float* x;  // [m, k], rows ldx apart, where rows_read says floats
    QuantRows xq;    // else
    float* y;        // [m, n], rows ldy apart
    int64_t ldx;
    int64_t ldy;
    int m;
    int flags;
};

// Results that the caches do not hold until they are read go past them: a store that has to fetch its line first waits longer than the line took to compute.
static inline bool past_caches(const Linear& op) { return int64_t(op.m) * op.w.n >= 1 << 18 && !(op.flags & LINEAR_ADD); }

// The kernels of one ISA. All take ranges, so that a caller chooses its own tiles.
struct LinearKernels {
    // Rows [row0, row1) of x [*, k], rows ldx apart, into out. k is a multiple of GROUP.
    void (*quantize)(const float* x, int64_t ldx, const QuantRows& out, int row0, int row1);
    // Parts [part0, part1) of y's outputs, which `part_width` tells, for rows [row0, row1).
    void (*block)(const Linear& op, int part0, int part1, int row0, int row1);
    // out = silu(gate) * up for the first and second half of the outputs of a matrix that reads QuantRows, which nothing else sees; op.y is not used. Groups [group0, group1) of out;
    // n is a multiple of 2 * GROUP. Null: not there.
    void (*gated)(const Linear& op, const QuantRows& out, int group0, int group1, int row0, int row1);
    int tile_rows;  // of a tile of a linear that reads QuantRows, at most
    int quant_part;  // outputs of a part of a quantized matrix

    int part_width(int format) const { return is_quantized(format) ? quant_part : PANEL_FP; }
};

namespace scalar { extern const LinearKernels linear_kernels; }
namespace avx2 { extern const LinearKernels linear_kernels; }
namespace avx512 { extern const LinearKernels linear_kernels; }
namespace amx { extern const LinearKernels linear_kernels; }

inline const LinearKernels& linear_kernels() {
    return current_isa() == ISA_AMX ? amx::linear_kernels : select(scalar::linear_kernels, avx2::linear_kernels, avx512::linear_kernels);
}

static inline int panel_width(int format) { return is_quantized(format) ? PANEL : PANEL_FP; }
static inline int panels(const Matrix& w) { return (w.n + panel_width(w.format) - 1) / panel_width(w.format); }

// How a linear is cut into tiles for a pool: `tiles()` of them, tile i computed by `run(i)`, in any order, by any thread. Cheap to make per call.
class LinearTiles {
  public:
    LinearTiles(const Linear& op, int threads);
    int tiles() const { return part_tiles_ * row_tiles_; }
    void run(int tile) const;

  protected:
    LinearTiles(const Linear& op, int threads, int parts);
    // Of parts (panels; groups that are gated) and of rows.
    struct Range {
        int from, to, row0, row1;
    };
    Range range(int tile) const;
    const Linear& op_;
    const LinearKernels& kernels_;

  private:
    int parts_, threads_, part_tiles_, row_tiles_;
};

// The same for LinearKernels::gated.
class GatedTiles : private LinearTiles {
  public:
    GatedTiles(const Linear& op, const QuantRows& out, int threads);
    using LinearTiles::tiles;
    void run(int tile) const;
    static bool can(const Matrix& w) { return linear_kernels().gated && rows_read(w.format, w.k) && w.n % (2 * GROUP) == 0; }

  private:
    const QuantRows& out_;
};

class Pool;

// Both in parallel, waiting for the end. m may be 0.
void quantize_rows(Pool& pool, const float* x, int64_t ldx, int m, const QuantRows& out);
void linear(Pool& pool, const Linear& op);
void gated(Pool& pool, const Linear& op, const QuantRows& out);

// Packing. Rows of the source are GGUF blocks or plain numbers. `pack` writes rows [row0, row0 + rows) of a matrix [n, k] at dst (packed_size bytes,
// aligned to 64, zeroed by the caller or by a pack that covers all rows); row0 is a multiple of the format's panel, and rows too unless they end the matrix. From a source of the format's own kind
// nothing is lost; other sources are converted to float32 and then rounded, or quantized per group of 32 (Q4_1, Q8_0). 0 = done, -1 = bad arguments.
// `unpack_rows` writes rows ids[0..count) of a packed matrix as float32 [count, k], rows ldy apart, each number as GGUF dequantizes it (an embedding).
enum Source : int { SOURCE_F32 = 0, SOURCE_F16 = 1, SOURCE_BF16 = 2, SOURCE_Q4_0 = 3, SOURCE_Q4_1 = 4, SOURCE_Q8_0 = 5 };

int64_t packed_size(int format, int n, int k);  // -1: no such format, or k does not suit it
int pack(void* dst, int format, int n, int k, int row0, int rows, const void* source, int source_type);
int unpack_rows(const Matrix& w, const int32_t* ids, int count, float* y, int64_t ldy);

}  // namespace llmd
