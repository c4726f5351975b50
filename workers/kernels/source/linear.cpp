// y = x W^T, summed in float32: one kernel for any number of rows.
//
// The weights are packed once, as they are read: panels of up to four blocks, a block being sixteen outputs; in a
// panel, for every pair of inputs, its weights for each of the outputs. So a panel is one stream through memory.
// What is multiplied is float32 or bfloat16; weights of float32 that are bfloat16 without loss may be packed as that,
// which halves what a step of few rows waits for.
//
// A sum runs over the inputs in their order, whatever the batch: what a row gives depends on no other row. Where the
// processor has matrix tiles, they multiply bfloat16 for any number of rows, from one on: their sums round
// differently, so that there must be one way only.
#include "linear_tiles.h"
#include "linear_vectors.h"
#include "parallel.h"

#include <algorithm>
#include <vector>

namespace {

// Pairs of inputs that packed weights have room for, with zeros behind the last: tiles read so many at once.
inline int64_t packed_pairs(int64_t in) { return ceil_div(in, TILE_INPUTS) * TILE_PAIRS; }

// Where the weight of one output and one of the two inputs lies, behind the first weight of that block and pair: the
// two of an output side by side, or, of floats, vectors of outputs for the one input and the other in turn.
template <class W>
inline int64_t place_in_pair(int64_t lane, int64_t input) {
    if constexpr (sizeof(W) == 2) return lane * PAIR + input;  // a word holds both
    return lane / VECTOR * PAIR * VECTOR + input * VECTOR + lane % VECTOR;
}

template <bool GATED, class X, class W, class Y>
void multiply(const X* x, int64_t x_stride, const W* packed, const Y* bias, Y* out, int64_t rows, int64_t in,
              int64_t out_size) {
    constexpr int64_t UNIT = GATED ? 2 : 1;  // blocks that belong together
    const int64_t blocks = ceil_div(out_size, LANES) * UNIT, pairs = packed_pairs(in);
    if (rows == 0) return;
    parallel_for(blocks / UNIT, 1, [&](int64_t begin, int64_t end) {
        begin *= UNIT, end *= UNIT;
#if defined(__AMX_BF16__)
        Tiles tiles;
#endif
        int64_t width;
        for (int64_t block = begin; block < end; block += width) {
            const int64_t panel = block / PANEL * PANEL, in_panel = std::min(PANEL, blocks - panel);
            width = std::min(end, panel + in_panel) - block;
            const int64_t column = block / UNIT * LANES;
            Part<X, W, Y> part;
            part.rows = rows, part.in = in;
            part.x = x, part.x_stride = x_stride;
            part.weights = packed + (panel * pairs + (block - panel)) * BLOCK;
            part.width = width;
            part.step = in_panel * BLOCK;
            part.next = reinterpret_cast<const char*>(packed + (panel + in_panel) * pairs * BLOCK);
            part.next_bytes = PANEL * pairs * BLOCK * static_cast<int64_t>(sizeof(W));
            part.bias = bias == nullptr ? nullptr : bias + column;
            part.out = out + column;
            part.out_stride = out_size;
            part.columns = out_size - column;
#if defined(__AMX_BF16__)
            if constexpr (sizeof(X) == 2) {
                if (use_tiles) {
                    multiply_by_tiles<GATED>(part, tiles);
                    continue;
                }
            }
#endif
            multiply_by_vectors<GATED>(part);
        }
    });
}

// The same for rows of bfloat16 on any processor.
template <bool GATED>
void multiply_bf16(const bf16* x, int64_t x_stride, const bf16* packed, const bf16* bias, bf16* out, int64_t rows,
                   int64_t in, int64_t out_size) {
#if defined(__AVX512BF16__)
    multiply<GATED>(x, x_stride, packed, bias, out, rows, in, out_size);
#else
    thread_local std::vector<float> wide;
    wide.resize(rows * in);
    for (int64_t row = 0; row < rows; row++) {
        std::transform(x + row * x_stride, x + row * x_stride + in, wide.data() + row * in,
                       [](bf16 v) { return to_float(v); });
    }
    multiply<GATED>(static_cast<const float*>(wide.data()), in, packed, bias, out, rows, in, out_size);
#endif
}

template <class W>
void pack(const W* weight, const W* up, W* packed, int64_t in, int64_t out) {
    const int64_t unit = up == nullptr ? 1 : 2, blocks = ceil_div(out, LANES) * unit, pairs = packed_pairs(in);
    parallel_for(ceil_div(blocks, PANEL), 1, [&](int64_t begin, int64_t end) {
        for (int64_t block = begin * PANEL; block < std::min(end * PANEL, blocks); block++) {
            const int64_t panel = block / PANEL * PANEL, in_panel = std::min(PANEL, blocks - panel);
            const W* from = block % unit ? up : weight;
            W* to = packed + (panel * pairs + (block - panel)) * BLOCK;
            for (int64_t pair = 0; pair < pairs; pair++, to += in_panel * BLOCK) {
                for (int64_t lane = 0; lane < LANES; lane++) {
                    const int64_t row = block / unit * LANES + lane;
                    for (int64_t i = 0; i < PAIR; i++) {
                        const int64_t column = pair * PAIR + i;
                        to[place_in_pair<W>(lane, i)] = row < out && column < in ? from[row * in + column] : W{0};
                    }
                }
            }
        }
    });
}

}  // namespace

// weight [out, in], and up of the same shape or null -> packed, [ceil(out / 16) * 16 * ceil(in / 32) * 32], twice
// that with up: then gate and up alternate by blocks.
extern "C" void linear_pack_bf16(const bf16* weight, const bf16* up, bf16* packed, int64_t in, int64_t out) {
    pack(weight, up, packed, in, out);
}

extern "C" void linear_pack_f32(const float* weight, const float* up, float* packed, int64_t in, int64_t out) {
    pack(weight, up, packed, in, out);
}

// x [rows, in], its rows x_stride elements apart -> out [rows, out] = x W^T + bias, unless that is null. Named after
// what x, bias and out are, and then after the packed weights.
extern "C" void linear_bf16_bf16(const bf16* x, int64_t x_stride, const bf16* packed, const bf16* bias, bf16* out,
                                 int64_t rows, int64_t in, int64_t out_size) {
    multiply_bf16<false>(x, x_stride, packed, bias, out, rows, in, out_size);
}

extern "C" void linear_f32_bf16(const float* x, int64_t x_stride, const bf16* packed, const float* bias, float* out,
                                int64_t rows, int64_t in, int64_t out_size) {
    multiply<false>(x, x_stride, packed, bias, out, rows, in, out_size);
}

extern "C" void linear_f32_f32(const float* x, int64_t x_stride, const float* packed, const float* bias, float* out,
                               int64_t rows, int64_t in, int64_t out_size) {
    multiply<false>(x, x_stride, packed, bias, out, rows, in, out_size);
}

// x [rows, in] -> out [rows, ffn] = silu(x gate^T) * (x up^T), rounded once.
extern "C" void gated_linear_bf16_bf16(const bf16* x, int64_t x_stride, const bf16* packed, bf16* out, int64_t rows,
                                       int64_t in, int64_t ffn) {
    multiply_bf16<true>(x, x_stride, packed, nullptr, out, rows, in, ffn);
}

extern "C" void gated_linear_f32_bf16(const float* x, int64_t x_stride, const bf16* packed, float* out, int64_t rows,
                                      int64_t in, int64_t ffn) {
    multiply<true>(x, x_stride, packed, static_cast<const float*>(nullptr), out, rows, in, ffn);
}

extern "C" void gated_linear_f32_f32(const float* x, int64_t x_stride, const float* packed, float* out, int64_t rows,
                                     int64_t in, int64_t ffn) {
    multiply<true>(x, x_stride, packed, static_cast<const float*>(nullptr), out, rows, in, ffn);
}
