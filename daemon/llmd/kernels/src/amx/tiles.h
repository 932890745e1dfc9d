// What all kernels on the matrix unit (AMX) share.
#pragma once

#include "../isa.h"
#include "../isa/vec16.h"

#ifdef LLMD_HAS_AMX
#define AMX __attribute__((target("amx-tile,amx-bf16,avx512bf16,avx512fp16")))
#define AMX_INLINED __attribute__((always_inline, target("amx-tile,amx-bf16,avx512bf16,avx512fp16")))
#define AMX_INLINE static inline AMX_INLINED

namespace llmd {
namespace LLMD_ISA_NS {
namespace {

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_per_row[16] = {};
    uint8_t rows[16] = {};
};

// GCC's tile intrinsics do not say that they read and write memory.
VEC_INLINE void written() { __asm__ volatile("" ::: "memory"); }

}  // namespace
}  // namespace LLMD_ISA_NS
}  // namespace llmd
#endif
