// The products of linear.cpp by vectors, as many sums at once as the processor has registers for.
#pragma once

#include "linear_part.h"

constexpr int VECTOR_ROWS = 6;  // that meet the weights at once
constexpr int64_t UNROLL = 4;  // pairs between prefetches

// Blocks that so many rows meet at once: each has a sum for every row, and eight registers are left for factors.
constexpr int blocks_at_once(int rows) {
    const int fit = (REGISTERS - 8) * VECTOR / LANES / rows;
    return fit < 1 ? 1 : fit > PANEL ? PANEL : fit;
}

template <class X, class W>
struct VectorProduct {
    const X* x;              // of the first row
    int64_t x_stride, in;
    const W* weights;        // of the first block
    int64_t step;
    const char *ahead, *end; // what to fetch meanwhile: `lines` for every UNROLL pairs, until the end
    int64_t lines;
};

// Weights of the first or second input of a pair, for one vector of outputs.
template <int INPUT>
inline f32v weights_of(const bf16* pairs) {
    u32v words;
    std::memcpy(&words, pairs, sizeof words);
    return (f32v)(INPUT == 0 ? words << 16 : words & 0xffff0000u);
}

template <int INPUT>
inline f32v weights_of(const float* pairs) {
    f32v weights;
    std::memcpy(&weights, pairs + INPUT * VECTOR, sizeof weights);
    return weights;
}

template <int INPUT, class W, int ROWS, int VECTORS>
inline void add_input(f32v (&sums)[ROWS][VECTORS], const W* weights, const float* x, int64_t stride) {
    f32v w[VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) w[v] = weights_of<INPUT>(weights + v * PAIR * VECTOR);
#pragma GCC unroll 6
    for (int row = 0; row < ROWS; row++) {
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) sums[row][v] += x[row * stride + INPUT] * w[v];
    }
}

template <class W, int ROWS, int VECTORS>
inline void add_pair(f32v (&sums)[ROWS][VECTORS], const W* weights, const float* x, int64_t stride) {
    add_input<0>(sums, weights, x, stride);
    add_input<1>(sums, weights, x, stride);
}

// An input without a partner.
template <class W, int ROWS, int VECTORS>
inline void add_last(f32v (&sums)[ROWS][VECTORS], const W* weights, const float* x, int64_t stride) {
    add_input<0>(sums, weights, x, stride);
}

#if defined(__AVX512BF16__)

inline f32v dot(f32v sum, u32v weights, uint32_t pair) {
    return (f32v)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(static_cast<int>(pair)));
}

template <int ROWS, int VECTORS>
inline void add_words(f32v (&sums)[ROWS][VECTORS], const bf16* weights, const uint32_t (&pairs)[ROWS]) {
    u32v w[VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) std::memcpy(&w[v], weights + v * PAIR * VECTOR, sizeof w[v]);
#pragma GCC unroll 6
    for (int row = 0; row < ROWS; row++) {
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) sums[row][v] = dot(sums[row][v], w[v], pairs[row]);
    }
}

template <int ROWS, int VECTORS>
inline void add_pair(f32v (&sums)[ROWS][VECTORS], const bf16* weights, const bf16* x, int64_t stride) {
    uint32_t pairs[ROWS];
#pragma GCC unroll 6
    for (int row = 0; row < ROWS; row++) std::memcpy(&pairs[row], x + row * stride, 4);
    add_words(sums, weights, pairs);
}

template <int ROWS, int VECTORS>
inline void add_last(f32v (&sums)[ROWS][VECTORS], const bf16* weights, const bf16* x, int64_t stride) {
    uint32_t pairs[ROWS];
    for (int row = 0; row < ROWS; row++) pairs[row] = x[row * stride].bits;
    add_words(sums, weights, pairs);
}

#endif

// Sums of ROWS rows by BLOCKS blocks -> the first of [ROWS][PANEL][16]. Each runs over the inputs in their order.
template <class X, class W, int ROWS, int BLOCKS>
void multiply_vectors(const VectorProduct<X, W>& product, float* sums) {
    constexpr int VECTORS = BLOCKS * LANES / VECTOR;
    f32v acc[ROWS][VECTORS];
    clear(acc);
    const X* x = product.x;
    const W* weights = product.weights;
    const char* ahead = product.ahead;
    const int64_t stride = product.x_stride, step = product.step, pairs = product.in / PAIR;
    int64_t at = 0;
    for (; at + UNROLL <= pairs; at += UNROLL) {
        if (ahead < product.end) {
            for (int64_t line = 0; line < product.lines; line++) __builtin_prefetch(ahead + line * LINE, 0, 2);
            ahead += product.lines * LINE;
        }
#pragma GCC unroll 4
        for (int64_t i = 0; i < UNROLL; i++) add_pair(acc, weights + i * step, x + i * PAIR, stride);
        weights += UNROLL * step;
        x += UNROLL * PAIR;
    }
    for (; at < pairs; at++, weights += step, x += PAIR) add_pair(acc, weights, x, stride);
    if (product.in % PAIR) add_last(acc, weights, x, stride);
#pragma GCC unroll 6
    for (int row = 0; row < ROWS; row++) store_vectors(sums + row * PANEL * LANES, acc[row]);
}

template <class X, class W>
using MultiplyVectors = void (*)(const VectorProduct<X, W>&, float*);

template <class X, class W, int ROWS, int BLOCKS = blocks_at_once(ROWS)>
MultiplyVectors<X, W> of_blocks(int64_t blocks) {
    if constexpr (BLOCKS > 1) {
        if (blocks < BLOCKS) return of_blocks<X, W, ROWS, BLOCKS - 1>(blocks);
    }
    return multiply_vectors<X, W, ROWS, BLOCKS>;
}

template <class X, class W>
MultiplyVectors<X, W> of_size(int64_t rows, int64_t blocks) {
    static_assert(VECTOR_ROWS == 6);
    switch (rows) {
        case 1: return of_blocks<X, W, 1>(blocks);
        case 2: return of_blocks<X, W, 2>(blocks);
        case 3: return of_blocks<X, W, 3>(blocks);
        case 4: return of_blocks<X, W, 4>(blocks);
        case 5: return of_blocks<X, W, 5>(blocks);
        default: return of_blocks<X, W, 6>(blocks);
    }
}

// Rows by rows: a few of them meet all blocks before the next few do. The weights come from memory for the first few,
// and for the others from the second-level cache, while what comes next is fetched.
template <bool GATED, class X, class W, class Y>
void multiply_by_vectors(const Part<X, W, Y>& part) {
    const int64_t turns = ceil_div(part.rows, VECTOR_ROWS);
    for (int64_t turn = 0, row = 0, height; turn < turns; turn++, row += height) {
        height = part.rows * (turn + 1) / turns - row;
        alignas(64) float sums[VECTOR_ROWS * PANEL * LANES];
        const int64_t most = blocks_at_once(static_cast<int>(height)), calls = turns * ceil_div(part.width, most);
        VectorProduct<X, W> product;
        product.x = part.x + row * part.x_stride, product.x_stride = part.x_stride;
        product.in = part.in, product.step = part.step;
        product.lines = ceil_div(PANEL * UNROLL * BLOCK * static_cast<int64_t>(sizeof(W)) / LINE, calls);
        int64_t call = turn * ceil_div(part.width, most);
        for (int64_t block = 0, count; block < part.width; block += count, call++) {
            count = std::min(most, part.width - block);
            product.weights = part.weights + block * BLOCK;
            if (calls == 1) {
                product.ahead = reinterpret_cast<const char*>(product.weights) + AHEAD;
                product.end = product.ahead + part.next_bytes;
            } else {
                product.ahead = part.next + call * part.next_bytes / calls;
                product.end = part.next + (call + 1) * part.next_bytes / calls;
            }
            of_size<X, W>(height, count)(product, sums + block * LANES);
        }
        for (int64_t r = 0; r < height; r++) {
            store_row<GATED>(part, row + r, 0, part.width, sums + r * PANEL * LANES, LANES);
        }
    }
}
