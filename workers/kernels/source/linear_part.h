// What a thread of linear.cpp multiplies at a time, and what becomes of the sums.
#pragma once

#include "simd.h"

constexpr int PAIR = 2;        // inputs that lie together, for each output
constexpr int64_t PANEL = 4;   // blocks of sixteen outputs
constexpr int64_t BLOCK = PAIR * LANES;  // weights of one block for one pair of inputs
constexpr int64_t LINE = 64;   // bytes
constexpr int64_t AHEAD = 8192;  // bytes to fetch ahead where nothing is read twice

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// All rows of x by `width` blocks of a panel. With gated outputs, every second block is another factor's.
template <class X, class W, class Y>
struct Part {
    int64_t rows, in;
    const X* x;
    int64_t x_stride;        // elements
    const W* weights;
    int64_t width;
    int64_t step;            // weights between a pair of inputs and the next
    const char* next;        // what is read after this part: a panel of `next_bytes`
    int64_t next_bytes;
    const Y* bias;
    Y* out;
    int64_t out_stride;
    int64_t columns;         // outputs there are from the first block on
};

// A row's outputs of `blocks` blocks, the first being `block`, from their sums, which are `apart` floats apart.
template <bool GATED, class X, class W, class Y>
inline void store_row(const Part<X, W, Y>& part, int64_t row, int64_t block, int64_t blocks, const float* sums,
                      int64_t apart) {
    constexpr int64_t UNIT = GATED ? 2 : 1;
    Y* out = part.out + row * part.out_stride;
    for (int64_t i = 0; i < blocks; i += UNIT, sums += UNIT * apart) {
        const int64_t first = (block + i) / UNIT * LANES, columns = part.columns - first;
        if constexpr (GATED) {
            store_some(out + first, silu(load(sums)) * load(sums + apart), columns);
        } else {
            const f32x16 sum = load(sums);
            store_some(out + first, part.bias == nullptr ? sum : sum + load_some(part.bias + first, columns), columns);
        }
    }
}
