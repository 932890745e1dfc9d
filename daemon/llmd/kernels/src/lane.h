// Where operations of a step run: a plan, buffers and scratch memory, and the pool whose threads share each operation.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "recording.h"

namespace llmd {

class Lane {
  public:
    // Throws std::bad_alloc. `tail`: whether the tail will run here.
    Lane(Pool& pool, const Recording& recording, bool tail);

    // What is recorded later.
    void add_buffer(const BufferShape& shape);
    void add_window(int window) { plan_.add_window(window); }

    // Returns a Status.
    int begin(const Step& step);
    // From now on rows [row0, row0 + rows) of the step are computed.
    void take(int64_t row0, int rows);
    void run_body(const Op& op) { run(op, rows_); }
    // Copies those of these rows that are computed here to the same places in the tail's buffer of `to`, where run_tail then goes on with all of them.
    void select(const Op& op, const std::vector<LogitRow*>& wanted, Lane& to) const;
    void run_tail(const Op& op, const std::vector<LogitRow*>& wanted);

    bool timed = false;
    double nanoseconds[int(Kind::KINDS)] = {};

  private:
    using Memory = std::unique_ptr<char, void (*)(void*)>;

    struct Buffer {
        BufferShape shape;
        Memory memory;

        Rows kind() const { return shape.kind; }
        int width() const { return shape.width; }
        int64_t stride() const { return shape.stride(); }
        float* floats() const { return reinterpret_cast<float*>(memory.get()); }
        float* row(int64_t i) const { return floats() + i * stride(); }
        QuantRows quant() const { return quant_rows(memory.get(), shape.rows, shape.width, shape.kind); }
    };

    Pool& pool_;
    const Recording& recording_;
    const bool tail_;
    std::vector<Buffer> buffers_;  // as recorded; those of the tail without memory where it does not run
    StepPlan plan_;
    std::vector<int32_t> ids_;
    std::vector<Memory> scratch_;  // one a thread
    size_t scratch_bytes_ = 0;
    std::vector<std::unique_ptr<Chooser>> choosers_;  // one a thread, for the tail
    std::vector<float> partials_;
    std::unique_ptr<std::atomic<int>[]> counters_;
    int counters_n_ = 0;  // how many there are

    // What is computed.
    const Step* step_ = nullptr;
    int64_t row0_ = 0;
    int rows_ = 0;
    const std::vector<LogitRow*>* wanted_ = nullptr;

    const Buffer& buffer(int handle) const { return buffers_[size_t(handle)]; }
    void run(const Op& op, int rows);
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
    void sample(const Op& op, int rows);
    Attention attention_of(const Op& op) const;
    float* scratch_row(int thread) const { return reinterpret_cast<float*>(scratch_[size_t(thread)].get()); }
    // f(row, thread) for all rows, `width` numbers each: in tiles that are worth a thread's while.
    template <class F>
    void for_rows(int rows, int64_t width, F&& f);
};

}  // namespace llmd
