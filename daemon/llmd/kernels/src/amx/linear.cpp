// Linears on the matrix unit (AMX): activations and weights as bf16, sums in float32 over all of k, 32 rows by 32 outputs at once. A row's sums are added up
// in the same order whatever rows are beside it.
//
// With weights of float16 and float32, activations and weights are split into bf16 that are all of them, and all products of two parts count that can show in a
// float32: five or six where one is enough for bf16, which is still more than twice as fast as computing in float32. A lone row of these is multiplied without
// the unit (row.h).
#include "../linear.h"
#include "row.h"
#include "weights.h"

namespace llmd {
namespace LLMD_ISA_NS {
namespace {

#ifdef LLMD_HAS_AMX

constexpr int MAX_TILES = 1024;  // of a strip kept written out; a longer one is written anew for each pair of row blocks
constexpr int RING = 4;          // groups that are kept where they are read once: they stay in the first cache
constexpr int AHEAD = 2;         // groups that weights are written ahead of the unit: it can read them only some time later
constexpr int BLOCKS = 2;        // of rows at once

using Sums = float[BLOCKS][2][ROW_BLOCK][PANEL];

// A strip's weights, and the sums of row blocks: those that are being made and those that were.
struct Work {
    alignas(64) Tile weights[MAX_TILES];
    alignas(64) Sums sums[2];
};
thread_local Work thread_works[2];  // of gates and of ups

VEC_INLINE int least(int a, int b) { return a < b ? a : b; }

// A thread's own. Its address, a call in a shared library, is not to be looked up at each use.
VEC_INLINE Work* works() {
    Work* mine = thread_works;
    __asm__("" : "+r"(mine));
    return mine;
}

// All tiles have rows of 64 bytes. 0..3: sums of two row blocks by two halves of a strip; 4, 5: activations of the blocks; 6, 7: weights of the halves.
AMX void configure(int rows) {
    TileConfig config;
    for (int i = 0; i < 8; ++i) config.bytes_per_row[i] = 64, config.rows[i] = i < 6 ? uint8_t(least(rows, ROW_BLOCK)) : GROUP / 2;
    written();
    _tile_loadconfig(&config);
}

// What is done about a strip's weights in a pass over its groups: written out to be read once, or to be kept; or they are there.
enum class Weights { ONCE, KEEP, KEPT };

template <int FORMAT>
constexpr int TILES = 2 * weight_parts(FORMAT);  // of a group

template <int FORMAT, Weights WEIGHTS>
VEC_INLINE Tile* tiles_of(Work& work, int g) {
    return work.weights + (WEIGHTS == Weights::ONCE ? g % RING : g) * TILES<FORMAT>;
}

constexpr int TILE_BYTES = sizeof(Tile);

// Tile registers 4 and 5 = activations of COUNT row blocks, whose tiles are `next` apart; 6 and 7 = weights.
template <int COUNT>
AMX_INLINE void load_rows(const char* x, int64_t next) {
    _tile_loadd(4, x, 64);
    if constexpr (COUNT == 2) _tile_loadd(5, x + next, 64);
}

AMX_INLINE void load_weights(const Tile* halves) {
    _tile_loadd(6, halves[0], 64);
    _tile_loadd(7, halves[1], 64);
}

template <int COUNT>
AMX_INLINE void add_products() {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (COUNT == 2) {
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

// The products of a group, of split numbers the smallest first; so that one of the factors stays, most of the time. row.h has the same order.
template <int FORMAT, int COUNT>
AMX_INLINE void multiply_group(const char* x, int64_t next, const Tile* weights) {
    const auto rows = [&](int part) AMX { load_rows<COUNT>(x + part * TILE_BYTES, next); };
    if constexpr (weight_parts(FORMAT) > 1) {
        rows(2), load_weights(weights), add_products<COUNT>();
        rows(1), add_products<COUNT>();
        load_weights(weights + 2), add_products<COUNT>();
        rows(0), add_products<COUNT>();
        if constexpr (weight_parts(FORMAT) > 2) load_weights(weights + 4), add_products<COUNT>();
        load_weights(weights), add_products<COUNT>();
    } else {
        rows(0), load_weights(weights), add_products<COUNT>();
    }
}

// What is done with the rows of sums that are made, `what.put(r)`: some at a time while the unit makes the next ones, so that neither waits for the other.
template <class What>
struct Later {
    What what;
    int next = 0, rows = 0, share = 0;

    AMX void some(int count) {
        for (int i = 0; i < count && next < rows; ++i) what.put(next++);
    }
    // Now these, what is left of the last ones being done: over the time in which the unit multiplies so many groups.
    AMX void become(const What& wanted, int count, int groups) {
        some(rows);
        what = wanted, next = 0, rows = count, share = (count + groups - 1) / groups;
    }
};

// sums = those of COUNT row blocks, whose activations are at x.
template <int FORMAT, int COUNT, Weights WEIGHTS, class What>
AMX void multiply(const Strip<FORMAT>& strip, int groups, const char* x, Work& work, Sums& sums, Later<What>& later) {
    constexpr int GROUP_BYTES = TILE_BYTES * (weight_parts(FORMAT) > 1 ? ROWS_SPLIT : ROWS_ROUNDED);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if constexpr (WEIGHTS != Weights::KEPT) {
        for (int g = 0; g < AHEAD && g < groups; ++g) strip.write(g, tiles_of<FORMAT, WEIGHTS>(work, g));
    }
    for (int g = 0; g < groups; ++g, x += GROUP_BYTES) {
        if constexpr (WEIGHTS != Weights::KEPT) {
            if (g + AHEAD < groups) strip.write(g + AHEAD, tiles_of<FORMAT, WEIGHTS>(work, g + AHEAD));
        }
        written();
        multiply_group<FORMAT, COUNT>(x, int64_t(groups) * GROUP_BYTES, tiles_of<FORMAT, WEIGHTS>(work, g));
        later.some(later.share);
    }
    _tile_stored(0, sums[0][0], 64);
    _tile_stored(1, sums[0][1], 64);
    if constexpr (COUNT == 2) {
        _tile_stored(2, sums[1][0], 64);
        _tile_stored(3, sums[1][1], 64);
    }
    written();
}

// The sums of strip `index` for the row blocks that begin at `row`, the first of which is row0's, of rows up to row1.
template <int FORMAT, class What>
AMX void multiply(const Linear& op, int index, int row0, int row, int row1, Work& work, Sums& sums, Later<What>& later) {
    const Strip<FORMAT> strip(op.w, index);
    const char* x = (const char*)op.xq.bf16(row, 0);
    const int groups = op.w.k / GROUP;
    const bool two = row + ROW_BLOCK < row1;
    const auto with = [&](auto* kernel) AMX { kernel(strip, groups, x, work, sums, later); };
    if (row1 - row0 <= BLOCKS * ROW_BLOCK || groups * TILES<FORMAT> > MAX_TILES) with(two ? multiply<FORMAT, 2, Weights::ONCE, What> : multiply<FORMAT, 1, Weights::ONCE, What>);
    else if (row == row0) with(multiply<FORMAT, 2, Weights::KEEP, What>);
    else with(two ? multiply<FORMAT, 2, Weights::KEPT, What> : multiply<FORMAT, 1, Weights::KEPT, What>);
}

// Row r's sums as the outputs 0 to 15 and 16 to 31.
template <int FORMAT>
VEC_INLINE void outputs(const Sums& sums, int r, V& first, V& second) {
    const auto& block = sums[r / ROW_BLOCK];
    first = load(block[0][r % ROW_BLOCK]), second = load(block[1][r % ROW_BLOCK]);
    if constexpr (weight_parts(FORMAT) > 1) return;
    if constexpr (is_quantized(FORMAT)) {
        first = mul(first, splat(sum_scale(FORMAT))), second = mul(second, splat(sum_scale(FORMAT)));
    } else {
        const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
        const __m512 a = first.v, b = second.v;
        first.v = _mm512_permutex2var_ps(a, low, b), second.v = _mm512_permutex2var_ps(a, high, b);
    }
}

VEC_INLINE void put_half(const Linear& op, float* y, V x, int columns, bool past) {
    if (past && columns == PANEL && reinterpret_cast<uintptr_t>(y) % 64 == 0) return _mm512_stream_ps(y, x.v);
    store(y, op.flags & LINEAR_ADD ? add(load(y, columns), x) : x, columns);
}

// The outputs of a strip for the row blocks that begin at `row`.
template <int FORMAT>
struct Outputs {
    const Linear* op;
    const Sums* sums;
    int index, row;
    bool past;

    AMX_INLINED void put(int r) const {
        const int column = index * STRIP, columns = op->w.n - column;
        V first, second;
        outputs<FORMAT>(*sums, r, first, second);
        float* y = op->y + (row + r) * op->ldy + column;
        put_half(*op, y, first, least(columns, PANEL), past);
        if (columns > PANEL) put_half(*op, y + PANEL, second, least(columns - PANEL, PANEL), past);
    }
};

// Puts 16 numbers as bf16, in the order that tiles of activations have: of each four, the two in the middle change places. Returns what that leaves of them.
AMX_INLINE V put_rounded(uint16_t* at, V x) {
    const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(x.v);
    const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
    _mm256_storeu_si256((__m256i*)at, _mm256_shuffle_epi8(rounded, order));
    return {_mm512_sub_ps(x.v, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16)))};
}

// Group g of a row, from its two halves.
AMX_INLINE void put_group(const QuantRows& out, int row, int g, V first, V second) {
    uint16_t* at = out.bf16(row, g);
    for (int part = 0; part < out.rows; ++part, at += ROW_BLOCK * GROUP) {
        first = put_rounded(at, first);
        second = put_rounded(at + PANEL, second);
    }
}

// Group g of the rows that begin at `row`.
template <int FORMAT>
struct GatedGroup {
    const QuantRows* out;
    const Sums *gates, *ups;
    int g, row;

    AMX_INLINED void put(int r) const {
        V gate1, gate2, up1, up2;
        outputs<FORMAT>(*gates, r, gate1, gate2);
        outputs<FORMAT>(*ups, r, up1, up2);
        put_group(*out, row + r, g, swiglu(gate1, up1), swiglu(gate2, up2));
    }
};

// Whether a lone row goes without the unit.
template <int FORMAT>
constexpr bool ROW_APART = weight_parts(FORMAT) > 1;

template <int FORMAT>
AMX void row_strips(const Linear& op, int strip0, int strip1, int row) {
    Sums& sums = works()->sums[0];
    for (int index = strip0; index < strip1; ++index) {
        multiply_row<FORMAT>(op, index, row, sums[0][0][0], sums[0][1][0]);
        Outputs<FORMAT>{&op, &sums, index, row, past_caches(op)}.put(0);
    }
    _mm_sfence();  // other threads read what went past the caches
}

template <int FORMAT>
AMX void gated_row(const Linear& op, const QuantRows& out, int group0, int group1, int row) {
    Sums *sums = works()->sums, &gates = sums[0], &ups = sums[1];
    for (int g = group0; g < group1; ++g) {
        multiply_row<FORMAT>(op, g, row, gates[0][0][0], gates[0][1][0]);
        multiply_row<FORMAT>(op, g + op.w.n / 2 / STRIP, row, ups[0][0][0], ups[0][1][0]);
        GatedGroup<FORMAT>{&out, &gates, &ups, g, row}.put(0);
    }
}

template <int FORMAT>
AMX void strips(const Linear& op, int strip0, int strip1, int row0, int row1) {
    if constexpr (ROW_APART<FORMAT>) {
        if (row1 - row0 == 1) return row_strips<FORMAT>(op, strip0, strip1, row0);
    }
    Work& work = works()[0];
    Later<Outputs<FORMAT>> later{};
    int turn = 0;
    configure(row1 - row0);
    for (int index = strip0; index < strip1; ++index) {
        for (int row = row0; row < row1; row += BLOCKS * ROW_BLOCK, turn ^= 1) {
            multiply<FORMAT>(op, index, row0, row, row1, work, work.sums[turn], later);
            later.become({&op, &work.sums[turn], index, row, past_caches(op)}, least(row1 - row, BLOCKS * ROW_BLOCK), op.w.k / GROUP);
        }
    }
    later.some(BLOCKS * ROW_BLOCK);
    _mm_sfence();  // other threads read what went past the caches
    _tile_release();
}

// A strip of gates and one of ups make a group.
template <int FORMAT>
AMX void gated_strips(const Linear& op, const QuantRows& out, int group0, int group1, int row0, int row1) {
    if constexpr (ROW_APART<FORMAT>) {
        if (row1 - row0 == 1) return gated_row<FORMAT>(op, out, group0, group1, row0);
    }
    Work* work = works();
    Later<GatedGroup<FORMAT>> later{};
    int turn = 0;
    const int ups = op.w.n / 2 / STRIP;
    configure(row1 - row0);
    for (int g = group0; g < group1; ++g) {
        for (int row = row0; row < row1; row += BLOCKS * ROW_BLOCK, turn ^= 1) {
            for (int i = 0; i < 2; ++i) multiply<FORMAT>(op, g + i * ups, row0, row, row1, work[i], work[i].sums[turn], later);
            later.become({&out, &work[0].sums[turn], &work[1].sums[turn], g, row}, least(row1 - row, BLOCKS * ROW_BLOCK), 2 * op.w.k / GROUP);
        }
    }
    later.some(BLOCKS * ROW_BLOCK);
    _tile_release();
}

AMX void quantize(const float* x, int64_t ldx, const QuantRows& out, int row0, int row1) {
    for (int row = row0; row < row1; ++row) {
        const float* at = x + row * ldx;
        for (int g = 0; g < out.k / GROUP; ++g, at += GROUP) put_group(out, row, g, load(at), load(at + PANEL));
    }
}

void block(const Linear& op, int part0, int part1, int row0, int row1) {
    switch (op.x ? FORMATS : op.w.format) {
        case FORMAT_F32: return strips<FORMAT_F32>(op, part0, part1, row0, row1);
        case FORMAT_F16: return strips<FORMAT_F16>(op, part0, part1, row0, row1);
        case FORMAT_Q4_0: return strips<FORMAT_Q4_0>(op, part0, part1, row0, row1);
        case FORMAT_Q4_1: return strips<FORMAT_Q4_1>(op, part0, part1, row0, row1);
        case FORMAT_Q8_0: return strips<FORMAT_Q8_0>(op, part0, part1, row0, row1);
        case FORMAT_BF16: return strips<FORMAT_BF16>(op, part0, part1, row0, row1);
        default: return avx512::linear_kernels.block(op, part0, part1, row0, row1);
    }
}

void gated(const Linear& op, const QuantRows& out, int group0, int group1, int row0, int row1) {
    switch (op.w.format) {
        case FORMAT_F32: return gated_strips<FORMAT_F32>(op, out, group0, group1, row0, row1);
        case FORMAT_F16: return gated_strips<FORMAT_F16>(op, out, group0, group1, row0, row1);
        case FORMAT_Q4_0: return gated_strips<FORMAT_Q4_0>(op, out, group0, group1, row0, row1);
        case FORMAT_Q4_1: return gated_strips<FORMAT_Q4_1>(op, out, group0, group1, row0, row1);
        case FORMAT_Q8_0: return gated_strips<FORMAT_Q8_0>(op, out, group0, group1, row0, row1);
        default: return gated_strips<FORMAT_BF16>(op, out, group0, group1, row0, row1);
    }
}

#endif

}  // namespace

extern const LinearKernels linear_kernels;
#ifdef LLMD_HAS_AMX
const LinearKernels linear_kernels = {quantize, block, gated, 256, STRIP};  // many rows: writing weights out is paid once a tile
#else  // never in use
const LinearKernels linear_kernels = {};
#endif

}  // namespace LLMD_ISA_NS
}  // namespace llmd
