// A model's step, recorded once as a list of operations over buffers of fixed size and replayed by one call.
//
// The body runs over the step's new tokens, at most `max_rows` of them at a time: a longer step is cut into slices, which changes no bit of it, since
// what a row gets depends on its own request's tokens alone. The tail runs over the rows whose logits are wanted, at most `max_logits` at a time.
// A program belongs to one thread at a time. It does not crash on what it is given: recording and running return a Status.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "linear.h"
#include "step_plan.h"

namespace llmd {

enum class Kind : int { EMBED, RMS_NORM, LINEAR, ADD_BIAS, HEAD_NORM, ROPE_STORE, ATTENTION, QUANTIZE, SWIGLU, GATED, POOL, SELECT, SAMPLE, PLAN, KINDS };

// One operation; which fields count depends on its kind.
struct Op {
    Kind kind;
    int in = -1;
    int out = -1;
    int matrix = -1;
    int middle = -1;  // a buffer for what comes in between
    int layer = 0;
    int window = 0;
    int flags = 0;
    float eps = 0.0f;
    const float* weight = nullptr;
    const float* weight2 = nullptr;
};

// [rows, width] numbers, float32 or what `kind` says. Rows of floats are `stride` apart: not a multiple of 1 KiB, for then a column's lines would all fall
// into a few sets of the caches.
struct Buffer {
    Rows kind;
    bool tail;
    int rows;
    int width;
    std::unique_ptr<char, void (*)(void*)> memory;

    float* floats() const { return reinterpret_cast<float*>(memory.get()); }
    float* row(int64_t i) const { return floats() + i * stride(); }
    int64_t stride() const { return stride_of(width); }
    static int64_t stride_of(int64_t width) { return width % 256 ? width : width + 16; }
    QuantRows quant() const { return quant_rows(memory.get(), rows, width, kind); }
};

class Program {
  public:
    // Throws std::bad_alloc. The shape has been checked (valid).
    Program(Pool& pool, const ProgramShape& shape, const float* inverse_frequencies);

    static bool valid(const ProgramShape& shape);

    // These return a handle (>= 0) or a Status.
    int add_buffer(int width, int kind, bool tail);
    int add_matrix(const Matrix& matrix);
    int record(const Op& op);

    int set_cache(void* memory, int64_t slots);
    int run(const Step& step);

    const KvShape& kv() const { return kv_; }
    // Nanoseconds of each kind since the last call; the first call turns measuring on.
    void timing(double* out);

  private:
    using Memory = std::unique_ptr<char, void (*)(void*)>;

    Pool& pool_;
    const ProgramShape shape_;
    const KvShape kv_;
    std::vector<Buffer> buffers_;
    std::vector<Matrix> matrices_;
    std::vector<Op> body_, tail_;
    int64_t embeddings_ = 0;  // ids that have one
    char* cache_ = nullptr;
    int64_t slots_ = 0;
    StepPlan plan_;
    std::vector<int32_t> ids_;
    std::vector<Memory> scratch_;                     // one a thread
    size_t scratch_bytes_ = 0;
    std::vector<std::unique_ptr<Chooser>> choosers_;  // one a thread
    std::vector<float> partials_;
    std::unique_ptr<std::atomic<int>[]> counters_;
    int counters_n_ = 0;  // how many there are
    bool timed_ = false;
    double nanoseconds_[int(Kind::KINDS)] = {};

    // Of the slice that runs.
    const Step* step_ = nullptr;
    int64_t row0_ = 0;
    std::vector<LogitRow*> wanted_;

    bool is(int buffer, int width, bool tail, bool any_kind) const;
    bool feeds(int buffer, const Matrix& matrix, bool tail) const;
    bool fits(const Op& op, bool tail) const;
    void slice(const Step& step, int64_t row0, int rows);
    void replay(const std::vector<Op>& ops, int rows);
    void execute(const Op& op, int rows);
    void embed(const Op& op, int rows);
    void rms_norm(const Op& op, int rows);
    Linear linear_of(const Op& op, int rows) const;
    void head_norm(const Op& op, int rows);
    void rope_store(const Op& op);
    void attention(const Op& op);
    void attention_item(const Attention& op, const AttentionItem& item, void* scratch);
    void swiglu(const Op& op, int rows);
    void run_gated(const Op& op, int rows);
    void pool_embeddings(const Op& op, int rows);
    void select_rows(const Op& op, int rows);
    void sample(const Op& op, int rows);
    Attention attention_of(const Op& op) const;
    float* scratch_row(int thread) const { return reinterpret_cast<float*>(scratch_[size_t(thread)].get()); }
    // f(row, thread) for all rows, `width` numbers each: in tiles that are worth a thread's while.
    template <class F>
    void for_rows(int rows, int64_t width, F&& f);
};

}  // namespace llmd
