// A few query rows over one block of keys: scores, softmax, weighted sum of the values.
//
// A row's result depends on that row's query and on the keys it sees, to the bit, and not on the rows beside it or on
// how many keys those see: blocks begin at multiples of BLOCK_KEYS, hidden keys weigh 0, and sums have one order.
#pragma once

#include "paged.h"

#include <algorithm>
#include <limits>

constexpr int64_t BLOCK_PAGES = 16;
constexpr int64_t BLOCK_KEYS = BLOCK_PAGES * PAGE_KEYS;
constexpr int64_t GROUP_ROWS = 16;
constexpr int64_t VECTOR_ROWS = 6;
constexpr int64_t SCORE_STRIDE = BLOCK_KEYS + 16;  // floats; rows a power of two apart would share few cache sets
constexpr float HIDDEN = -std::numeric_limits<float>::infinity();

// Rows that are computed together: their queries, and which keys each sees.
struct Group {
    int64_t rows;
    const uint32_t* queries;  // [rows][words of a query]
    int64_t low[GROUP_ROWS], high[GROUP_ROWS];  // first key seen, and the first after them
    int64_t lowest, highest;  // over the rows
};

// Softmax so far, without the division: [16] largest scores, [16] sums of weights, [rows][head_dim] weighted values.
// Of the sixteen, those beyond the rows mean nothing.
struct State {
    float* at;

    float* largest() const { return at; }
    float* sums() const { return at + LANES; }
    float* out() const { return at + 2 * LANES; }
    static int64_t size(int64_t rows, int64_t head_dim) { return 2 * LANES + rows * head_dim; }
};

// Pages of a key block, keys and values. The last are repeated, so that any few can be read at once.
template <class T>
struct Pages {
    const T* keys[2 * BLOCK_PAGES];
    const T* values[2 * BLOCK_PAGES];
};

inline void fetch(const void* line) { __builtin_prefetch(line, 0, 2); }

// Vectors of scores or of values that so many rows meet at once: each needs a register, and one for each row's sum;
// one is for what the rows bring.
constexpr int vectors_at_once(int rows) {
    const int fit = (REGISTERS - 1) / (rows + 1);
    return fit >= 8 ? 8 : fit >= 4 ? 4 : fit >= 2 ? 2 : 1;
}

// Scores of R rows of queries [R][words] with `V` vectors of keys, the first one `part` vectors into the first page.
// Fetches as many pages `ahead` meanwhile.
template <class T, int R, int V>
inline void score_vectors(const uint32_t* queries, int64_t words, const T* const* pages, const T* const* ahead,
                          int64_t part, float* scores) {
    constexpr int PARTS = LANES / VECTOR;
    const char *keys[V], *next[V];
    for (int v = 0; v < V; v++) {
        const int64_t offset = (part + v) % PARTS * VECTOR * 4;
        keys[v] = (const char*)pages[(part + v) / PARTS] + offset;
        next[v] = (const char*)ahead[(part + v) / PARTS] + offset;
    }
    f32v acc[R][V];
    clear(acc);
    for (int64_t word = 0; word < words; word++) {
        u32v key[V];
#pragma GCC unroll 16
        for (int v = 0; v < V; v++) key[v] = load_words<u32v>(keys[v] + word * 64);
#pragma GCC unroll 16
        for (int v = 0; v < V; v++) fetch(next[v] + word * 64);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const u32v query = spread<u32v>(load_word(queries + r * words + word));
#pragma GCC unroll 16
            for (int v = 0; v < V; v++) acc[r][v] = multiply_words<T>(acc[r][v], key[v], query);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) store_vectors(scores + r * SCORE_STRIDE + part * VECTOR, acc[r]);
}

// out [R][head_dim] from dimension `at` on, V vectors of them: the values of `count` pages by the rows' weights.
// Fetches as much of the pages `ahead` meanwhile.
template <class T, int R, int V>
inline void weigh_values(const float* weights, const T* const* pages, const T* const* ahead, int64_t count,
                         int64_t head_dim, int64_t at, float* out) {
    f32v acc[R][V];
    clear(acc);
    for (int64_t page = 0; page < count; page++) {
        const char* value_words = (const char*)pages[page] + at * 4;
        const char* next_words = (const char*)ahead[page] + at * 4;
        const char* weight_words = (const char*)weights + page * PAGE_KEYS * sizeof(T);
        for (int64_t word = 0; word < PAGE_KEYS / PER_WORD<T>; word++) {
            u32v value[V];
#pragma GCC unroll 16
            for (int v = 0; v < V; v++) value[v] = load_words<u32v>(value_words + v * VECTOR * 4);
#pragma GCC unroll 16
            for (int v = 0; v < V; v += LANES / VECTOR) fetch(next_words + v * VECTOR * 4);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                const u32v weight = spread<u32v>(load_word(weight_words + r * SCORE_STRIDE * 4));
#pragma GCC unroll 16
                for (int v = 0; v < V; v++) acc[r][v] = multiply_words<T>(acc[r][v], value[v], weight);
            }
            value_words += head_dim * 4;
            next_words += head_dim * 4;
            weight_words += 4;
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) store_vectors(out + r * head_dim + at, acc[r]);
}

// Hides the scores of a row's keys outside low..high, counted from the first score.
inline void hide(float* scores, int64_t pages, int64_t low, int64_t high) {
    const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const f32x16 hidden = f32x16{} + HIDDEN;
    for (int64_t page = 0; page < pages; page++) {
        const i32x16 key = lanes + static_cast<int32_t>(page * PAGE_KEYS);
        const i32x16 seen = (key >= static_cast<int32_t>(low)) & (key < static_cast<int32_t>(high));
        store(scores + page * LANES, seen ? load(scores + page * LANES) : hidden);
    }
}

inline float largest_score(const float* scores, int64_t pages) {
    f32v most = f32v{} + HIDDEN;
    for (int64_t at = 0; at < pages * LANES; at += VECTOR) most = maximum(load_vector<f32v>(scores + at), most);
    return largest(most);
}

// A row's scores -> its weights as T in the same place, 2^((score - largest) * scale); returns their sum.
template <class T>
inline float weights_of(float* scores, int64_t pages, float scale, float largest) {
    constexpr int PARTS = LANES / VECTOR;
    const f32v factor = f32v{} + scale;
    const f32v shift = f32v{} + (largest == HIDDEN ? 0.0f : -largest * scale);
    f32v even[PARTS] = {}, odd[PARTS] = {};  // additions of even and of odd pages need not wait for each other
    T* weights = reinterpret_cast<T*>(scores);
    const auto weigh_page = [&](int64_t page, f32v* of_page) {
        f32v weight[PARTS];
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; part++) {
            weight[part] = exp2(load_vector<f32v>(scores + page * LANES + part * VECTOR) * factor + shift);
            of_page[part] += weight[part];
        }
        f32x16 whole;
        std::memcpy(&whole, weight, sizeof whole);
        store(weights + page * LANES, whole);
    };
    int64_t page = 0;
    for (; page + 2 <= pages; page += 2) {
        weigh_page(page, even);
        weigh_page(page + 1, odd);
    }
    if (page < pages) weigh_page(page, even);
    for (int part = 1; part < PARTS; part++) even[0] += even[part], odd[0] += odd[part];
    return sum(even[0] + odd[0]);  // the same where a row's first page is an odd one
}

// A group's scores [rows][SCORE_STRIDE] over `count` pages, the first key being `first_key` -> weights as T in the same
// place, and what they add up to.
template <class T>
inline void weigh(const Group& group, float* scores, int64_t count, int64_t first_key, float scale, State state) {
    for (int64_t r = 0; r < group.rows; r++) {
        const int64_t low = group.low[r] - first_key, high = group.high[r] - first_key;
        if (low > 0 || high < count * PAGE_KEYS) hide(scores + r * SCORE_STRIDE, count, low, high);
        state.largest()[r] = largest_score(scores + r * SCORE_STRIDE, count);
    }
    for (int64_t r = 0; r < group.rows; r++) {
        state.sums()[r] = weights_of<T>(scores + r * SCORE_STRIDE, count, scale, state.largest()[r]);
    }
}

// Scores of R rows of queries with the keys of `count` pages. Fetches as many pages `ahead` meanwhile.
template <class T, int R>
void score_rows(const uint32_t* queries, int64_t words, const T* const* keys, const T* const* ahead, int64_t count,
                float* scores) {
    constexpr int V = vectors_at_once(R), PARTS = LANES / VECTOR;
    for (int64_t part = 0; part < count * PARTS; part += V) {
        const int64_t page = part / PARTS;
        score_vectors<T, R, V>(queries, words, keys + page, ahead + page, part % PARTS, scores + page * LANES);
    }
}

// The values of `count` pages by R rows' weights -> out [R][head_dim]. Fetches as many pages `ahead` meanwhile.
template <class T, int R>
void weigh_rows(const float* weights, const T* const* values, const T* const* ahead, int64_t count, int64_t head_dim,
                float* out) {
    constexpr int V = std::min(vectors_at_once(R), 4);
    int64_t at = 0;
    for (; at + V * VECTOR <= head_dim; at += V * VECTOR) {
        weigh_values<T, R, V>(weights, values, ahead, count, head_dim, at, out);
    }
    for (; at < head_dim; at += VECTOR) weigh_values<T, R, 1>(weights, values, ahead, count, head_dim, at, out);
}

template <class T>
constexpr decltype(&score_rows<T, 1>) SCORE_ROWS[VECTOR_ROWS] = {
    score_rows<T, 1>, score_rows<T, 2>, score_rows<T, 3>, score_rows<T, 4>, score_rows<T, 5>, score_rows<T, 6>,
};

template <class T>
constexpr decltype(&weigh_rows<T, 1>) WEIGH_ROWS[VECTOR_ROWS] = {
    weigh_rows<T, 1>, weigh_rows<T, 2>, weigh_rows<T, 3>, weigh_rows<T, 4>, weigh_rows<T, 5>, weigh_rows<T, 6>,
};

// What a group's rows make of `count` pages whose first key is `first_key`. `ahead` are keys that will be read next, or
// null where another group has fetched these and the values.
// scores [GROUP_ROWS][SCORE_STRIDE] is room to work in.
template <class T>
void attend_by_vectors(const Group& group, const T* const* keys, const T* const* values, const T* const* ahead,
                       int64_t count, int64_t first_key, int64_t head_dim, float scale, float* scores, State state) {
    const int64_t words = head_dim / PER_WORD<T>, parts = (group.rows + VECTOR_ROWS - 1) / VECTOR_ROWS;
    for (int64_t part = 0; part < parts; part++) {
        const int64_t row = group.rows * part / parts, rows = group.rows * (part + 1) / parts - row;
        SCORE_ROWS<T>[rows - 1](group.queries + row * words, words, keys, part == 0 ? values : keys, count,
                                scores + row * SCORE_STRIDE);
    }
    weigh<T>(group, scores, count, first_key, scale, state);
    for (int64_t part = 0; part < parts; part++) {
        const int64_t row = group.rows * part / parts, rows = group.rows * (part + 1) / parts - row;
        WEIGH_ROWS<T>[rows - 1](scores + row * SCORE_STRIDE, values,
                                part == 0 && ahead != nullptr ? ahead : values, count, head_dim,
                                state.out() + row * head_dim);
    }
}
