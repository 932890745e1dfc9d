// What a program works out once a step and once a slice, for all layers: who owns which rows, where their KV lies, how work is cut up.
#pragma once

#include <cstdint>
#include <vector>

#include "attention_plan.h"
#include "pool.h"
#include "sampling.h"

namespace llmd {

enum Status : int {
    OK = 0,
    BAD_ARGUMENT = -1,  // recording: a size or a handle does not fit
    BAD_STEP = -2,      // the step's arrays contradict each other
    BAD_TOKEN = -3,     // a token id is outside the vocabulary
    BAD_SLOT = -4,      // a KV slot is outside the cache, or a page does not begin at a tile's first slot
    BAD_ROW = -5,       // a wanted row, or an option of it, is out of range
    NO_MEMORY = -6,
};

// Sizes of a program. Part of the C ABI.
struct ProgramShape {
    int32_t hidden;
    int32_t heads;
    int32_t kv_heads;
    int32_t head_dim;
    int32_t layers;
    int32_t vocab;        // numbers of a row of logits
    int32_t sampled_ids;  // the first so many of them may be sampled: the tokenizer's
    int32_t kv_type;
    int32_t page_size;
    int32_t max_rows;
    int32_t max_logits;
    int32_t rope_pairs;  // rotated pairs lie side by side, else half a head apart
    float rope_scale;    // on the rotated numbers (YaRN)
    int32_t reserved;
};

// A hidden state, after the final norm, that is wanted of a request. Part of the C ABI.
struct EmbedRow {
    int64_t first;  // rows of the step that are summed: one for `last` and `cls`, all of the request's for `mean`
    int64_t count;
    double* sum;    // [hidden], written
};

// One step. Part of the C ABI. The arrays are llmd.model.batch.ForwardBatch's.
struct Step {
    int64_t tokens;
    int64_t requests;
    int64_t logit_rows;
    int64_t embed_rows;
    const int64_t* input_ids;
    const int64_t* positions;
    const int64_t* out_cache_loc;
    const int64_t* req_pool_indices;
    const int64_t* seq_lens;
    const int64_t* extend_lens;
    const int32_t* req_to_token;
    int64_t table_rows;
    int64_t table_columns;
    LogitRow* wanted;
    EmbedRow* embeds;
};

// Returns OK or what is wrong with the step. `embeddings`: ids that have one; `slots`: token slots of the cache.
int check_step(const Step& step, const ProgramShape& shape, int64_t embeddings, int64_t slots);

struct StoreItem {
    int span;
    int position_tile;
};

class StepPlan {
  public:
    StepPlan(const ProgramShape& shape, const KvShape& kv, const float* inverse_frequencies);

    // Widths of sliding windows that layers have (0: none).
    void add_window(int window);
    // Find the tiles of each request's tokens. BAD_SLOT where slots do not suit.
    int begin(const Step& step, int64_t slots);
    // Rows [row0, row0 + rows) of the step.
    void slice(const Step& step, int64_t row0, int rows, Pool& pool);

    const std::vector<Span>& spans() const { return spans_; }
    const std::vector<StoreItem>& stores() const { return stores_; }
    const float* rotation(int row) const { return rotations_.data() + size_t(row) * 2 * size_t(kv_.head_dim); }
    const AttentionPlan& attention(int window) const;

  private:
    const ProgramShape shape_;
    const KvShape kv_;
    std::vector<float> frequencies_;
    std::vector<std::vector<int32_t>> tiles_;  // of each request
    std::vector<Span> spans_;
    std::vector<StoreItem> stores_;
    std::vector<float> rotations_;
    std::vector<AttentionPlan> plans_;

    void plan_rotations(const Step& step, int64_t row0, int rows, Pool& pool);
};

}  // namespace llmd
