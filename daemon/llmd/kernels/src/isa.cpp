#include "isa.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

#include "abi.h"

namespace llmd {
namespace {

struct Leaf {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    Leaf(unsigned leaf, unsigned sub) { __get_cpuid_count(leaf, sub, &eax, &ebx, &ecx, &edx); }
};

bool bit(unsigned word, int index) { return (word >> index) & 1; }

// XCR0: which register files the operating system saves. Inline assembly, because the intrinsic wants -mxsave.
uint64_t saved_state() {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t(high) << 32) | low;
}

// Since Linux 5.16 a process asks for the tiles, which make its signal frames 8 KiB larger.
bool amx_granted() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
}

Isa detect() {
    const Leaf one(1, 0), seven(7, 0);
    const bool osxsave = bit(one.ecx, 27), avx = bit(one.ecx, 28), fma = bit(one.ecx, 12), f16c = bit(one.ecx, 29);
    if (!osxsave || !avx || !fma || !f16c || !bit(seven.ebx, 5)) return ISA_SCALAR;
    const uint64_t state = saved_state();
    if ((state & 0x6) != 0x6) return ISA_SCALAR;  // SSE and AVX registers
    const bool f = bit(seven.ebx, 16), dq = bit(seven.ebx, 17), bw = bit(seven.ebx, 30), vl = bit(seven.ebx, 31), vnni = bit(seven.ecx, 11);
    if (!f || !dq || !bw || !vl || !vnni || (state & 0xe6) != 0xe6) return ISA_AVX2;  // and mask and ZMM registers
#ifdef LLMD_HAS_AMX
    const bool tiles = bit(seven.edx, 24), products = bit(seven.edx, 22), bf16 = bit(Leaf(7, 1).eax, 5), fp16 = bit(seven.edx, 23);
    if (tiles && products && bf16 && fp16 && (state & 0x60000) == 0x60000 && amx_granted()) return ISA_AMX;
#endif
    return ISA_AVX512;
}

std::atomic<int> in_use{-1};

}  // namespace

Isa best_isa() {
    static const Isa best = detect();
    return best;
}

Isa current_isa() {
    const int isa = in_use.load(std::memory_order_relaxed);
    return isa < 0 ? best_isa() : Isa(isa);
}

bool set_isa(int isa) {
    if (isa < 0 || isa > best_isa()) return false;
    in_use.store(isa, std::memory_order_relaxed);
    return true;
}

}  // namespace llmd

LLMD_API int llmd_abi_version() { return llmd::ABI_VERSION; }
LLMD_API int llmd_isa_best() { return llmd::best_isa(); }
LLMD_API int llmd_isa() { return llmd::current_isa(); }
LLMD_API int llmd_isa_set(int isa) { return llmd::set_isa(isa) ? 0 : -1; }
