// Which instruction set the kernels use.
//
// Each file that holds kernels is compiled once per ISA, with LLMD_ISA_NS naming a namespace (scalar, avx2, avx512) and the flags in
// ../build.py. Everything such a file defines lives in `llmd::LLMD_ISA_NS` or in an unnamed namespace, and it includes no C++ library header
// that holds templates or inline functions with bodies: the linker keeps one copy of an inline function, and the copy compiled for AVX-512
// would then also run on a CPU that has none. <cmath> and <algorithm> are therefore left out on purpose; simd.h has what is needed.
//
// A family of kernels (linear.h, ...) declares a struct of function pointers and one constant of it per ISA; `select(scalar, avx2, avx512)`
// picks the one in use. src/amx/ is compiled once.
#pragma once

// A compiler that knows the tiles and float16 arithmetic.
#if defined(__clang__) ? __clang_major__ >= 14 : __GNUC__ >= 12
#define LLMD_HAS_AMX 1
#endif

namespace llmd {

enum Isa : int { ISA_SCALAR = 0, ISA_AVX2 = 1, ISA_AVX512 = 2, ISA_AMX = 3 };  // AMX: AVX-512, and linears and attention on the matrix unit

// The best ISA that this CPU and this operating system have (AVX2 needs FMA and F16C; AVX-512 needs F, BW, DQ, VL and VNNI;
// AMX needs its tiles, its bf16 products, AVX-512's bf16 and float16, and the kernel's leave, which is asked for).
Isa best_isa();

// The ISA in use: the best one, until set_isa. set_isa refuses (false) what the CPU lacks. It is for start-up and for tests: not while kernels run.
Isa current_isa();
bool set_isa(int isa);

template <class Table>
const Table& select(const Table& scalar, const Table& avx2, const Table& avx512) {
    return current_isa() >= ISA_AVX512 ? avx512 : current_isa() == ISA_AVX2 ? avx2 : scalar;
}

}  // namespace llmd
