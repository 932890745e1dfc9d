// The two products of attention on the matrix unit, for sixteen rows of queries and a block of keys: scores, and weighted values.
//
// Tiles 0..3 are sums, 4 holds sixteen rows of 32 numbers and 5 what they are multiplied by; 6 and 7 the same for 16 numbers.
#pragma once

#include "../isa/attention_ahead.h"
#include "attention_memory.h"
#include "tiles.h"

#ifdef AMX
namespace llmd::LLMD_ISA_NS {
namespace {

AMX void configure(int rows) {
    TileConfig config;
    for (int i = 0; i < 8; i++) config.bytes_per_row[i] = 64, config.rows[i] = uint8_t(rows);
    config.rows[5] = 16;
    config.bytes_per_row[6] = 32;
    config.rows[7] = 8;
    written();
    _tile_loadconfig(&config);
}

// Adds a product to sum SUM, or sets it: that of tiles 4 and 5, or (HALF) of 6 and 7.
template <int SUM, bool FRESH, bool HALF>
AMX_INLINE void add_product() {
    if constexpr (SUM == 0) {
        if (FRESH) _tile_zero(0);
        if (HALF) _tile_dpbf16ps(0, 6, 7);
        else _tile_dpbf16ps(0, 4, 5);
    } else if constexpr (SUM == 1) {
        if (FRESH) _tile_zero(1);
        if (HALF) _tile_dpbf16ps(1, 6, 7);
        else _tile_dpbf16ps(1, 4, 5);
    } else if constexpr (SUM == 2) {
        if (FRESH) _tile_zero(2);
        if (HALF) _tile_dpbf16ps(2, 6, 7);
        else _tile_dpbf16ps(2, 4, 5);
    } else {
        if (FRESH) _tile_zero(3);
        if (HALF) _tile_dpbf16ps(3, 6, 7);
        else _tile_dpbf16ps(3, 4, 5);
    }
}

template <int SUM>
AMX_INLINE void store_sum(float* out, int stride) {
    if constexpr (SUM == 0) _tile_stored(0, out, stride);
    else if constexpr (SUM == 1) _tile_stored(1, out, stride);
    else if constexpr (SUM == 2) _tile_stored(2, out, stride);
    else _tile_stored(3, out, stride);
    written();
}

// Sixteen columns of 1 for any number of keys: the sum of their weights.
alignas(64) constexpr uint32_t ONES[TILE] = {0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80,
                                             0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80};

// Scores of sixteen rows: products of the k-th 32 numbers of the rows and of a tile of keys.
struct ScoreWork {
    const uint16_t* q = nullptr;  // rows `depth` apart
    const char* const* keys = nullptr;
    float* scores = nullptr;  // rows BLOCK apart
    int depth = 0;

    AMX LLMD_INLINE void load_rows(int k) const { _tile_loadd(4, q + k * 32, depth * 2); }

    template <int SUM, bool FRESH>
    AMX LLMD_INLINE void add(int tile, int k) const {
        _tile_loadd(5, keys[tile] + k * 1024, 64);
        add_product<SUM, FRESH, false>();
    }

    template <int SUM>
    AMX LLMD_INLINE void store(int tile) const {
        store_sum<SUM>(scores + tile * TILE, BLOCK * 4);
    }
};

// Values weighted by sixteen rows: products of the weights of the k-th tile of keys and of sixteen columns of its values.
struct ValueWork {
    const float* weights = nullptr;  // bf16, rows BLOCK floats apart
    const char* const* values = nullptr;
    float* out = nullptr;  // rows `width` apart
    int width = 0;

    AMX LLMD_INLINE void load_rows(int k) const { _tile_loadd(6, weights + k * (TILE / 2), BLOCK * 4); }

    template <int SUM, bool FRESH>
    AMX LLMD_INLINE void add(int column, int k) const {
        const int dim = width - TILE;
        if (column * TILE < dim) _tile_loadd(7, values[k] + column * 64, dim * 4);
        else _tile_loadd(7, ONES, 0);
        add_product<SUM, FRESH, true>();
    }

    template <int SUM>
    AMX LLMD_INLINE void store(int column) const {
        store_sum<SUM>(out + column * TILE, width * 4);
    }
};

constexpr int SET = 2;  // sums that rows are loaded once for

// ---- all of it at once, for any sizes ----

// N columns (of keys or of values) of the k-th products. between() comes after each.
template <int N, bool FRESH, class Work, class Between>
AMX_INLINE void add_columns(const Work& work, int column, int k, const Between& between) {
    work.load_rows(k);
    work.template add<0, FRESH>(column, k);
    between();
    if (N == 1) return;
    work.template add<1, FRESH>(column + 1, k);
    between();
}

template <int N, class Work, class Between>
AMX_INLINE void some_columns(const Work& work, int column, int products, const Between& between) {
    add_columns<N, true>(work, column, 0, between);
    for (int k = 1; k < products; k++) add_columns<N, false>(work, column, k, between);
    work.template store<0>(column);
    if (N > 1) work.template store<1>(column + 1);
}

template <class Work, class Between>
AMX_INLINE void all_columns(const Work& work, int columns, int products, const Between& between) {
    int column = 0;
    for (; column + SET <= columns; column += SET) some_columns<SET>(work, column, products, between);
    if (column < columns) some_columns<1>(work, column, products, between);
}

AMX void all_scores(const ScoreWork& work, int tiles, Ahead& ahead) {
    all_columns(work, tiles, work.depth / 32, [&] { ahead.lines(16); });
}
AMX void all_values(const ValueWork& work, int tiles, Ahead& ahead) {
    all_columns(work, work.width / TILE, tiles, [&] { ahead.lines(8); });
}

// ---- step by step, for whole blocks ----

// The values of one part and the scores of another, for heads of DIM numbers, in STEPS of one product each, which whoever computes something else meanwhile
// puts between. A sum is stored some steps after it is complete: to store keeps the CPU from all else until it is.
template <int DIM>
class Steps {
  public:
    static_assert(DIM % 32 == 0);

    Steps(const ValueWork& values, const ScoreWork& scores, Ahead& ahead) : values_(values), scores_(scores), ahead_(ahead) {}

    // Those that belong to the INDEX-th of COUNT occasions.
    template <int INDEX, int COUNT>
    AMX LLMD_INLINE void run() const {
        ahead_.ask(2);
        from<INDEX * STEPS / COUNT, (INDEX + 1) * STEPS / COUNT>();
    }

    AMX LLMD_INLINE void finish() const { store_from<0, size_of(GROUPS - 1)>(); }

  private:
    // Groups of up to SET columns: first those of values, then those of scores.
    static constexpr int COLUMNS = width(DIM) / TILE, VALUE_GROUPS = (COLUMNS + SET - 1) / SET, GROUPS = VALUE_GROUPS + (TILES + SET - 1) / SET;
    static constexpr int STEPS = COLUMNS * TILES + TILES * (DIM / 32);

    const ValueWork values_;
    const ScoreWork scores_;
    Ahead& ahead_;

    // Columns, or tiles of keys, are shared out evenly.
    static constexpr int column_of(int group) {
        return group < VALUE_GROUPS ? group * COLUMNS / VALUE_GROUPS : (group - VALUE_GROUPS) * TILES / (GROUPS - VALUE_GROUPS);
    }
    static constexpr int size_of(int group) {
        const int last = group < VALUE_GROUPS ? COLUMNS : TILES;
        return (group + 1 == VALUE_GROUPS || group + 1 == GROUPS ? last : column_of(group + 1)) - column_of(group);
    }
    static constexpr int steps_of(int group) { return size_of(group) * (group < VALUE_GROUPS ? TILES : DIM / 32); }
    static constexpr int first_of(int group) { return group == 0 ? 0 : first_of(group - 1) + steps_of(group - 1); }
    static constexpr int group_of(int step) {
        int group = 0;
        while (first_of(group + 1) <= step) group++;
        return group;
    }

    template <int STEP, int END>
    AMX LLMD_INLINE void from() const {
        if constexpr (STEP < END) {
            constexpr int GROUP = group_of(STEP), INDEX = STEP - first_of(GROUP);
            if constexpr (GROUP < VALUE_GROUPS) step<GROUP, INDEX>(values_);
            else step<GROUP, INDEX>(scores_);
            // The sums of the group before, one after each of this group's last steps.
            constexpr int BEFORE = GROUP > 0 ? size_of(GROUP - 1) : 0, SUM = INDEX - (steps_of(GROUP) - BEFORE);
            if constexpr (SUM >= 0) store<GROUP - 1, SUM>();
            from<STEP + 1, END>();
        }
    }

    template <int GROUP, int INDEX, class Work>
    AMX LLMD_INLINE void step(const Work& work) const {
        constexpr int K = INDEX / size_of(GROUP), SUM = INDEX % size_of(GROUP);
        if constexpr (SUM == 0) work.load_rows(K);
        work.template add<GROUP % 2 * SET + SUM, K == 0>(column_of(GROUP) + SUM, K);
    }

    template <int GROUP, int SUM>
    AMX LLMD_INLINE void store() const {
        if constexpr (GROUP < VALUE_GROUPS) values_.store<GROUP % 2 * SET + SUM>(column_of(GROUP) + SUM);
        else scores_.store<GROUP % 2 * SET + SUM>(column_of(GROUP) + SUM);
    }

    template <int SUM, int END>
    AMX LLMD_INLINE void store_from() const {
        if constexpr (SUM < END) {
            store<GROUPS - 1, SUM>();
            store_from<SUM + 1, END>();
        }
    }
};

}  // namespace
}  // namespace llmd::LLMD_ISA_NS
#endif
