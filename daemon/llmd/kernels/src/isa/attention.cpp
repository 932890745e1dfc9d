// See ../attention.h.
#include "attention_vectors.h"

namespace llmd::LLMD_ISA_NS {

extern const AttentionKernels attention_kernels = {store_tile, tile<Vectors>, decode<Vectors>, blocks<Vectors>, merge};

}  // namespace llmd::LLMD_ISA_NS
