// The C ABI of programs; bound by ../program.py. Functions return a handle or 0, or a negative Status (step_plan.h).
#include <new>

#include "abi.h"
#include "program.h"

namespace {

using namespace llmd;

// As ../program.py and ../steps.py have them.
static_assert(sizeof(ProgramShape) == 56 && sizeof(Step) == 120 && sizeof(LogitRow) == 144 && sizeof(EmbedRow) == 24);

// Runs `f`, whose only failure is memory.
template <class F>
int guarded(F&& f) {
    try {
        return f();
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    } catch (...) {
        return BAD_ARGUMENT;
    }
}

int record(Program* program, const Op& op) {
    return guarded([&] { return program->record(op); });
}

}  // namespace

LLMD_API void* llmd_program_new(void* pool, const ProgramShape* shape, const float* inverse_frequencies) {
    if (!pool || !shape || !inverse_frequencies || !Program::valid(*shape)) return nullptr;
    try {
        return new Program(*static_cast<Pool*>(pool), *shape, inverse_frequencies);
    } catch (...) {
        return nullptr;
    }
}

LLMD_API void llmd_program_free(Program* program) { delete program; }

LLMD_API int llmd_program_buffer(Program* program, int width, int kind, int tail) {
    return guarded([&] { return program->add_buffer(width, kind, tail); });
}

LLMD_API int llmd_program_matrix(Program* program, const void* data, int format, int n, int k) {
    return guarded([&] { return program->add_matrix({data, format, n, k}); });
}

LLMD_API int llmd_program_embed(Program* program, int matrix, int out) {
    Op op{Kind::EMBED};
    op.matrix = matrix;
    op.out = out;
    return record(program, op);
}

LLMD_API int llmd_program_rms_norm(Program* program, int in, const float* weight, float eps, int out) {
    Op op{Kind::RMS_NORM, in, out};
    op.weight = weight;
    op.eps = eps;
    return record(program, op);
}

LLMD_API int llmd_program_linear(Program* program, int in, int matrix, int out, int flags) {
    Op op{Kind::LINEAR, in, out, matrix};
    op.flags = flags;
    return record(program, op);
}

LLMD_API int llmd_program_add_bias(Program* program, const float* bias, int out) {
    Op op{Kind::ADD_BIAS};
    op.weight = bias;
    op.out = out;
    return record(program, op);
}

LLMD_API int llmd_program_head_norm(Program* program, const float* q_weight, const float* k_weight, float eps, int qkv) {
    Op op{Kind::HEAD_NORM};
    op.weight = q_weight;
    op.weight2 = k_weight;
    op.eps = eps;
    op.out = qkv;
    return record(program, op);
}

LLMD_API int llmd_program_rope_store(Program* program, int layer, int qkv) {
    Op op{Kind::ROPE_STORE};
    op.layer = layer;
    op.out = qkv;
    return record(program, op);
}

LLMD_API int llmd_program_attention(Program* program, int qkv, int layer, int window, int out) {
    Op op{Kind::ATTENTION, qkv, out};
    op.layer = layer;
    op.window = window;
    return record(program, op);
}

LLMD_API int llmd_program_quantize(Program* program, int in, int out) { return record(program, {Kind::QUANTIZE, in, out}); }
LLMD_API int llmd_program_gated(Program* program, int in, int matrix, int middle, int out) {
    Op op{Kind::GATED, in, out, matrix};
    op.middle = middle;
    return record(program, op);
}

LLMD_API int llmd_program_swiglu(Program* program, int in, int out) { return record(program, {Kind::SWIGLU, in, out}); }

LLMD_API int llmd_program_pool(Program* program, int in, const float* weight, float eps) {
    Op op{Kind::POOL, in};
    op.weight = weight;
    op.eps = eps;
    return record(program, op);
}

LLMD_API int llmd_program_select(Program* program, int in, int out) { return record(program, {Kind::SELECT, in, out}); }
LLMD_API int llmd_program_sample(Program* program, int logits) { return record(program, {Kind::SAMPLE, logits}); }

LLMD_API int64_t llmd_program_cache_bytes(const Program* program, int64_t slots) {
    return slots < 0 ? -1 : int64_t(program->kv().tile_bytes()) * ((slots + TILE - 1) / TILE);
}

LLMD_API int llmd_program_set_cache(Program* program, void* memory, int64_t slots) { return program->set_cache(memory, slots); }

LLMD_API int llmd_program_run(Program* program, const Step* step) {
    return guarded([&] { return program->run(*step); });
}

LLMD_API int llmd_program_rows_apart(const Program* program, const Step* step) { return program->rows_apart(*step); }

LLMD_API int llmd_program_kinds() { return int(Kind::KINDS); }
LLMD_API void llmd_program_timing(Program* program, double* out) { program->timing(out); }
