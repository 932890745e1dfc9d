// Tiles of a linear, and its C ABI.
#include "linear.h"

#include <algorithm>

#include "abi.h"
#include "pool.h"

namespace llmd {
namespace {

constexpr int ROWS_PER_TILE_FP = 96;  // more rows than this are cut, so that their activations stay in L2
constexpr int64_t BYTES_PER_TILE = 16384;   // weights of a tile at least: taking a tile costs about 0.1 us
constexpr int TILES_PER_THREAD = 6;

int cut(int whole, int part, int parts) { return int(int64_t(whole) * part / parts); }

bool suits(const Matrix& w, int m) { return w.format >= 0 && w.format < FORMATS && w.n > 0 && w.k > 0 && m >= 0 && (!is_quantized(w.format) || w.k % GROUP == 0); }

}  // namespace

LinearTiles::LinearTiles(const Linear& op, int threads) : LinearTiles(op, threads, (op.w.n - 1) / linear_kernels().part_width(op.w.format) + 1) {}

LinearTiles::LinearTiles(const Linear& op, int threads, int parts) : op_(op), kernels_(linear_kernels()), parts_(parts), threads_(threads) {
    const int rows = rows_read(op.w.format, op.w.k) ? kernels_.tile_rows : ROWS_PER_TILE_FP;
    row_tiles_ = (op.m + rows - 1) / rows;
    const int64_t part_bytes = std::max<int64_t>(1, packed_size(op.w.format, op.w.n, op.w.k) / parts);
    const int64_t work = std::max<int64_t>(1, BYTES_PER_TILE / part_bytes / std::max(1, op.m));
    const int64_t wanted = (int64_t(TILES_PER_THREAD) * threads + row_tiles_ - 1) / std::max(1, row_tiles_);
    part_tiles_ = int(std::max<int64_t>(1, std::min<int64_t>(threads == 1 ? 1 : wanted, (parts_ + work - 1) / work)));
}

LinearTiles::Range LinearTiles::range(int tile) const {
    const int turn = tile % part_tiles_, row = tile / part_tiles_;
    // Threads that take turns each go on where their last tile ended: memory gives long runs faster than many short ones.
    const int each = part_tiles_ / threads_, more = part_tiles_ % threads_, lane = turn % threads_;
    const int part = lane * each + std::min(lane, more) + turn / threads_;
    const int blocks = (op_.m + ROW_BLOCK - 1) / ROW_BLOCK;
    return {cut(parts_, part, part_tiles_), cut(parts_, part + 1, part_tiles_), cut(blocks, row, row_tiles_) * ROW_BLOCK,
            std::min(op_.m, cut(blocks, row + 1, row_tiles_) * ROW_BLOCK)};
}

void LinearTiles::run(int tile) const {
    const Range at = range(tile);
    kernels_.block(op_, at.from, at.to, at.row0, at.row1);
}

GatedTiles::GatedTiles(const Linear& op, const QuantRows& out, int threads) : LinearTiles(op, threads, op.w.n / 2 / GROUP), out_(out) {}

void GatedTiles::run(int tile) const {
    const Range at = range(tile);
    kernels_.gated(op_, out_, at.from, at.to, at.row0, at.row1);
}

void linear(Pool& pool, const Linear& op) {
    const LinearTiles tiles(op, pool.threads());
    pool.run(tiles.tiles(), [&](int tile, int) { tiles.run(tile); });
}

void gated(Pool& pool, const Linear& op, const QuantRows& out) {
    const GatedTiles tiles(op, out, pool.threads());
    pool.run(tiles.tiles(), [&](int tile, int) { tiles.run(tile); });
}

void quantize_rows(Pool& pool, const float* x, int64_t ldx, int m, const QuantRows& out) {
    const auto quantize = linear_kernels().quantize;
    const int tiles = std::min(m, std::max(1, int(int64_t(m) * out.k / 8192)));
    pool.run(tiles, [&](int tile, int) { quantize(x, ldx, out, cut(m, tile, tiles), cut(m, tile + 1, tiles)); });
}

}  // namespace llmd

using llmd::Matrix;
using llmd::Pool;

static bool suits_rows(int m, int k, int rows) {
    return m >= 0 && k > 0 && k % llmd::GROUP == 0 && (rows == llmd::ROWS_ROUNDED || (rows == llmd::ROWS_SPLIT && llmd::current_isa() == llmd::ISA_AMX));
}

LLMD_API int64_t llmd_packed_size(int format, int n, int k) { return llmd::packed_size(format, n, k); }

LLMD_API int llmd_pack(void* dst, int format, int n, int k, int row0, int rows, const void* source, int source_type) {
    return llmd::pack(dst, format, n, k, row0, rows, source, source_type);
}

LLMD_API int llmd_unpack_rows(const void* packed, int format, int n, int k, const int32_t* ids, int count, float* y, int64_t ldy) {
    const Matrix w{packed, format, n, k};
    return llmd::suits(w, count) ? llmd::unpack_rows(w, ids, count, y, ldy) : -1;
}

LLMD_API int64_t llmd_quant_rows_size(int m, int k, int rows) { return suits_rows(m, k, rows) ? llmd::quant_rows_size(m, k, llmd::Rows(rows)) : -1; }

LLMD_API int llmd_rows_read(int format, int k) { return llmd::rows_read(format, k); }

LLMD_API int llmd_quantize_rows(void* pool, const float* x, int64_t ldx, int m, int k, int rows, void* out) {
    if (!suits_rows(m, k, rows)) return -1;
    llmd::quantize_rows(*static_cast<Pool*>(pool), x, ldx, m, llmd::quant_rows(out, m, k, llmd::Rows(rows)));
    return 0;
}

LLMD_API int llmd_linear(void* pool, const void* packed, int format, int n, int k, const void* x, int64_t ldx, int m, float* y, int64_t ldy, int flags) {
    const Matrix w{packed, format, n, k};
    if (!llmd::suits(w, m)) return -1;
    llmd::Linear op{w, nullptr, {}, y, ldx, ldy, m, flags};
    if (const llmd::Rows rows = llmd::rows_read(format, k)) {
        op.xq = llmd::quant_rows(const_cast<void*>(x), m, k, rows);
    } else {
        op.x = static_cast<const float*>(x);
    }
    llmd::linear(*static_cast<Pool*>(pool), op);
    return 0;
}
