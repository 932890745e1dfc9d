// See program.h: recording and replaying. What each operation does is in program_ops.cpp.
#include "program.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <new>

namespace llmd {
namespace {

constexpr int LARGEST = 1 << 24;
constexpr size_t HUGE_PAGE = size_t(2) << 20;

std::unique_ptr<char, void (*)(void*)> allocate(size_t bytes) {
    const size_t alignment = bytes < HUGE_PAGE ? 64 : HUGE_PAGE;
    void* memory = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    if (!memory) throw std::bad_alloc();
    if (alignment == HUGE_PAGE) madvise(memory, bytes, MADV_HUGEPAGE);  // a tile writes to many rows: each on a page of its own would cost a walk of the tables
    std::fill_n(static_cast<char*>(memory), bytes, char(0));
    return {static_cast<char*>(memory), std::free};
}

bool in(int64_t value, int64_t low, int64_t high) { return low <= value && value <= high; }

}  // namespace

bool Program::valid(const ProgramShape& s) {
    return in(s.hidden, 1, LARGEST) && in(s.kv_heads, 1, LARGEST) && in(s.heads, 1, LARGEST) && s.heads % s.kv_heads == 0 && in(s.head_dim, 2, 4096) &&
           s.head_dim % 2 == 0 && in(s.layers, 1, 4096) && in(s.vocab, 1, LARGEST) && in(s.sampled_ids, 1, s.vocab) && in(s.kv_type, 0, KV_TYPES - 1) &&
           in(s.page_size, 1, LARGEST) && in(s.max_rows, 1, 1 << 16) && in(s.max_logits, 1, 1 << 16) && in(int64_t(s.heads) * s.head_dim, 1, LARGEST);
}

Program::Program(Pool& pool, const ProgramShape& shape, const float* inverse_frequencies)
    : pool_(pool),
      shape_(shape),
      kv_{shape.kv_type, shape.layers, shape.kv_heads, shape.head_dim, shape.page_size},
      plan_(shape, kv_, inverse_frequencies) {
    ids_.resize(size_t(shape.max_rows));
    scratch_bytes_ = attention_scratch(kv_, shape.heads);
    for (int i = 0; i < pool.threads(); i++) {
        scratch_.push_back(allocate(scratch_bytes_));
        choosers_.push_back(std::make_unique<Chooser>(shape.sampled_ids));
    }
}

int Program::add_buffer(int width, int kind, bool tail) {
    const bool known = kind == ROWS_FLOAT || kind == ROWS_ROUNDED || (kind == ROWS_SPLIT && current_isa() == ISA_AMX);
    if (!in(width, 1, LARGEST) || !known || (kind && width % GROUP)) return BAD_ARGUMENT;
    const int rows = tail ? shape_.max_logits : shape_.max_rows;
    if (const size_t bytes = size_t(width) * sizeof(float); bytes > scratch_bytes_) {  // it takes a row of any buffer
        for (Memory& scratch : scratch_) scratch = allocate(bytes);
        scratch_bytes_ = bytes;
    }
    const size_t bytes = kind ? size_t(quant_rows_size(rows, width, Rows(kind))) : size_t(rows) * size_t(Buffer::stride_of(width)) * sizeof(float);
    buffers_.push_back({Rows(kind), tail, rows, width, allocate(bytes)});
    return int(buffers_.size()) - 1;
}

int Program::add_matrix(const Matrix& matrix) {
    if (!matrix.data || reinterpret_cast<uintptr_t>(matrix.data) % 64 || packed_size(matrix.format, matrix.n, matrix.k) < 0) return BAD_ARGUMENT;
    matrices_.push_back(matrix);
    return int(matrices_.size()) - 1;
}

bool Program::is(int buffer, int width, bool tail, bool any_kind) const {
    if (buffer < 0 || buffer >= int(buffers_.size())) return false;
    const Buffer& b = buffers_[size_t(buffer)];
    return b.width == width && b.tail == tail && (any_kind || b.kind == ROWS_FLOAT);
}

bool Program::feeds(int buffer, const Matrix& matrix, bool tail) const {
    return is(buffer, matrix.k, tail, true) && buffers_[size_t(buffer)].kind == rows_read(matrix.format, matrix.k);
}

bool Program::fits(const Op& op, bool tail) const {
    const int hidden = shape_.hidden, q = shape_.heads * shape_.head_dim, qkv = q + 2 * shape_.kv_heads * shape_.head_dim;
    const bool has_matrix = op.matrix >= 0 && op.matrix < int(matrices_.size()), in_known = op.in >= 0 && op.in < int(buffers_.size());
    const bool out_known = op.out >= 0 && op.out < int(buffers_.size());
    const Matrix matrix = has_matrix ? matrices_[size_t(op.matrix)] : Matrix{};
    const int in_width = in_known ? buffers_[size_t(op.in)].width : 0, out_width = out_known ? buffers_[size_t(op.out)].width : 0;
    switch (op.kind) {
        case Kind::EMBED: return has_matrix && matrix.k == hidden && is(op.out, hidden, false, false) && !tail;
        case Kind::RMS_NORM: return op.weight && in_known && is(op.in, in_width, tail, false) && is(op.out, in_width, tail, true);
        case Kind::LINEAR: return has_matrix && feeds(op.in, matrix, tail) && is(op.out, matrix.n, tail, false) && op.in != op.out;
        case Kind::ADD_BIAS: return op.weight && out_known && is(op.out, out_width, tail, false);
        case Kind::HEAD_NORM: return op.weight && op.weight2 && is(op.out, qkv, false, false) && !tail;
        case Kind::ROPE_STORE: return is(op.out, qkv, false, false) && in(op.layer, 0, shape_.layers - 1) && !tail;
        case Kind::ATTENTION:
            return is(op.in, qkv, false, false) && is(op.out, q, false, false) && in(op.layer, 0, shape_.layers - 1) && op.window >= 0 && !tail;
        case Kind::QUANTIZE: return in_known && is(op.in, in_width, tail, false) && is(op.out, in_width, tail, true) && buffers_[size_t(op.out)].kind;
        case Kind::GATED:
            return has_matrix && feeds(op.in, matrix, tail) && is(op.middle, matrix.n, tail, false) && is(op.out, matrix.n / 2, tail, true) && matrix.n % 2 == 0 &&
                   op.in != op.out;
        case Kind::SWIGLU: return out_known && is(op.in, 2 * out_width, tail, false) && is(op.out, out_width, tail, true);
        case Kind::POOL: return op.weight && is(op.in, hidden, false, false) && !tail;
        case Kind::SELECT: return is(op.in, hidden, false, false) && is(op.out, hidden, true, false) && tail;
        case Kind::SAMPLE: return is(op.in, shape_.vocab, true, false) && tail;
        default: return false;
    }
}

int Program::record(const Op& op) {
    // The tail begins with the choice of rows.
    const bool tail = op.kind == Kind::SELECT || !tail_.empty();
    if (!fits(op, tail)) return BAD_ARGUMENT;
    if (op.kind == Kind::EMBED) embeddings_ = matrices_[size_t(op.matrix)].n;
    if (op.kind == Kind::ATTENTION) plan_.add_window(op.window);
    (tail ? tail_ : body_).push_back(op);
    return OK;
}

int Program::set_cache(void* memory, int64_t slots) {
    if (!memory || reinterpret_cast<uintptr_t>(memory) % 64 || slots < 1 || slots > INT32_MAX) return BAD_ARGUMENT;
    cache_ = static_cast<char*>(memory);
    slots_ = slots;
    return OK;
}

int Program::run(const Step& step) {
    if (!cache_) return BAD_ARGUMENT;
    if (const int status = check_step(step, shape_, embeddings_, slots_)) return status;
    if (const int status = plan_.begin(step, slots_)) return status;
    for (int64_t row0 = 0; row0 < step.tokens; row0 += shape_.max_rows) slice(step, row0, int(std::min<int64_t>(shape_.max_rows, step.tokens - row0)));
    return OK;
}

void Program::slice(const Step& step, int64_t row0, int rows) {
    const auto start = std::chrono::steady_clock::now();
    step_ = &step;
    row0_ = row0;
    plan_.slice(step, row0, rows, pool_);
    if (timed_) nanoseconds_[int(Kind::PLAN)] += double((std::chrono::steady_clock::now() - start).count());
    replay(body_, rows);
    wanted_.clear();
    for (int64_t i = 0; i < step.logit_rows; i++) {
        LogitRow& wish = step.wanted[i];
        if (wish.row < row0 || wish.row >= row0 + rows) continue;
        wanted_.push_back(&wish);
        if (int(wanted_.size()) == shape_.max_logits) {
            replay(tail_, shape_.max_logits);
            wanted_.clear();
        }
    }
    if (!wanted_.empty()) replay(tail_, int(wanted_.size()));
}

void Program::replay(const std::vector<Op>& ops, int rows) {
    if (!timed_) {
        for (const Op& op : ops) execute(op, rows);
        return;
    }
    for (const Op& op : ops) {
        const auto start = std::chrono::steady_clock::now();
        execute(op, rows);
        nanoseconds_[int(op.kind)] += double((std::chrono::steady_clock::now() - start).count());
    }
}

void Program::timing(double* out) {
    timed_ = true;
    std::copy(std::begin(nanoseconds_), std::end(nanoseconds_), out);
    std::fill(std::begin(nanoseconds_), std::end(nanoseconds_), 0.0);
}

}  // namespace llmd
