// See program.h: recording and replaying.
#include "program.h"

#include <algorithm>
#include <thread>

#include "slices.h"

namespace llmd {
namespace {

constexpr int LARGEST = 1 << 24;
constexpr int LOOKS = 4096;  // for what another thread is about to do, before this one lets others have its processor

bool in(int64_t value, int64_t low, int64_t high) { return low <= value && value <= high; }

}  // namespace

bool Program::valid(const ProgramShape& s) {
    return in(s.hidden, 1, LARGEST) && in(s.kv_heads, 1, LARGEST) && in(s.heads, 1, LARGEST) && s.heads % s.kv_heads == 0 && in(s.head_dim, 2, 4096) &&
           s.head_dim % 2 == 0 && in(s.layers, 1, 4096) && in(s.vocab, 1, LARGEST) && in(s.sampled_ids, 1, s.vocab) && in(s.kv_type, 0, KV_TYPES - 1) &&
           in(s.page_size, 1, LARGEST) && in(s.max_rows, 1, 1 << 16) && in(s.max_logits, 1, 1 << 16) && in(int64_t(s.heads) * s.head_dim, 1, LARGEST);
}

Program::Program(Pool& pool, const ProgramShape& shape, const float* inverse_frequencies)
    : pool_(pool),
      recording_(shape, inverse_frequencies),
      shared_(pool, recording_, true) {}

int Program::add_buffer(int width, int kind, bool tail) {
    const bool known = kind == ROWS_FLOAT || kind == ROWS_ROUNDED || (kind == ROWS_SPLIT && current_isa() == ISA_AMX);
    if (!in(width, 1, LARGEST) || !known || (kind && width % GROUP)) return BAD_ARGUMENT;
    const BufferShape shape{Rows(kind), tail, tail ? recording_.shape.max_logits : recording_.shape.max_rows, width};
    own_.clear();
    shared_.add_buffer(shape);
    recording_.buffers.push_back(shape);
    return int(recording_.buffers.size()) - 1;
}

int Program::add_matrix(const Matrix& matrix) {
    if (!matrix.data || reinterpret_cast<uintptr_t>(matrix.data) % 64 || packed_size(matrix.format, matrix.n, matrix.k) < 0) return BAD_ARGUMENT;
    recording_.matrices.push_back(matrix);
    return int(recording_.matrices.size()) - 1;
}

bool Program::is(int buffer, int width, bool tail, bool any_kind) const {
    if (buffer < 0 || buffer >= int(recording_.buffers.size())) return false;
    const BufferShape& b = recording_.buffers[size_t(buffer)];
    return b.width == width && b.tail == tail && (any_kind || b.kind == ROWS_FLOAT);
}

bool Program::feeds(int buffer, const Matrix& matrix, bool tail) const {
    return is(buffer, matrix.k, tail, true) && recording_.buffers[size_t(buffer)].kind == rows_read(matrix.format, matrix.k);
}

bool Program::fits(const Op& op, bool tail) const {
    const ProgramShape& shape = recording_.shape;
    const int hidden = shape.hidden, q = shape.heads * shape.head_dim, qkv = q + 2 * shape.kv_heads * shape.head_dim;
    const bool has_matrix = op.matrix >= 0 && op.matrix < int(recording_.matrices.size()), in_known = op.in >= 0 && op.in < int(recording_.buffers.size());
    const bool out_known = op.out >= 0 && op.out < int(recording_.buffers.size());
    const Matrix matrix = has_matrix ? recording_.matrices[size_t(op.matrix)] : Matrix{};
    const int in_width = in_known ? recording_.buffers[size_t(op.in)].width : 0, out_width = out_known ? recording_.buffers[size_t(op.out)].width : 0;
    switch (op.kind) {
        case Kind::EMBED: return has_matrix && matrix.k == hidden && is(op.out, hidden, false, false) && !tail;
        case Kind::RMS_NORM: return op.weight && in_known && is(op.in, in_width, tail, false) && is(op.out, in_width, tail, true);
        case Kind::LINEAR: return has_matrix && feeds(op.in, matrix, tail) && is(op.out, matrix.n, tail, false) && op.in != op.out;
        case Kind::ADD_BIAS: return op.weight && out_known && is(op.out, out_width, tail, false);
        case Kind::HEAD_NORM: return op.weight && op.weight2 && is(op.out, qkv, false, false) && !tail;
        case Kind::ROPE_STORE: return is(op.out, qkv, false, false) && in(op.layer, 0, shape.layers - 1) && !tail;
        case Kind::ATTENTION:
            return is(op.in, qkv, false, false) && is(op.out, q, false, false) && in(op.layer, 0, shape.layers - 1) && op.window >= 0 && !tail;
        case Kind::QUANTIZE: return in_known && is(op.in, in_width, tail, false) && is(op.out, in_width, tail, true) && recording_.buffers[size_t(op.out)].kind;
        case Kind::GATED:
            return has_matrix && feeds(op.in, matrix, tail) && is(op.middle, matrix.n, tail, false) && is(op.out, matrix.n / 2, tail, true) && matrix.n % 2 == 0 &&
                   op.in != op.out;
        case Kind::SWIGLU: return out_known && is(op.in, 2 * out_width, tail, false) && is(op.out, out_width, tail, true);
        case Kind::POOL: return op.weight && is(op.in, hidden, false, false) && !tail;
        case Kind::SELECT: return is(op.in, hidden, false, false) && is(op.out, hidden, true, false) && tail;
        case Kind::SAMPLE: return is(op.in, shape.vocab, true, false) && tail;
        default: return false;
    }
}

int Program::record(const Op& op) {
    // The tail begins with the choice of rows.
    const bool tail = op.kind == Kind::SELECT || !recording_.tail.empty();
    if (!fits(op, tail)) return BAD_ARGUMENT;
    own_.clear();
    if (op.kind == Kind::EMBED) embeddings_ = recording_.matrices[size_t(op.matrix)].n;
    if (op.kind == Kind::ATTENTION) {
        shared_.add_window(op.window);
        recording_.windows.push_back(op.window);
    }
    (tail ? recording_.tail : recording_.body).push_back(op);
    return OK;
}

int Program::set_cache(void* memory, int64_t slots) {
    if (!memory || reinterpret_cast<uintptr_t>(memory) % 64 || slots < 1 || slots > INT32_MAX) return BAD_ARGUMENT;
    recording_.cache = static_cast<char*>(memory);
    recording_.slots = slots;
    return OK;
}

int Program::run(const Step& step) {
    if (!recording_.cache) return BAD_ARGUMENT;
    if (const int status = check_step(step, recording_.shape, embeddings_, recording_.slots)) return status;
    while (may_part(pool_.threads()) && int(own_.size()) < pool_.threads()) own_.push_back(std::make_unique<Own>(recording_));
    const int rows = rows_apart(step);
    return rows ? run_apart(step, rows) : run_together(step);
}

int Program::rows_apart(const Step& step) const { return llmd::rows_apart(step, recording_.shape, pool_.threads()); }

int Program::run_together(const Step& step) {
    if (const int status = shared_.begin(step)) return status;
    const int most = recording_.shape.max_rows;
    for (int64_t row0 = 0; row0 < step.tokens; row0 += most) {
        const int rows = int(std::min<int64_t>(most, step.tokens - row0));
        shared_.take(row0, rows);
        for (const Op& op : recording_.body) shared_.run_body(op);
        wanted_.clear();
        for (int64_t i = 0; i < step.logit_rows; i++) {
            LogitRow& wish = step.wanted[i];
            if (wish.row < row0 || wish.row >= row0 + rows) continue;
            wanted_.push_back(&wish);
            if (int(wanted_.size()) < recording_.shape.max_logits) continue;
            run_tail();
            wanted_.clear();
        }
        run_tail();
    }
    return OK;
}

// Of the rows that are wanted, which shared_ has computed.
void Program::run_tail() {
    if (wanted_.empty()) return;
    for (const Op& op : recording_.tail) {
        if (op.kind == Kind::SELECT) shared_.select(op, wanted_, shared_);
        else shared_.run_tail(op, wanted_);
    }
}

int Program::run_apart(const Step& step, int rows) {
    const int slices = int((step.tokens + rows - 1) / rows);
    for (const auto& own : own_) {
        own->lane.timed = shared_.timed;
        if (const int status = own->lane.begin(step)) return status;
    }
    wanted_.clear();
    for (int64_t i = 0; i < step.logit_rows; i++) wanted_.push_back(&step.wanted[i]);
    std::vector<std::atomic<int>> stored(static_cast<size_t>(slices));
    std::atomic<int> next{0};
    std::atomic<bool> failed{false};
    pool_.run(pool_.threads(), [&](int, int thread) {
        try {
            for (int i = next++; i < slices; i = next++) run_slice(own_[size_t(thread)]->lane, step, rows, i, stored, failed);
        } catch (...) {  // there is no memory; an exception may not leave a thread
            failed = true;
        }
    });
    if (failed) return NO_MEMORY;
    for (const Op& op : recording_.tail) {
        if (op.kind != Kind::SELECT && !wanted_.empty()) shared_.run_tail(op, wanted_);
    }
    return OK;
}

// Slices are begun in order, so whoever waits for the one before waits for a thread that is at it.
void Program::run_slice(Lane& lane, const Step& step, int rows, int index, std::vector<std::atomic<int>>& stored, const std::atomic<bool>& failed) {
    const int64_t row0 = int64_t(index) * rows;
    int stores = 0;
    lane.take(row0, int(std::min<int64_t>(rows, step.tokens - row0)));
    for (const Op& op : recording_.body) {
        if (op.kind != Kind::ROPE_STORE) {
            lane.run_body(op);
            continue;
        }
        for (int looks = 0; index > 0 && stored[size_t(index) - 1].load(std::memory_order_acquire) <= stores;) {
            if (failed.load(std::memory_order_relaxed)) return;
            if (looks++ < LOOKS) {
                __builtin_ia32_pause();
            } else {
                looks = LOOKS;
                std::this_thread::yield();
            }
        }
        lane.run_body(op);
        stored[size_t(index)].store(++stores, std::memory_order_release);
    }
    for (const Op& op : recording_.tail) {
        if (op.kind == Kind::SELECT) lane.select(op, wanted_, shared_);
    }
}

void Program::timing(double* out) {
    std::fill_n(out, int(Kind::KINDS), 0.0);
    const auto move = [&](Lane& lane, double share) {
        for (int i = 0; i < int(Kind::KINDS); i++) out[i] += lane.nanoseconds[i] * share, lane.nanoseconds[i] = 0.0;
    };
    shared_.timed = true;
    move(shared_, 1.0);
    for (const auto& own : own_) move(own->lane, 1.0 / double(own_.size()));
}

}  // namespace llmd
