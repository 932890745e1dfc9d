// See lane.h: memory, and the order of things. What each operation does is in lane_ops.cpp.
#include "lane.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>

namespace llmd {
namespace {

constexpr size_t HUGE_PAGE = size_t(2) << 20;

std::unique_ptr<char, void (*)(void*)> allocate(size_t bytes) {
    const size_t alignment = bytes < HUGE_PAGE ? 64 : HUGE_PAGE;
    void* memory = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    if (!memory) throw std::bad_alloc();
    if (alignment == HUGE_PAGE) madvise(memory, bytes, MADV_HUGEPAGE);  // a tile writes to many rows: each on a page of its own would cost a walk of the tables
    std::fill_n(static_cast<char*>(memory), bytes, char(0));
    return {static_cast<char*>(memory), std::free};
}

double nanoseconds_since(std::chrono::steady_clock::time_point start) { return double((std::chrono::steady_clock::now() - start).count()); }

}  // namespace

Lane::Lane(Pool& pool, const Recording& recording, bool tail)
    : pool_(pool), recording_(recording), tail_(tail), plan_(recording.shape, recording.kv, recording.inverse_frequencies.data()) {
    ids_.resize(size_t(recording.shape.max_rows));
    scratch_bytes_ = attention_scratch(recording.kv, recording.shape.heads);
    for (int i = 0; i < pool.threads(); i++) {
        scratch_.push_back(allocate(scratch_bytes_));
        if (tail) choosers_.push_back(std::make_unique<Chooser>(recording.shape.sampled_ids));
    }
    for (const BufferShape& shape : recording.buffers) add_buffer(shape);
    for (const int window : recording.windows) add_window(window);
}

void Lane::add_buffer(const BufferShape& shape) {
    if (const size_t bytes = size_t(shape.width) * sizeof(float); bytes > scratch_bytes_) {  // it takes a row of any buffer
        for (Memory& scratch : scratch_) scratch = allocate(bytes);
        scratch_bytes_ = bytes;
    }
    buffers_.push_back({shape, shape.tail && !tail_ ? Memory(nullptr, std::free) : allocate(shape.bytes())});
}

int Lane::begin(const Step& step) {
    step_ = &step;
    return plan_.begin(step, recording_.slots);
}

void Lane::take(int64_t row0, int rows) {
    const auto start = std::chrono::steady_clock::now();
    row0_ = row0;
    rows_ = rows;
    plan_.slice(*step_, row0, rows, pool_);
    if (timed) nanoseconds[int(Kind::PLAN)] += nanoseconds_since(start);
}

void Lane::select(const Op& op, const std::vector<LogitRow*>& wanted, Lane& to) const {
    const Buffer &x = buffer(op.in), &y = to.buffer(op.out);
    for (size_t i = 0; i < wanted.size(); i++) {
        const int64_t row = wanted[i]->row - row0_;
        if (row >= 0 && row < rows_) std::memcpy(y.row(int64_t(i)), x.row(row), size_t(x.width()) * sizeof(float));
    }
}

void Lane::run_tail(const Op& op, const std::vector<LogitRow*>& wanted) {
    wanted_ = &wanted;
    run(op, int(wanted.size()));
}

void Lane::run(const Op& op, int rows) {
    if (!timed) return execute(op, rows);
    const auto start = std::chrono::steady_clock::now();
    execute(op, rows);
    nanoseconds[int(op.kind)] += nanoseconds_since(start);
}

}  // namespace llmd
