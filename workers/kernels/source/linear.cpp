// y = x W^T for bf16, summed in float32: one kernel for any number of rows.
//
// The weights are packed once, as they are read: panels of up to four blocks, a block being sixteen outputs; in a
// panel, for every pair of inputs, that pair of each of its outputs. So a panel is one stream through memory, and a
// tile of up to six rows by four blocks keeps its sums in registers while it reads it: once from memory for the
// first tile of rows, for the others from the second-level cache, while the next panel is fetched.
//
// A sum runs over the inputs in their order in every tile: what a row gives depends on no other row. Where the
// processor has matrix tiles, they multiply any number of rows, from one on: their sums round differently, so that
// there must be one way only.
#include "linear_tiles.h"
#include "parallel.h"

#include <algorithm>
#include <iterator>
#include <type_traits>

namespace {

constexpr int PANEL = 4;       // blocks
constexpr int TILE_ROWS = 6;   // 24 sums, four weights and one input: 29 of 32 registers
constexpr int PAIR = 2;        // inputs that one instruction multiplies
constexpr int64_t BLOCK = PAIR * LANES;  // weights of one block for one pair of inputs
constexpr int64_t UNROLL = 4;  // steps between prefetches
constexpr int64_t LINE = 64;   // bytes
constexpr int64_t AHEAD = 8192;  // bytes to fetch ahead where nothing is read twice

// A pair of inputs, as the bits of both, and sixteen outputs' pairs of weights.
inline f32x16 dot(f32x16 sum, u32x16 weights, uint32_t x) {
#if defined(__AVX512BF16__)
    return (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(static_cast<int>(x)), (__m512bh)weights);
#else
    const u32x16 pair = u32x16{} + x;
    sum += (f32x16)(pair << 16) * (f32x16)(weights << 16);
    return sum + (f32x16)(pair & 0xffff0000u) * (f32x16)(weights & 0xffff0000u);
#endif
}

inline uint32_t load_pair(const bf16* x) {
    uint32_t pair;
    std::memcpy(&pair, x, 4);
    return pair;
}

struct Sizes {
    int64_t in, out;          // features; of a gated product those of gate, which are as many as up's
    int64_t x_stride;         // elements
};

// What a tile reads of x and of the packed weights, and where it writes.
struct Tile {
    const bf16* x;
    const bf16* weights;
    int64_t step;            // weights between a pair of inputs and the next
    const char* ahead;       // what to fetch meanwhile: `lines` every UNROLL steps
    int64_t lines;
    const bf16* bias;
    bf16* out;
    int64_t columns;         // outputs there are from the first block on
};

template <int ROWS, int BLOCKS>
inline void add_pairs(f32x16 (&sums)[ROWS][BLOCKS], const bf16* weights, const uint32_t (&x)[ROWS]) {
    u32x16 w[BLOCKS];
#pragma GCC unroll 4
    for (int block = 0; block < BLOCKS; block++) std::memcpy(&w[block], weights + block * BLOCK, 64);
#pragma GCC unroll 6
    for (int row = 0; row < ROWS; row++) {
#pragma GCC unroll 4
        for (int block = 0; block < BLOCKS; block++) sums[row][block] = dot(sums[row][block], w[block], x[row]);
    }
}

// The outputs of a row, from the sums of BLOCKS blocks.
template <int BLOCKS, bool GATED>
inline void store_row(const f32x16 (&sums)[BLOCKS], const Tile& tile, bf16* out) {
    if constexpr (GATED) {
#pragma GCC unroll 2
        for (int block = 0; block < BLOCKS; block += 2) {
            const int64_t first = block / 2 * LANES;
            store_some(out + first, silu(sums[block]) * sums[block + 1], tile.columns - first);
        }
    } else {
#pragma GCC unroll 4
        for (int block = 0; block < BLOCKS; block++) {
            const int64_t first = block * LANES;
            f32x16 sum = sums[block];
            if (tile.bias != nullptr) sum += load_some(tile.bias + first, tile.columns - first);
            store_some(out + first, sum, tile.columns - first);
        }
    }
}

template <int ROWS, int BLOCKS, bool GATED>
void compute(const Sizes& sizes, const Tile& tile) {
    f32x16 sums[ROWS][BLOCKS] = {};
    const bf16* weights = tile.weights;
    const bf16* x = tile.x;
    const char* ahead = tile.ahead;
    const int64_t stride = sizes.x_stride, step = tile.step;
    const int64_t pairs = sizes.in / PAIR;
    uint32_t pair[ROWS];
    int64_t at = 0;
    for (; at + UNROLL <= pairs; at += UNROLL) {
        for (int64_t line = 0; line < tile.lines; line++) __builtin_prefetch(ahead + line * LINE, 0, 2);
        ahead += tile.lines * LINE;
#pragma GCC unroll 4
        for (int64_t i = 0; i < UNROLL; i++) {
#pragma GCC unroll 6
            for (int row = 0; row < ROWS; row++) pair[row] = load_pair(x + row * stride + i * PAIR);
            add_pairs<ROWS, BLOCKS>(sums, weights + i * step, pair);
        }
        weights += UNROLL * step;
        x += UNROLL * PAIR;
    }
    for (; at < pairs; at++, weights += step, x += PAIR) {
        for (int row = 0; row < ROWS; row++) pair[row] = load_pair(x + row * stride);
        add_pairs<ROWS, BLOCKS>(sums, weights, pair);
    }
    if (sizes.in % PAIR) {
        for (int row = 0; row < ROWS; row++) pair[row] = x[row * stride].bits;
        add_pairs<ROWS, BLOCKS>(sums, weights, pair);
    }
#pragma GCC unroll 6
    for (int row = 0; row < ROWS; row++) store_row<BLOCKS, GATED>(sums[row], tile, tile.out + row * sizes.out);
}

using Compute = void (*)(const Sizes&, const Tile&);

template <int BLOCKS, bool GATED>
Compute of_rows(int64_t rows) {
    constexpr Compute computes[] = {compute<1, BLOCKS, GATED>, compute<2, BLOCKS, GATED>, compute<3, BLOCKS, GATED>,
                                    compute<4, BLOCKS, GATED>, compute<5, BLOCKS, GATED>, compute<6, BLOCKS, GATED>};
    static_assert(std::size(computes) == TILE_ROWS);
    return computes[rows - 1];
}

template <bool GATED>
Compute of_size(int64_t rows, int64_t blocks) {
    if (blocks == 4) return of_rows<4, GATED>(rows);
    if (blocks == 2) return of_rows<2, GATED>(rows);
    if constexpr (!GATED) {
        if (blocks == 3) return of_rows<3, GATED>(rows);
        return of_rows<1, GATED>(rows);
    }
    __builtin_unreachable();
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Pairs of inputs that packed weights have room for, with zeros behind the last: tiles read so many at once.
inline int64_t packed_pairs(int64_t in) { return ceil_div(in, TILE_INPUTS) * TILE_PAIRS; }

// All rows by the `width` blocks of `tile`, which has what belongs to the first row. The panel after it is `next`.
template <bool GATED>
void multiply_by_vectors(const Sizes& sizes, Tile tile, int64_t width, int64_t rows, const char* next, int64_t bytes) {
    const int64_t tiles = ceil_div(rows, TILE_ROWS);
    tile.lines = ceil_div(PANEL * UNROLL, tiles);
    if (tiles == 1) tile.ahead = reinterpret_cast<const char*>(tile.weights) + AHEAD;
    for (int64_t i = 0, row = 0; i < tiles; i++) {
        const int64_t height = rows * (i + 1) / tiles - row;
        if (tiles > 1) tile.ahead = next + i * bytes / tiles;
        of_size<GATED>(height, width)(sizes, tile);
        tile.x += height * sizes.x_stride;
        tile.out += height * sizes.out;
        row += height;
    }
}

#if defined(__AMX_BF16__)

// Of up to 32 rows, the inputs that do not fill a tile, and zeros.
class LastInputs {
  public:
    const bf16* copy(const bf16* x, const Sizes& sizes, int64_t rows) {
        const int64_t left = sizes.in % TILE_INPUTS;
        if (left == 0) return nullptr;
        for (int64_t row = 0; row < rows; row++) {
            std::copy_n(x + row * sizes.x_stride + sizes.in - left, left, inputs_ + row * TILE_INPUTS);
        }
        return inputs_;
    }

  private:
    alignas(64) bf16 inputs_[2 * TILE_HEIGHT * TILE_INPUTS] = {};
};

// The same on the processor's tiles.
template <bool GATED>
void multiply_by_tiles(const Sizes& sizes, Tile tile, int64_t width, int64_t rows, const char* next, int64_t bytes,
                       Tiles& tiles) {
    constexpr int64_t UNIT = GATED ? 2 : 1, HEIGHT = 2 * TILE_HEIGHT;
    const int64_t most = rows > TILE_HEIGHT || width < 4 ? 2 : 4;  // blocks at once
    const int64_t parts = ceil_div(rows, HEIGHT) * ceil_div(width, most);
    const bf16 *const x = tile.x, *const weights = tile.weights;
    bf16* const out = tile.out;
    const int64_t columns = tile.columns;
    LastInputs last;
    TileProduct product;
    product.x_bytes = sizes.x_stride * static_cast<int64_t>(sizeof(bf16));
    product.pair_bytes = tile.step * static_cast<int64_t>(sizeof(bf16));
    product.steps = ceil_div(sizes.in, TILE_INPUTS);
    product.lines = ceil_div(PANEL * TILE_PAIRS, parts);
    int64_t part = 0;
    for (int64_t block = 0, count; block < width; block += count) {
        count = std::min(most, width - block);
        product.weights = weights + block * BLOCK;
        tile.columns = columns - block / UNIT * LANES;
        if (tile.bias != nullptr && block != 0) tile.bias += 2 * LANES;
        for (int64_t row = 0; row < rows; row += HEIGHT, part++) {
            const int64_t height = std::min(HEIGHT, rows - row), upper = std::min(TILE_HEIGHT, height);
            product.upper = x + row * sizes.x_stride;
            product.lower = product.upper + upper * sizes.x_stride;
            product.last = last.copy(product.upper, sizes, height);
            product.ahead = parts == 1 ? reinterpret_cast<const char*>(product.weights) + AHEAD : next + part * bytes / parts;
            tiles.set(product_shapes(upper, height - upper));
            alignas(64) float sums[4 * TILE_HEIGHT * LANES];
            bf16* to = out + row * sizes.out + block / UNIT * LANES;
            const auto by = [&](auto count) {
                constexpr int BLOCKS = decltype(count)::value;
                if constexpr (BLOCKS < 4) {
                    if (height > upper) multiply_tiles<2, BLOCKS>(product, sums);
                    else multiply_tiles<1, BLOCKS>(product, sums);
                } else {
                    multiply_tiles<1, BLOCKS>(product, sums);
                }
                for (int64_t r = 0; r < height; r++) {
                    const float* from = sums + (r / TILE_HEIGHT * BLOCKS * TILE_HEIGHT + r % TILE_HEIGHT) * LANES;
                    f32x16 of_row[BLOCKS];
                    for (int i = 0; i < BLOCKS; i++) of_row[i] = load(from + i * TILE_HEIGHT * LANES);
                    store_row<BLOCKS, GATED>(of_row, tile, to + r * sizes.out);
                }
            };
            if (count == 4) by(std::integral_constant<int, 4>());
            else if (count == 2) by(std::integral_constant<int, 2>());
            else if constexpr (!GATED) by(std::integral_constant<int, 1>());
        }
    }
}

#endif

template <bool GATED>
void multiply(const Sizes& sizes, const bf16* x, const bf16* packed, const bf16* bias, bf16* out, int64_t rows) {
    constexpr int64_t UNIT = GATED ? 2 : 1;  // blocks that belong together
    const int64_t blocks = ceil_div(sizes.out, LANES) * UNIT, pairs = packed_pairs(sizes.in);
    if (rows == 0) return;
    parallel_for(blocks / UNIT, 1, [&](int64_t begin, int64_t end) {
        begin *= UNIT, end *= UNIT;
#if defined(__AMX_BF16__)
        Tiles tiles;
#endif
        int64_t width;
        for (int64_t block = begin; block < end; block += width) {
            const int64_t panel = block / PANEL * PANEL, in_panel = std::min<int64_t>(PANEL, blocks - panel);
            width = std::min(end, panel + in_panel) - block;
            const int64_t column = block / UNIT * LANES;
            Tile tile;
            tile.x = x;
            tile.weights = packed + (panel * pairs + (block - panel)) * BLOCK;
            tile.step = in_panel * BLOCK;
            tile.bias = bias == nullptr ? nullptr : bias + column;
            tile.out = out + column;
            tile.columns = sizes.out - column;
            const char* next = reinterpret_cast<const char*>(packed + (panel + in_panel) * pairs * BLOCK);
            const int64_t bytes = PANEL * pairs * BLOCK * static_cast<int64_t>(sizeof(bf16));
#if defined(__AMX_BF16__)
            if (use_tiles) {
                multiply_by_tiles<GATED>(sizes, tile, width, rows, next, bytes, tiles);
                continue;
            }
#endif
            multiply_by_vectors<GATED>(sizes, tile, width, rows, next, bytes);
        }
    });
}

}  // namespace

// weight [out, in], and up of the same shape or null -> packed, [ceil(out / 16) * 16 * ceil(in / 32) * 32], twice
// that with up: then gate and up alternate by blocks.
extern "C" void linear_pack_bf16(const bf16* weight, const bf16* up, bf16* packed, int64_t in, int64_t out) {
    const int64_t unit = up == nullptr ? 1 : 2, blocks = ceil_div(out, LANES) * unit, pairs = packed_pairs(in);
    parallel_for(ceil_div(blocks, PANEL), 1, [&](int64_t begin, int64_t end) {
        for (int64_t block = begin * PANEL; block < std::min(end * PANEL, blocks); block++) {
            const int64_t panel = block / PANEL * PANEL, in_panel = std::min<int64_t>(PANEL, blocks - panel);
            const bf16* from = block % unit ? up : weight;
            bf16* to = packed + (panel * pairs + (block - panel)) * BLOCK;
            for (int64_t pair = 0; pair < pairs; pair++, to += in_panel * BLOCK) {
                for (int64_t lane = 0; lane < LANES; lane++) {
                    const int64_t row = block / unit * LANES + lane;
                    for (int64_t i = 0; i < PAIR; i++) {
                        const int64_t column = pair * PAIR + i;
                        to[lane * PAIR + i] = row < out && column < in ? from[row * in + column] : bf16{0};
                    }
                }
            }
        }
    });
}

// x [rows, in], its rows x_stride elements apart -> out [rows, out] = x W^T + bias, unless that is null.
extern "C" void linear_bf16(const bf16* x, int64_t x_stride, const bf16* packed, const bf16* bias, bf16* out,
                            int64_t rows, int64_t in, int64_t out_size) {
    multiply<false>({in, out_size, x_stride}, x, packed, bias, out, rows);
}

// x [rows, in] -> out [rows, ffn] = silu(x gate^T) * (x up^T), rounded once.
extern "C" void gated_linear_bf16(const bf16* x, int64_t x_stride, const bf16* packed, bf16* out, int64_t rows,
                                  int64_t in, int64_t ffn) {
    multiply<true>({in, ffn, x_stride}, x, packed, nullptr, out, rows);
}
