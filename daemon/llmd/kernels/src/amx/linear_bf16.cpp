// Linears with bf16 weights on the matrix unit (AMX): activations rounded to bf16, sums in float32 over all of k, 32 rows by 32 outputs at once. A row's
// sums are added up in the same order whatever rows are beside it.
#include "../packed.h"
#include "linear_common.h"

namespace llmd {
namespace LLMD_ISA_NS {

void bf16_block(const Linear& op, int panel0, int panel1, int row0, int row1);
void bf16_gated(const Linear& op, const QuantRows& out, int group0, int group1, int row0, int row1);

#ifdef LLMD_HAS_AMX
namespace {

constexpr int MAX_GROUPS = 512;  // of a panel kept in the unit's order; a longer one is put into it anew for each pair of row blocks
constexpr int AHEAD = 2;         // groups that weights are written ahead of the unit: it can read them only some time later
constexpr int BLOCKS = 2;        // of rows at once
constexpr int PREFETCH_BYTES = 4096;

using Sums = float[2][ROW_BLOCK][PANEL];

// A panel, as two tiles a group, and the sums of row blocks.
struct Work {
    alignas(64) uint16_t weights[MAX_GROUPS][2][GROUP * PANEL];
    alignas(64) Sums sums[BLOCKS];
};
thread_local Work thread_works[2];  // of gates and of ups

// All tiles are 16 rows of 64 bytes. 0..3: sums of two row blocks by two halves of a panel; 4, 5: activations of the blocks; 6, 7: weights of the halves.
AMX void configure() {
    TileConfig config;
    for (int i = 0; i < 8; ++i) config.bytes_per_row[i] = 64, config.rows[i] = 16;
    written();
    _tile_loadconfig(&config);
}

// 32 elements of a panel as two tiles: a row for each pair of elements (4j, 4j + 2), (4j + 1, 4j + 3), in it the pair of 16 outputs. The tiles share out
// the panel's outputs by fours: the first has 0 to 3, 8 to 11 and so on.
VEC_INLINE void write_group(const char* panel, uint16_t (*out)[GROUP * PANEL]) {
    for (int i = 0; i < GROUP / 2; ++i) {
        const char* first = panel + (4 * (i / 2) + i % 2) * (PANEL_FP * 2);
        const __m512i a = _mm512_loadu_si512(first), b = _mm512_loadu_si512(first + 2 * PANEL_FP * 2);
        __builtin_prefetch(panel + PREFETCH_BYTES + i * 128);
        __builtin_prefetch(panel + PREFETCH_BYTES + i * 128 + 64);
        _mm512_storeu_si512(out[0] + 32 * i, _mm512_unpacklo_epi16(a, b));
        _mm512_storeu_si512(out[1] + 32 * i, _mm512_unpackhi_epi16(a, b));
    }
}

// work.sums = those of COUNT row blocks, whose activations are at x. WRITE: the panel is not in the unit's order yet.
template <int COUNT, bool WRITE>
AMX void multiply(const char* panel, int groups, const char* x, Work& work) {
    constexpr int GROUP_BYTES = GROUP * PANEL_FP * 2, TILE_BYTES = ROW_BLOCK * GROUP * 2;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if constexpr (WRITE) {
        for (int g = 0; g < AHEAD && g < groups; ++g) write_group(panel + int64_t(g) * GROUP_BYTES, work.weights[g]);
    }
    for (int g = 0; g < groups; ++g, x += TILE_BYTES) {
        if constexpr (WRITE) {
            if (g + AHEAD < groups) write_group(panel + int64_t(g + AHEAD) * GROUP_BYTES, work.weights[(g + AHEAD) % MAX_GROUPS]);
        }
        written();
        const auto& weights = work.weights[g % MAX_GROUPS];
        _tile_loadd(4, x, 64);
        _tile_loadd(6, weights[0], 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, weights[1], 64);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (COUNT == 2) {
            _tile_loadd(5, x + int64_t(groups) * TILE_BYTES, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, work.sums[0][0], 64);
    _tile_stored(1, work.sums[0][1], 64);
    if constexpr (COUNT == 2) {
        _tile_stored(2, work.sums[1][0], 64);
        _tile_stored(3, work.sums[1][1], 64);
    }
    written();
}

AMX void multiply(const Linear& op, int panel, int row, int row1, bool write, Work& work) {
    const char* at = (const char*)op.w.data + fp_panel_bytes(FORMAT_BF16, op.w.k) * panel;
    const char* x = (const char*)(op.xq.bf16() + GROUP * op.xq.at(row, 0));
    const int groups = op.w.k / GROUP;
    const bool two = row + ROW_BLOCK < row1;
    if (write) two ? multiply<2, true>(at, groups, x, work) : multiply<1, true>(at, groups, x, work);
    else two ? multiply<2, false>(at, groups, x, work) : multiply<1, false>(at, groups, x, work);
}

// Row r's sums as the outputs 0 to 15 and 16 to 31.
VEC_INLINE void outputs(const Sums& sums, int r, __m512& first, __m512& second) {
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    const __m512 a = _mm512_load_ps(sums[0][r]), b = _mm512_load_ps(sums[1][r]);
    first = _mm512_permutex2var_ps(a, low, b);
    second = _mm512_permutex2var_ps(a, high, b);
}

void put(const Linear& op, int panel, int row, int rows, const Sums& sums) {
    const int column = panel * PANEL_FP, columns = op.w.n - column;
    const bool past = past_caches(op);
    for (int r = 0; r < rows; ++r) {
        V first, second;
        outputs(sums, r, first.v, second.v);
        float* y = op.y + (row + r) * op.ldy + column;
        put_row(op, y, first, least(columns, PANEL), past);
        if (columns > PANEL) put_row(op, y + PANEL, second, least(columns - PANEL, PANEL), past);
    }
}

AMX void put_gated(const QuantRows& out, int g, int row, int rows, const Sums& gates, const Sums& ups) {
    for (int r = 0; r < rows; ++r) {
        V gate1, gate2, up1, up2;
        outputs(gates, r, gate1.v, gate2.v);
        outputs(ups, r, up1.v, up2.v);
        put_group(out, row + r, g, gate(gate1, up1).v, gate(gate2, up2).v);
    }
}

}  // namespace

AMX void bf16_block(const Linear& op, int panel0, int panel1, int row0, int row1) {
    Work& work = once(thread_works)[0];
    configure();
    for (int panel = panel0; panel < panel1; ++panel) {
        for (int row = row0; row < row1; row += BLOCKS * ROW_BLOCK) {
            multiply(op, panel, row, row1, row == row0 || op.w.k / GROUP > MAX_GROUPS, work);
            for (int i = 0; i < BLOCKS && row + i * ROW_BLOCK < row1; ++i) put(op, panel, row + i * ROW_BLOCK, least(row1 - row - i * ROW_BLOCK, ROW_BLOCK), work.sums[i]);
        }
    }
    _mm_sfence();  // other threads read what went past the caches
    _tile_release();
}

// A panel of gates and one of ups make a group.
AMX void bf16_gated(const Linear& op, const QuantRows& out, int group0, int group1, int row0, int row1) {
    auto& works = once(thread_works);
    const int ups = op.w.n / 2 / PANEL_FP;
    configure();
    for (int g = group0; g < group1; ++g) {
        for (int row = row0; row < row1; row += BLOCKS * ROW_BLOCK) {
            for (int i = 0; i < 2; ++i) multiply(op, g + i * ups, row, row1, row == row0 || op.w.k / GROUP > MAX_GROUPS, works[i]);
            for (int i = 0; i < BLOCKS && row + i * ROW_BLOCK < row1; ++i) {
                put_gated(out, g, row + i * ROW_BLOCK, least(row1 - row - i * ROW_BLOCK, ROW_BLOCK), works[0].sums[i], works[1].sums[i]);
            }
        }
    }
    _tile_release();
}
#endif

}  // namespace LLMD_ISA_NS
}  // namespace llmd
