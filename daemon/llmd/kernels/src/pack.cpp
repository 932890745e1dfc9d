// Packing and unpacking weights. Not on the path of a step, so plain code.
//
// Quantized, per panel of 16 outputs:  words [groups, W, 16] of 4 bytes | scales f16 [groups, S, 16], the panel rounded up to 64 bytes.
//   Q8_0: W = 8; word j of an output holds elements 4j..4j+3, each plus 128.  S = 1.
//   Q4_0, Q4_1: W = 4; byte b of word j holds element 4j + b in its low half and element 16 + 4j + b in its high half.  S = 1, or 2 (scale, minimum).
// Unquantized, per panel of 32 outputs:  [k, 32] of 4 or 2 bytes.
// An output beyond n is zero, its scales too.
#include "packed.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "linear.h"

namespace llmd {
namespace {

float float_from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

float from_bf16(uint16_t x) { return float_from_bits(uint32_t(x) << 16); }

uint16_t to_bf16(float x) {
    const uint32_t bits = bits_of(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);  // a NaN stays one
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float from_f16(uint16_t x) {
    const uint32_t sign = uint32_t(x & 0x8000) << 16, magnitude = x & 0x7fff;
    if (magnitude < 0x400) return float_from_bits(sign | bits_of(float(magnitude) * 0x1p-24f));
    if (magnitude >= 0x7c00) return float_from_bits(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
    return float_from_bits(sign | ((magnitude << 13) + (112u << 23)));
}

// Rounds to nearest even; too large becomes infinity.
uint16_t to_f16(float x) {
    const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return uint16_t(sign | 0x7e00);
    if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7c00);
    if (magnitude < 0x38800000) return uint16_t(sign | uint32_t(std::nearbyint(float_from_bits(magnitude) * 0x1p24f)));
    return uint16_t(sign | (((magnitude + 0xfff + (magnitude >> 13 & 1)) >> 13) - (112u << 10)));
}

// A group of 32 weights as GGUF has it: x = q * d + m, with q 0..15 (Q4_1), q - 8 (Q4_0), or signed (Q8_0).
struct Block {
    uint16_t d = 0, m = 0;
    uint8_t q[GROUP] = {};  // Q4: 16 bytes of two halves; Q8: 32 bytes
};

int bytes_of_block(int format) { return format == FORMAT_Q4_0 ? 18 : format == FORMAT_Q4_1 ? 20 : 34; }
int quants_of_block(int format) { return format == FORMAT_Q8_0 ? 32 : 16; }
bool has_minimum(int format) { return format == FORMAT_Q4_1; }

int64_t source_row_bytes(int type, int k) {
    if (is_quantized(type)) return int64_t(k / GROUP) * bytes_of_block(type);
    return int64_t(k) * (type == SOURCE_F32 ? 4 : 2);
}

Block read_block(const char* at, int format) {
    Block block;
    memcpy(&block.d, at, 2);
    if (has_minimum(format)) memcpy(&block.m, at + 2, 2);
    memcpy(block.q, at + (has_minimum(format) ? 4 : 2), quants_of_block(format));
    return block;
}

void dequantize(const Block& block, int format, float* x) {
    const float d = from_f16(block.d), m = from_f16(block.m);
    for (int i = 0; i < GROUP; ++i) {
        if (format == FORMAT_Q8_0) {
            x[i] = float(int8_t(block.q[i])) * d;
        } else {
            const int q = i < 16 ? block.q[i] & 15 : block.q[i - 16] >> 4;
            x[i] = format == FORMAT_Q4_0 ? float(q - 8) * d : float(q) * d + m;
        }
    }
}

int rounded(float x, int low, int high) { return x >= high ? high : x > low ? int(std::nearbyint(x)) : low; }  // a NaN becomes the lowest

Block quantize_q8(const float* x) {
    float largest = 0;
    for (int i = 0; i < GROUP; ++i) largest = std::fabs(x[i]) > largest || x[i] != x[i] ? std::fabs(x[i]) : largest;
    Block block;
    block.d = to_f16(largest / 127.0f);
    const float d = from_f16(block.d), inverse = d > 0 ? 1.0f / d : 0.0f;
    for (int i = 0; i < GROUP; ++i) block.q[i] = uint8_t(int8_t(rounded(x[i] * inverse, -127, 127)));
    return block;
}

// Quants of x for a grid that begins at `low` with `steps` steps in `range`, then the scale and minimum that suit them best, rounded to 16 bits.
// Returns the sum of squared errors.
double fit_q4(const float* x, float low, float range, float steps, uint8_t* q, uint16_t* d, uint16_t* m) {
    const float inverse = steps / range;
    double n = GROUP, sq = 0, sqq = 0, sx = 0, sqx = 0;
    for (int i = 0; i < GROUP; ++i) {
        q[i] = uint8_t(rounded((x[i] - low) * inverse, 0, 15));
        sq += q[i], sqq += q[i] * q[i], sx += x[i], sqx += double(q[i]) * x[i];
    }
    const double determinant = n * sqq - sq * sq;
    const double slope = determinant > 0 ? (n * sqx - sq * sx) / determinant : 0.0;
    *d = to_f16(float(slope)), *m = to_f16(float((sx - slope * sq) / n));
    const float scale = from_f16(*d), minimum = from_f16(*m);
    double error = 0;
    for (int i = 0; i < GROUP; ++i) {
        const double e = double(x[i]) - (double(q[i]) * scale + minimum);
        error += e * e;
    }
    return error;
}

Block quantize_q4(const float* x) {
    float low = x[0], high = x[0];
    for (int i = 1; i < GROUP; ++i) low = x[i] < low ? x[i] : low, high = x[i] > high ? x[i] : high;
    Block best;
    uint8_t quants[GROUP] = {}, q[GROUP];
    double least = INFINITY;
    // Grids a little finer than the range cut its ends off, coarser ones leave levels unused; either may lie nearer to the values.
    for (float steps = 13.5f; steps <= 18.0f; steps += 0.5f) {
        uint16_t d, m;
        const float range = high > low ? high - low : 1.0f;
        const float cut = steps > 15.0f ? 0.5f * range * (1.0f - 15.0f / steps) : 0.0f;
        const double error = fit_q4(x, low + cut, range, steps, q, &d, &m);
        if (error < least) least = error, best.d = d, best.m = m, memcpy(quants, q, GROUP);
    }
    for (int i = 0; i < 16; ++i) best.q[i] = uint8_t(quants[i] | quants[i + 16] << 4);
    return best;
}

void to_floats(const char* row, int type, int k, float* x) {
    if (is_quantized(type)) {
        for (int g = 0; g < k / GROUP; ++g) dequantize(read_block(row + int64_t(g) * bytes_of_block(type), type), type, x + g * GROUP);
        return;
    }
    if (type == SOURCE_F32) {
        memcpy(x, row, size_t(k) * 4);
        return;
    }
    for (int i = 0; i < k; ++i) {
        uint16_t half;
        memcpy(&half, row + 2 * int64_t(i), 2);
        x[i] = type == SOURCE_F16 ? from_f16(half) : from_bf16(half);
    }
}

void put_block(const QuantPanel& panel, int lane, int g, const Block& block) {
    for (int j = 0; j < panel.words; ++j) {
        uint8_t* word = panel.quants(g) + (j * PANEL + lane) * 4;
        for (int b = 0; b < 4; ++b) word[b] = panel.format == FORMAT_Q8_0 ? block.q[4 * j + b] ^ 0x80 : block.q[4 * j + b];
    }
    panel.scales(g)[lane] = block.d;
    if (panel.scales_per_group == 2) panel.scales(g)[PANEL + lane] = block.m;
}

Block get_block(const QuantPanel& panel, int lane, int g) {
    Block block;
    for (int j = 0; j < panel.words; ++j) {
        const uint8_t* word = panel.quants(g) + (j * PANEL + lane) * 4;
        for (int b = 0; b < 4; ++b) block.q[4 * j + b] = panel.format == FORMAT_Q8_0 ? word[b] ^ 0x80 : word[b];
    }
    block.d = panel.scales(g)[lane];
    if (panel.scales_per_group == 2) block.m = panel.scales(g)[PANEL + lane];
    return block;
}

void pack_quantized(char* dst, int format, int k, int row, const char* source, int type, std::vector<float>& floats) {
    const QuantPanel panel(dst, format, k, row / PANEL);
    if (type != format) to_floats(source, type, k, floats.data());
    for (int g = 0; g < k / GROUP; ++g) {
        const float* x = floats.data() + g * GROUP;
        const Block block = type == format ? read_block(source + int64_t(g) * bytes_of_block(format), format)
                            : format == FORMAT_Q8_0 ? quantize_q8(x) : quantize_q4(x);
        put_block(panel, row % PANEL, g, block);
    }
}

void pack_plain(char* dst, int format, int k, int row, const char* source, int type, std::vector<float>& floats) {
    const int size = format == FORMAT_F32 ? 4 : 2;
    char* at = dst + fp_panel_bytes(format, k) * (row / PANEL_FP) + int64_t(row % PANEL_FP) * size;
    const int64_t step = int64_t(PANEL_FP) * size;
    if (type == format) {
        for (int i = 0; i < k; ++i) memcpy(at + step * i, source + int64_t(i) * size, size_t(size));
        return;
    }
    to_floats(source, type, k, floats.data());
    for (int i = 0; i < k; ++i) {
        const uint16_t half = format == FORMAT_F16 ? to_f16(floats[size_t(i)]) : to_bf16(floats[size_t(i)]);
        memcpy(at + step * i, format == FORMAT_F32 ? static_cast<const void*>(&floats[size_t(i)]) : &half, size_t(size));
    }
}

bool known(int format, int k) { return format >= 0 && format < FORMATS && k > 0 && (!is_quantized(format) || k % GROUP == 0); }

}  // namespace

int64_t packed_size(int format, int n, int k) {
    if (!known(format, k) || n <= 0) return -1;
    const int64_t count = panels({nullptr, format, n, k});
    return count * (is_quantized(format) ? quant_panel_bytes(format, k) : fp_panel_bytes(format, k));
}

int pack(void* dst, int format, int n, int k, int row0, int rows, const void* source, int source_type) {
    const int width = panel_width(format);
    if (!known(format, k) || !known(source_type, k) || n <= 0 || row0 < 0 || rows < 0 || row0 > n - rows || row0 % width) return -1;
    if (rows % width && row0 + rows != n) return -1;
    if (format == FORMAT_Q4_0 && source_type != SOURCE_Q4_0) return -1;  // Q4_1 is the better choice for the same speed
    std::vector<float> floats(size_t(k), 0.0f);
    const char* at = static_cast<const char*>(source);
    for (int row = row0; row < row0 + rows; ++row, at += source_row_bytes(source_type, k)) {
        (is_quantized(format) ? pack_quantized : pack_plain)(static_cast<char*>(dst), format, k, row, at, source_type, floats);
    }
    return 0;
}

int unpack_rows(const Matrix& w, const int32_t* ids, int count, float* y, int64_t ldy) {
    char* data = static_cast<char*>(const_cast<void*>(w.data));  // only read
    for (int i = 0; i < count; ++i, y += ldy) {
        const int row = ids[i];
        if (row < 0 || row >= w.n) return -1;
        if (is_quantized(w.format)) {
            const QuantPanel panel(data, w.format, w.k, row / PANEL);
            for (int g = 0; g < w.k / GROUP; ++g) dequantize(get_block(panel, row % PANEL, g), w.format, y + g * GROUP);
            continue;
        }
        const int size = w.format == FORMAT_F32 ? 4 : 2;
        const char* at = data + fp_panel_bytes(w.format, w.k) * (row / PANEL_FP) + int64_t(row % PANEL_FP) * size;
        for (int j = 0; j < w.k; ++j, at += int64_t(PANEL_FP) * size) to_floats(at, w.format, 1, y + j);
    }
    return 0;
}

}  // namespace llmd
