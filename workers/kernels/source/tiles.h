// The processor's matrix tiles (AMX), where it has them: sixteen rows of 64 bytes each, and one instruction that
// multiplies two of them.
//
// In a product of bfloat16, `a` holds rows of 32 inputs, and `b` for every pair of inputs that pair of sixteen outputs:
// what paged.h and linear.cpp call words. A row of the result depends on that row of `a` only, to the bit. Numbers
// below the smallest normal one count as zero.
#pragma once

#include "simd.h"

// The processor has tiles, and the system lets this process use their registers.
extern bool use_tiles;

constexpr int64_t TILE_HEIGHT = 16;  // rows
constexpr int64_t TILE_INPUTS = 32;  // bfloat16 in a row
constexpr int64_t TILE_PAIRS = TILE_INPUTS / 2;

#if defined(__AMX_BF16__)

// What is written before is there for the tiles to read: the compiler does not know how much memory they read.
inline void before_tiles(const void* memory) { asm volatile("" ::"r"(memory) : "memory"); }

// Rows of each of the eight tiles, and bytes of a row.
struct TileShapes {
    uint8_t rows[8];
    uint16_t row_bytes[8];
};

// Gives a thread its tiles for as long as it lives: whatever is in use is saved when the system switches threads.
class Tiles {
  public:
    Tiles() = default;
    Tiles(const Tiles&) = delete;
    ~Tiles() {
        if (config_.palette != 0) _tile_release();
    }

    // Other shapes than before empty all tiles.
    void set(const TileShapes& shapes) {
        if (std::equal(shapes.rows, shapes.rows + 8, config_.rows) &&
            std::equal(shapes.row_bytes, shapes.row_bytes + 8, config_.row_bytes)) {
            return;
        }
        config_.palette = 1;
        std::copy_n(shapes.rows, 8, config_.rows);
        std::copy_n(shapes.row_bytes, 8, config_.row_bytes);
        before_tiles(&config_);
        _tile_loadconfig(&config_);
    }

  private:
    struct alignas(64) {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config_ = {};
};

#endif
