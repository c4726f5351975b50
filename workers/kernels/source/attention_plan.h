// Cuts one step's attention into pieces of work that any thread may take.
#pragma once

#include "attention_rows.h"

// Query rows of a long chunk that are computed together: their keys are read once. A query token's heads stay together.
constexpr int64_t PIECE_ROWS = 48;

// Some query tokens of a request, for the query heads that share one KV head, over some blocks of its keys.
struct Piece {
    int32_t request, head;
    int32_t token, tokens;  // the first one's row in the batch
    int32_t block, blocks;
    int32_t merge;  // which of the merges it is part of; -1: it is the whole
    int32_t part;
};
static_assert(sizeof(Piece) == 8 * 4);

// The pieces that make up few query tokens over many keys. The thread that finishes the last of them adds them up.
struct Merge {
    int64_t offset;  // of the first part's states in `partials`, in floats
    int32_t parts, left;
};
static_assert(sizeof(Merge) == 4 * 4);

// One step; `_Step` in workers/attention/native_backend.py has the same fields. Everything but `merges[].left` stays as
// planned.
struct Step {
    const int32_t* block_table;  // [requests][table_stride]
    int64_t table_stride;
    const int32_t* query_start;  // [requests + 1]
    const int32_t* seq_lens;     // [requests]
    int64_t requests;
    int64_t query_heads, kv_heads, head_dim, block_pages;
    int64_t window;  // keys that a query sees; 0: all
    Piece* pieces;
    int64_t num_pieces;
    Merge* merges;
    int64_t num_merges;
    float* partials;
    int64_t num_partials;  // floats
    int64_t work;          // blocks of keys, times the rows that meet them

    int64_t group_heads() const { return query_heads / kv_heads; }
};
static_assert(sizeof(Step) == 17 * 8);

// How the rows of a piece fall into groups of nearly equal size.
struct Grouping {
    int64_t rows, groups, largest;

    explicit Grouping(int64_t rows)
        : rows(rows), groups((rows + GROUP_ROWS - 1) / GROUP_ROWS), largest((rows + groups - 1) / groups) {}

    int64_t first(int64_t group) const { return rows * group / groups; }
};

// What the states of a piece's groups take, in floats.
inline int64_t states_size(int64_t rows, int64_t head_dim) {
    const Grouping grouping(rows);
    return grouping.groups * State::size(grouping.largest, head_dim);
}
