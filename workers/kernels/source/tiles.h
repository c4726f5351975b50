// The processor's matrix tiles (AMX), where it has them: sixteen rows of 64 bytes each, and one instruction that
// multiplies two of them.
//
// In a product of bfloat16, `a` holds rows of 32 inputs, and `b` for every pair of inputs that pair of sixteen outputs:
// what paged.h and linear.cpp call words. A row of the result depends on that row of `a` only, to the bit. Numbers
// below the smallest normal one count as zero.
#pragma once

#include "simd.h"

// Whether this process may use tiles: the processor has them and the system grants their registers.
bool have_tiles();

constexpr int64_t TILE_HEIGHT = 16;  // rows
constexpr int64_t TILE_INPUTS = 32;  // bfloat16 in a row
constexpr int64_t TILE_PAIRS = TILE_INPUTS / 2;

#if defined(__AMX_BF16__)

// How the eight tiles are used: four sums for up to two tiles of rows, the rows themselves, and what they meet.
//
//   0, 1    sums of the upper rows with two blocks of outputs     4   upper rows     6, 7   blocks
//   2, 3    of the lower rows; or of the upper with two more      5   lower rows, or a block
struct TileShape {
    int64_t upper, lower;  // rows; lower is 0 where all fit into the upper tile
    int64_t inputs;        // of a multiplication; 32, or 16 where no more belong together

    bool operator==(const TileShape& other) const {
        return upper == other.upper && lower == other.lower && inputs == other.inputs;
    }
};

// Gives a thread its tiles for as long as it lives. The system saves tiles in use whenever it switches threads.
class Tiles {
  public:
    Tiles() = default;
    Tiles(const Tiles&) = delete;
    ~Tiles() {
        if (shape_.upper != 0) _tile_release();
    }

    void set(const TileShape& shape) {
        if (shape == shape_) return;
        shape_ = shape;
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } config;
        const auto tile = [&](int number, int64_t rows, int64_t row_bytes) {
            config.rows[number] = static_cast<uint8_t>(rows), config.row_bytes[number] = static_cast<uint16_t>(row_bytes);
        };
        const bool two = shape.lower != 0;
        for (int number = 0; number < 4; number++) tile(number, number < 2 || !two ? shape.upper : shape.lower, 64);
        tile(4, shape.upper, shape.inputs * 2);
        if (two) tile(5, shape.lower, shape.inputs * 2);
        else tile(5, shape.inputs / 2, 64);
        tile(6, shape.inputs / 2, 64), tile(7, shape.inputs / 2, 64);
        _tile_loadconfig(&config);
    }

  private:
    TileShape shape_{0, 0, 0};
};

// What is written before is there for the tiles to read: the compiler does not know that they read memory.
inline void before_tiles() { asm volatile("" ::: "memory"); }

#endif
