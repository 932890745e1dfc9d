// Where things are in packed weights; the layout is described in pack.cpp.
#pragma once

#include <cstdint>

#include "linear.h"

namespace llmd {
namespace {

constexpr int words_per_group(int format) { return format == FORMAT_Q8_0 ? 8 : 4; }
constexpr int scales_in_group(int format) { return format == FORMAT_Q4_1 ? 2 : 1; }

constexpr int quant_group_bytes(int format) { return PANEL * (words_per_group(format) * 4 + scales_in_group(format) * 2); }

inline int64_t quant_panel_bytes(int format, int k) { return (int64_t(k / GROUP) * quant_group_bytes(format) + 63) & ~int64_t(63); }

inline int64_t fp_panel_bytes(int format, int k) { return int64_t(k) * PANEL_FP * (format == FORMAT_F32 ? 4 : 2); }

// One panel of a quantized matrix.
struct QuantPanel {
    char* base;
    int format, groups, words, scales_per_group;

    QuantPanel(char* data, int format, int k, int panel)
        : base(data + quant_panel_bytes(format, k) * panel), format(format), groups(k / GROUP), words(words_per_group(format)), scales_per_group(scales_in_group(format)) {}

    uint8_t* quants(int g) const { return reinterpret_cast<uint8_t*>(base) + int64_t(g) * words * 4 * PANEL; }
    uint16_t* scales(int g) const { return reinterpret_cast<uint16_t*>(base + int64_t(groups) * words * 4 * PANEL) + int64_t(g) * scales_per_group * PANEL; }
};

}  // namespace
}  // namespace llmd
