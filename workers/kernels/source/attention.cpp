// Paged attention: chunks and decodes of one step in one call.
#include "attention_plan.h"
#include "attention_tiles.h"
#include "parallel.h"

#include <type_traits>

namespace {

constexpr int64_t MAX_GROUPS = PIECE_ROWS / GROUP_ROWS;
// Below this many blocks of keys times rows a thread, the work is done before another thread has woken.
constexpr int64_t WORK_GRAIN = 8;

// A thread's room to work in.
struct alignas(64) Scratch {
    uint32_t queries[PIECE_ROWS * MAX_HEAD_DIM];
    float scores[GROUP_ROWS * SCORE_STRIDE];
    float states[MAX_GROUPS * (2 * LANES + GROUP_ROWS * MAX_HEAD_DIM)];
    float block_state[2 * LANES + GROUP_ROWS * MAX_HEAD_DIM];
    uint32_t last_values[PAGE_KEYS * MAX_HEAD_DIM];
};

// Adds what rows made of further keys. Never inlined: all sums of a row must round alike, wherever they are made.
__attribute__((noinline)) void add_state(State total, State more, int64_t rows, int64_t head_dim, float scale) {
    const f32x16 largest = load(total.largest()), other = load(more.largest());
    const f32x16 most = maximum(largest, other);
    const f32x16 shift = most == HIDDEN ? f32x16{} : most;
    const f32x16 keep = exp2((largest - shift) * scale), take = exp2((other - shift) * scale);
    store(total.largest(), most);
    store(total.sums(), load(total.sums()) * keep + load(more.sums()) * take);
    for (int64_t row = 0; row < rows; row++) {
        float* out = total.out() + row * head_dim;
        const float* from = more.out() + row * head_dim;
        const float kept = keep[row], taken = take[row];
        for (int64_t at = 0; at < head_dim; at += LANES) {
            store(out + at, load(out + at) * kept + load(from + at) * taken);
        }
    }
}

// A group over a block of keys, as the processor does it best: any number of rows in the same way, for ways round
// differently. What it needs to do so it holds from one group to the next.
class GroupAttention {
public:
    template <class T>
    void operator()(const Group& group, const T* const* keys, const T* const* values, const T* const* ahead,
                    int64_t count, int64_t first_key, int64_t head_dim, float scale, float* scores, State state) {
#if defined(__AMX_BF16__)
        if constexpr (std::is_same_v<T, bf16>) {
            if (use_tiles) {
                tiles_.set(attention_shapes(group.rows));
                attend_by_tiles(group, keys, values, ahead, count, first_key, head_dim, scale, scores, state);
                return;
            }
        }
#endif
        attend_by_vectors(group, keys, values, ahead, count, first_key, head_dim, scale, scores, state);
    }

private:
#if defined(__AMX_BF16__)
    Tiles tiles_;
#endif
};

template <class T>
class Attention {
public:
    Attention(const T* queries, int64_t query_stride, T* cache, const Step& step, float scale, T* out)
        : queries_(queries), query_stride_(query_stride),
          cache_{cache, step.kv_heads, step.head_dim, step.block_pages}, step_(step),
          scale_(scale * 1.44269504088896341f), out_(out) {}

    // Computes a piece, and fetches the keys of the one that this thread may have `next`, unless that is null.
    void run(const Piece& piece, const Piece* next, Scratch& scratch) const {
        const Grouping grouping(piece.tokens * step_.group_heads());
        const int64_t size = State::size(grouping.largest, step_.head_dim);
        Group groups[MAX_GROUPS];
        prepare(piece, grouping, groups, scratch.queries);
        if (piece.merge < 0) {
            attend(piece, next, grouping, groups, size, scratch.states, scratch);
            finish(piece, grouping, size, scratch.states);
            return;
        }
        Merge& merge = step_.merges[piece.merge];
        float* parts = step_.partials + merge.offset;
        attend(piece, next, grouping, groups, size, parts + piece.part * grouping.groups * size, scratch);
        if (__atomic_sub_fetch(&merge.left, 1, __ATOMIC_ACQ_REL) > 0) return;
        merge.left = merge.parts;  // for the next layer
        for (int64_t part = 1; part < merge.parts; part++) {
            for (int64_t g = 0; g < grouping.groups; g++) {
                add_state({parts + g * size}, {parts + (part * grouping.groups + g) * size},
                          grouping.first(g + 1) - grouping.first(g), step_.head_dim, scale_);
            }
        }
        finish(piece, grouping, size, parts);
    }

private:
    // The queries of each group, and the keys its rows see. Row = token * query heads of the KV head + head.
    void prepare(const Piece& piece, const Grouping& grouping, Group* groups, uint32_t* room) const {
        const int64_t heads = step_.group_heads(), words = step_.head_dim / PER_WORD<T>;
        const int64_t begin = position(piece);
        for (int64_t g = 0; g < grouping.groups; g++) {
            const int64_t first = grouping.first(g), rows = grouping.first(g + 1) - first;
            Group& group = groups[g];
            group.rows = rows;
            group.queries = room;
            for (int64_t r = 0; r < rows; r++) {
                const int64_t token = (first + r) / heads, head = piece.head * heads + (first + r) % heads;
                const T* query = queries_ + (piece.token + token) * query_stride_ + head * step_.head_dim;
                std::memcpy(room + r * words, query, words * 4);
                group.high[r] = begin + token + 1;
                group.low[r] = step_.window == 0 ? 0 : std::max<int64_t>(0, group.high[r] - step_.window);
            }
            group.lowest = group.low[0];
            group.highest = group.high[rows - 1];
            room += words * rows;
        }
    }

    // States of the groups over the piece's blocks of keys.
    void attend(const Piece& piece, const Piece* next, const Grouping& grouping, const Group* groups, int64_t size,
                float* states, Scratch& scratch) const {
        GroupAttention attend_group;
        bool begun[MAX_GROUPS] = {};
        Pages<T> pages, ahead;
        for (int64_t block = piece.block; block < piece.block + piece.blocks; block++) {
            const Range range = find_pages(piece, block, pages);
            hide_what_follows(piece, range, pages, scratch);
            if (block + 1 < piece.block + piece.blocks) {
                find_pages(piece, block + 1, ahead);
            } else if (next != nullptr) {
                find_pages(*next, next->block, ahead);
            } else {
                ahead = pages;
            }
            for (int64_t g = 0; g < grouping.groups; g++) {
                const Group& group = groups[g];
                const int64_t from = std::max(group.lowest / PAGE_KEYS, range.first);
                const int64_t end = std::min((group.highest + PAGE_KEYS - 1) / PAGE_KEYS, range.end);
                if (from >= end) continue;
                const State state{begun[g] ? scratch.block_state : states + g * size};
                const T* const* keys = pages.keys + (from - range.first);
                const T* const* values = pages.values + (from - range.first);
                // The first group reads what the others find in the cache.
                attend_group(group, keys, values, g == 0 ? ahead.keys : nullptr, end - from, from * PAGE_KEYS,
                             step_.head_dim, scale_, scratch.scores, state);
                if (begun[g]) add_state({states + g * size}, state, group.rows, step_.head_dim, scale_);
                begun[g] = true;
            }
        }
        for (int64_t g = 0; g < grouping.groups; g++) {
            if (begun[g]) continue;  // else no row sees any of these keys
            std::fill_n(states + g * size, size, 0.0f);
            std::fill_n(states + g * size, LANES, HIDDEN);
        }
    }

    // Position of a piece's first token in its sequence.
    int64_t position(const Piece& piece) const {
        return step_.seq_lens[piece.request] - step_.query_start[piece.request + 1] + piece.token;
    }

    // Pages of a sequence.
    struct Range {
        int64_t first, end;
    };

    // The pages of a block of keys that any query of a piece sees: which, and where they lie.
    Range find_pages(const Piece& piece, int64_t block, Pages<T>& pages) const {
        const int64_t begin = position(piece), end = begin + piece.tokens;
        const int64_t lowest = step_.window == 0 ? 0 : std::max<int64_t>(0, begin + 1 - step_.window);
        const Range range{std::max(lowest / PAGE_KEYS, block * BLOCK_PAGES),
                          std::min((end + PAGE_KEYS - 1) / PAGE_KEYS, (block + 1) * BLOCK_PAGES)};
        const int32_t* entry = step_.block_table + piece.request * step_.table_stride + range.first / step_.block_pages;
        int64_t index = range.first % step_.block_pages;
        const int64_t count = range.end - range.first;
        for (int64_t i = 0; i < count; i++) {
            pages.keys[i] = cache_.page(*entry, piece.head, index);
            pages.values[i] = pages.keys[i] + cache_.values_offset();
            if (++index == step_.block_pages) index = 0, entry++;
        }
        std::fill_n(pages.keys + count, BLOCK_PAGES, pages.keys[count - 1]);
        std::fill_n(pages.values + count, BLOCK_PAGES, pages.values[count - 1]);
        return range;
    }

    // Gives a sequence's last page other values, with zeros after the sequence's end. What a former owner left there
    // may not be finite, and then even a weight of 0 would spread it.
    void hide_what_follows(const Piece& piece, const Range& range, Pages<T>& pages, Scratch& scratch) const {
        const int64_t left = step_.seq_lens[piece.request] - (range.end - 1) * PAGE_KEYS;
        if (left >= PAGE_KEYS) return;
        const T*& values = pages.values[range.end - 1 - range.first];
        T* copy = reinterpret_cast<T*>(scratch.last_values);
        const int64_t row = step_.head_dim * PER_WORD<T>, whole = left / PER_WORD<T>;
        std::memcpy(copy, values, whole * row * sizeof(T));
        std::memset(copy + whole * row, 0, (PAGE_KEYS * step_.head_dim - whole * row) * sizeof(T));
        if (left % PER_WORD<T> != 0) {
            for (int64_t d = 0; d < row; d += PER_WORD<T>) copy[whole * row + d] = values[whole * row + d];
        }
        values = copy;
    }

    void finish(const Piece& piece, const Grouping& grouping, int64_t size, const float* states) const {
        const int64_t heads = step_.group_heads(), head_dim = step_.head_dim;
        for (int64_t g = 0; g < grouping.groups; g++) {
            const State state{const_cast<float*>(states) + g * size};
            for (int64_t row = grouping.first(g); row < grouping.first(g + 1); row++) {
                const int64_t token = piece.token + row / heads, head = piece.head * heads + row % heads;
                T* to = out_ + (token * step_.query_heads + head) * head_dim;
                const float* from = state.out() + (row - grouping.first(g)) * head_dim;
                const float inverse = 1.0f / state.sums()[row - grouping.first(g)];
                for (int64_t at = 0; at < head_dim; at += LANES) store(to + at, load(from + at) * inverse);
            }
        }
    }

    const T* queries_;
    int64_t query_stride_;
    Cache<T> cache_;
    const Step& step_;
    float scale_;  // of scores whose powers are of two
    T* out_;
};

template <class T>
void attend_step(const T* queries, int64_t query_stride, T* cache, const Step& step, float scale, T* out) {
    const Attention<T> attention(queries, query_stride, cache, step, scale, out);
    const auto run = [&](int64_t piece) {
        thread_local Scratch scratch;
        const int64_t next = piece + num_threads;  // most likely: the threads take turns
        attention.run(step.pieces[piece], next < step.num_pieces ? &step.pieces[next] : nullptr, scratch);
    };
    if (step.work < WORK_GRAIN * num_threads) {
        for (int64_t piece = 0; piece < step.num_pieces; piece++) run(piece);
    } else {
        parallel_pieces(step.num_pieces, run);
    }
}

}  // namespace

// queries: rows of query_stride elements, the query heads first; out [tokens][query_heads * head_dim].
extern "C" void attend_f32(const float* queries, int64_t query_stride, float* cache, const Step* step, float scale,
                           float* out) {
    attend_step(queries, query_stride, cache, *step, scale, out);
}

extern "C" void attend_bf16(const bf16* queries, int64_t query_stride, bf16* cache, const Step* step, float scale,
                            bf16* out) {
    attend_step(queries, query_stride, cache, *step, scale, out);
}
