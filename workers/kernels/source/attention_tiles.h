// A group's attention over one block of keys on the processor's matrix tiles, as attention_rows.h does it.
#pragma once

#include "attention_rows.h"
#include "tiles.h"

#if defined(__AMX_BF16__)

constexpr int64_t PAGE_PAIRS = PAGE_KEYS / 2;

// 0 to 3: sums. 4 and 6: queries and a page's keys, 32 dimensions of them. 5 and 7: 16 dimensions of these, or a
// page's weights and values.
inline TileShapes attention_shapes(int64_t group_rows) {
    const auto rows = static_cast<uint8_t>(group_rows);
    return {{rows, rows, rows, rows, rows, rows, TILE_PAIRS, PAGE_PAIRS}, {64, 64, 64, 64, 64, 32, 64, 64}};
}

// Scores of a group's rows with the keys of four pages. Fetches the pages `ahead` meanwhile, unless that is null.
inline void score_four_pages(const uint32_t* queries, int64_t head_dim, const bf16* const* pages,
                             const bf16* const* ahead, float* scores) {
    const int64_t row_bytes = head_dim * 2;
    const char* query = reinterpret_cast<const char*>(queries);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    int64_t at = 0;
    for (; at + TILE_INPUTS <= head_dim; at += TILE_INPUTS) {
        const int64_t from = at * PAGE_KEYS;
        _tile_loadd(4, query + at * 2, row_bytes);
        for (int64_t page = 0; ahead != nullptr && page < 4; page++) {
            for (int64_t line = 0; line < TILE_PAIRS; line++) fetch(ahead[page] + from + line * 32);
        }
        _tile_loadd(6, pages[0] + from, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(6, pages[1] + from, 64);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(6, pages[2] + from, 64);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(6, pages[3] + from, 64);
        _tile_dpbf16ps(3, 4, 6);
    }
    if (at < head_dim) {
        const int64_t from = at * PAGE_KEYS;
        _tile_loadd(5, query + at * 2, row_bytes);
        _tile_loadd(7, pages[0] + from, 64);
        _tile_dpbf16ps(0, 5, 7);
        _tile_loadd(7, pages[1] + from, 64);
        _tile_dpbf16ps(1, 5, 7);
        _tile_loadd(7, pages[2] + from, 64);
        _tile_dpbf16ps(2, 5, 7);
        _tile_loadd(7, pages[3] + from, 64);
        _tile_dpbf16ps(3, 5, 7);
    }
    constexpr int64_t stride = SCORE_STRIDE * sizeof(float);
    _tile_stored(0, scores, stride);
    _tile_stored(1, scores + LANES, stride);
    _tile_stored(2, scores + 2 * LANES, stride);
    _tile_stored(3, scores + 3 * LANES, stride);
}

// Dimensions `at` on, 16 * D of them, of what a group's weights make of the values of `count` pages. Fetches as much
// of the pages `ahead` meanwhile, unless that is null.
template <int D>
inline void weigh_values_by_tiles(const float* weights, const bf16* const* pages, const bf16* const* ahead,
                                  int64_t count, int64_t head_dim, int64_t at, float* out) {
    static_assert(D == 1 || D == 4);
    const int64_t row_bytes = head_dim * 4;
    _tile_zero(0);
    if constexpr (D == 4) {
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t page = 0; page < count; page++) {
        const bf16* values = pages[page] + at * 2;
        _tile_loadd(5, reinterpret_cast<const bf16*>(weights) + page * PAGE_KEYS, SCORE_STRIDE * 4);
        for (int64_t pair = 0; ahead != nullptr && pair < PAGE_PAIRS; pair++) {
            for (int64_t d = 0; d < D; d++) fetch(ahead[page] + at * 2 + pair * head_dim * 2 + d * 32);
        }
        _tile_loadd(7, values, row_bytes);
        _tile_dpbf16ps(0, 5, 7);
        if constexpr (D == 4) {
            _tile_loadd(7, values + 32, row_bytes);
            _tile_dpbf16ps(1, 5, 7);
            _tile_loadd(7, values + 64, row_bytes);
            _tile_dpbf16ps(2, 5, 7);
            _tile_loadd(7, values + 96, row_bytes);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, out + at, row_bytes);
    if constexpr (D == 4) {
        _tile_stored(1, out + at + LANES, row_bytes);
        _tile_stored(2, out + at + 2 * LANES, row_bytes);
        _tile_stored(3, out + at + 3 * LANES, row_bytes);
    }
}

// As `attend_by_vectors`, on tiles that have `attention_shapes` of the group's rows.
inline void attend_by_tiles(const Group& group, const bf16* const* keys, const bf16* const* values,
                            const bf16* const* ahead, int64_t count, int64_t first_key, int64_t head_dim, float scale,
                            float* scores, State state) {
    before_tiles(group.queries);
    for (int64_t page = 0; page < count; page += 4) {
        const bf16* const* next = ahead == nullptr ? nullptr : values + page;
        score_four_pages(group.queries, head_dim, keys + page, next, scores + page * LANES);
    }
    weigh<bf16>(group, scores, count, first_key, scale, state);
    before_tiles(scores);
    int64_t at = 0;
    for (; at + 4 * LANES <= head_dim; at += 4 * LANES) {
        weigh_values_by_tiles<4>(scores, values, ahead, count, head_dim, at, state.out());
    }
    for (; at < head_dim; at += LANES) {
        weigh_values_by_tiles<1>(scores, values, ahead, count, head_dim, at, state.out());
    }
}

#endif
