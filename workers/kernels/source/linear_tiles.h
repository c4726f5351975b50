// The products of linear.cpp on the processor's matrix tiles.
#pragma once

#include "tiles.h"

#if defined(__AMX_BF16__)

// What up to 32 rows meet: blocks of sixteen outputs, `step` bytes between 16 pairs of inputs and the next sixteen.
struct TileProduct {
    const bf16 *upper, *lower;  // rows of x
    int64_t x_bytes;            // between two rows
    const bf16* last;           // [32][32]: the rows' last inputs and zeros, where 32 do not divide them; else null
    const bf16* weights;
    int64_t pair_bytes;         // between the weights of a pair of inputs and those of the next
    int64_t steps;              // of 32 inputs
    const char* ahead;          // what to fetch meanwhile: `lines` every step
    int64_t lines;
};

constexpr int64_t TILE_BYTES = TILE_HEIGHT * 64;

// Four sums for up to two tiles of rows, the rows, and the blocks they meet:
//   0, 1    sums of the upper rows with two blocks                4   upper rows                    6, 7   blocks
//   2, 3    of the lower rows; or of the upper with two more      5   lower rows, or a block
inline TileShapes product_shapes(int64_t upper, int64_t lower) {
    const auto high = static_cast<uint8_t>(upper), low = static_cast<uint8_t>(lower == 0 ? upper : lower);
    const auto fifth = static_cast<uint8_t>(lower == 0 ? TILE_PAIRS : lower);
    return {{high, high, low, low, high, fifth, TILE_PAIRS, TILE_PAIRS}, {64, 64, 64, 64, 64, 64, 64, 64}};
}

// Sums of ROWS tiles of rows by BLOCKS blocks -> [ROWS * BLOCKS][16][16].
template <int ROWS, int BLOCKS>
inline void multiply_tiles(const TileProduct& product, float* sums) {
    static_assert((ROWS == 1 && (BLOCKS == 1 || BLOCKS == 2 || BLOCKS == 4)) || (ROWS == 2 && BLOCKS <= 2));
    const char* weights = reinterpret_cast<const char*>(product.weights);
    const char *upper = reinterpret_cast<const char*>(product.upper), *lower = reinterpret_cast<const char*>(product.lower);
    const char* ahead = product.ahead;
    const int64_t pair_bytes = product.pair_bytes;
    int64_t x_bytes = product.x_bytes;
    before_tiles(product.last);
    _tile_zero(0);
    if constexpr (BLOCKS > 1) _tile_zero(1);
    if constexpr (ROWS == 2 || BLOCKS == 4) _tile_zero(2);
    if constexpr (ROWS * BLOCKS == 4) _tile_zero(3);
    for (int64_t step = 0; step < product.steps; step++) {
        if (product.last != nullptr && step == product.steps - 1) {
            upper = reinterpret_cast<const char*>(product.last), lower = upper + TILE_BYTES, x_bytes = 64;
        }
        _tile_loadd(4, upper, x_bytes);
        _tile_loadd(6, weights, pair_bytes);
        for (int64_t line = 0; line < product.lines; line++) __builtin_prefetch(ahead + line * 64, 0, 2);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (BLOCKS > 1) {
            _tile_loadd(7, weights + 64, pair_bytes);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (BLOCKS == 4) {
            _tile_loadd(5, weights + 128, pair_bytes);
            _tile_dpbf16ps(2, 4, 5);
            _tile_loadd(6, weights + 192, pair_bytes);
            _tile_dpbf16ps(3, 4, 6);
        }
        if constexpr (ROWS == 2) {
            _tile_loadd(5, lower, x_bytes);
            _tile_dpbf16ps(2, 5, 6);
            if constexpr (BLOCKS > 1) _tile_dpbf16ps(3, 5, 7);
        }
        upper += 64, lower += 64;
        weights += TILE_PAIRS * pair_bytes;
        ahead += product.lines * 64;
    }
    constexpr int64_t TILE = TILE_HEIGHT * LANES;
    _tile_stored(0, sums, 64);
    if constexpr (BLOCKS > 1) _tile_stored(1, sums + TILE, 64);
    if constexpr (BLOCKS == 4) {
        _tile_stored(2, sums + 2 * TILE, 64);
        _tile_stored(3, sums + 3 * TILE, 64);
    }
    if constexpr (ROWS == 2) {
        _tile_stored(2, sums + BLOCKS * TILE, 64);
        if constexpr (BLOCKS > 1) _tile_stored(3, sums + 3 * TILE, 64);
    }
}

#endif
