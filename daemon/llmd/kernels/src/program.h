// A model's step, recorded once as a list of operations over buffers of fixed size and replayed by one call.
//
// The body runs over the step's new tokens, at most `max_rows` of them at a time: a longer step is cut into slices, which changes no bit of it, since
// what a row gets depends on its own request's tokens alone. The tail runs over the rows whose logits are wanted, at most `max_logits` at a time.
//
// Either all threads share each operation, slice after slice, or, where there is enough to do for each of them, every thread takes slices for itself: then
// none waits for the others after each operation, and what a slice's operations hand on stays in the caches of one core. A slice's tokens may look back at
// those of the slice before, so it comes to no layer's KV before that one has stored its own.
//
// A program belongs to one thread at a time. It does not crash on what it is given: recording and running return a Status.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "lane.h"

namespace llmd {

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
    // See slices.h.
    int rows_apart(const Step& step) const;

    const KvShape& kv() const { return recording_.kv; }
    // Nanoseconds of each kind since the last call, where threads take slices for themselves those of one of them; the first call turns measuring on.
    void timing(double* out);

  private:
    // A lane of one thread.
    struct Own {
        Pool pool{1, nullptr, 0, -1};
        Lane lane;
        explicit Own(const Recording& recording) : lane(pool, recording, false) {}
    };

    Pool& pool_;
    Recording recording_;
    int64_t embeddings_ = 0;  // ids that have one
    Lane shared_;
    std::vector<std::unique_ptr<Own>> own_;  // made with the first step after what was recorded last
    std::vector<LogitRow*> wanted_;

    bool is(int buffer, int width, bool tail, bool any_kind) const;
    bool feeds(int buffer, const Matrix& matrix, bool tail) const;
    bool fits(const Op& op, bool tail) const;
    int run_together(const Step& step);
    int run_apart(const Step& step, int rows);
    // `stored`: of each slice, layers whose KV it has stored.
    void run_slice(Lane& lane, const Step& step, int rows, int index, std::vector<std::atomic<int>>& stored, const std::atomic<bool>& failed);
    void run_tail();
};

}  // namespace llmd
