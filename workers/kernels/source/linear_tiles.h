// The products of linear.cpp on the processor's matrix tiles.
#pragma once

#include "linear_part.h"
#include "tiles.h"

#if defined(__AMX_BF16__)

// Up to 32 rows, and the blocks of sixteen outputs that they meet, 32 inputs at a time.
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
    const auto tile_5 = static_cast<uint8_t>(lower == 0 ? TILE_PAIRS : lower);
    return {{high, high, low, low, high, tile_5, TILE_PAIRS, TILE_PAIRS}, {64, 64, 64, 64, 64, 64, 64, 64}};
}

// Sums of ROWS tiles of rows by BLOCKS blocks -> [ROWS * BLOCKS][16][16].
template <int ROWS, int BLOCKS>
inline void multiply_tiles(const TileProduct& product, float* sums) {
    static_assert((ROWS == 1 && (BLOCKS == 1 || BLOCKS == 2 || BLOCKS == 4)) || (ROWS == 2 && BLOCKS <= 2));
    const char* weights = reinterpret_cast<const char*>(product.weights);
    const char* upper = reinterpret_cast<const char*>(product.upper);
    const char* lower = reinterpret_cast<const char*>(product.lower);
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

// Of up to 32 rows, the inputs that do not fill a tile, and zeros.
class LastInputs {
  public:
    // Null where tiles are filled.
    const bf16* copy(const bf16* x, int64_t stride, int64_t rows, int64_t in) {
        const int64_t left = in % TILE_INPUTS;
        if (left == 0) return nullptr;
        for (int64_t row = 0; row < rows; row++) {
            std::copy_n(x + row * stride + in - left, left, inputs_ + row * TILE_INPUTS);
        }
        return inputs_;
    }

  private:
    alignas(64) bf16 inputs_[2 * TILE_HEIGHT * TILE_INPUTS] = {};
};

// As `multiply_by_vectors`.
template <bool GATED>
void multiply_by_tiles(const Part<bf16, bf16, bf16>& part, Tiles& tiles) {
    constexpr int64_t HEIGHT = 2 * TILE_HEIGHT;
    const int64_t most = part.rows > TILE_HEIGHT || part.width < 4 ? 2 : 4;  // blocks at once
    const int64_t calls = ceil_div(part.rows, HEIGHT) * ceil_div(part.width, most);
    LastInputs last;
    TileProduct product;
    product.x_bytes = part.x_stride * static_cast<int64_t>(sizeof(bf16));
    product.pair_bytes = part.step * static_cast<int64_t>(sizeof(bf16));
    product.steps = ceil_div(part.in, TILE_INPUTS);
    product.lines = ceil_div(PANEL * TILE_PAIRS, calls);
    int64_t call = 0;
    for (int64_t block = 0, count; block < part.width; block += count) {
        count = std::min(most, part.width - block);
        product.weights = part.weights + block * BLOCK;
        for (int64_t row = 0; row < part.rows; row += HEIGHT, call++) {
            const int64_t height = std::min(HEIGHT, part.rows - row), upper = std::min(TILE_HEIGHT, height);
            product.upper = part.x + row * part.x_stride;
            product.lower = product.upper + upper * part.x_stride;
            product.last = last.copy(product.upper, part.x_stride, height, part.in);
            product.ahead = calls == 1 ? reinterpret_cast<const char*>(product.weights) + AHEAD
                                       : part.next + call * part.next_bytes / calls;
            tiles.set(product_shapes(upper, height - upper));
            alignas(64) float sums[4 * TILE_HEIGHT * LANES];
            if (count == 4) multiply_tiles<1, 4>(product, sums);
            else if (height > upper && count == 2) multiply_tiles<2, 2>(product, sums);
            else if (height > upper) multiply_tiles<2, 1>(product, sums);
            else if (count == 2) multiply_tiles<1, 2>(product, sums);
            else multiply_tiles<1, 1>(product, sums);
            for (int64_t r = 0; r < height; r++) {
                const float* of_row = sums + (r / TILE_HEIGHT * count * TILE_HEIGHT + r % TILE_HEIGHT) * LANES;
                store_row<GATED>(part, row + r, block, count, of_row, TILE_HEIGHT * LANES);
            }
        }
    }
}

#endif
