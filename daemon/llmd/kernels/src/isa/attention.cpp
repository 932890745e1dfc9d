// See ../attention.h.
#include "attention_rows.h"
#include "attention_store.h"

namespace llmd::LLMD_ISA_NS {

extern const AttentionKernels attention_kernels = {store_tile, tile, decode, blocks, merge};

}  // namespace llmd::LLMD_ISA_NS
