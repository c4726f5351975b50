// The plan of a step: see attention_plan.h.
#include "attention_plan.h"

namespace {

class Planner {
public:
    explicit Planner(Step& step) : step_(step) {
        step.num_pieces = step.num_merges = step.num_partials = step.work = 0;
    }

    void add(int64_t request) {
        const int64_t start = step_.query_start[request], tokens = step_.query_start[request + 1] - start;
        const int64_t most = std::max<int64_t>(1, PIECE_ROWS / step_.group_heads());
        if (tokens <= most) {
            add_split(request, start, tokens);
            return;
        }
        for (int64_t token = 0; token < tokens; token += most) {
            const int64_t count = std::min(most, tokens - token);
            const int64_t end = step_.seq_lens[request] - tokens + token + count;
            const int64_t first = first_block(end, count), last = last_block(end);
            for (int64_t head = 0; head < step_.kv_heads; head++) {
                piece(request, head, start + token, count, first, last - first, -1, 0);
            }
        }
    }

private:
    // Few rows: every block of keys is a piece, so that one long sequence is work for all threads.
    void add_split(int64_t request, int64_t start, int64_t tokens) {
        const int64_t end = step_.seq_lens[request];
        const int64_t first = first_block(end, tokens), parts = last_block(end) - first;
        const int64_t merge = parts == 1 ? -1 : step_.num_merges;
        for (int64_t part = 0; part < parts; part++) {
            for (int64_t head = 0; head < step_.kv_heads; head++) {
                piece(request, head, start, tokens, first + part, 1, parts == 1 ? -1 : merge + head, part);
            }
        }
        if (parts == 1) return;
        const int64_t size = parts * states_size(tokens * step_.group_heads(), step_.head_dim);
        for (int64_t head = 0; head < step_.kv_heads; head++) {
            if (step_.merges != nullptr) {
                step_.merges[step_.num_merges] = {step_.num_partials, static_cast<int32_t>(parts),
                                                  static_cast<int32_t>(parts)};
            }
            step_.num_merges++;
            step_.num_partials += size;
        }
    }

    // Blocks of the keys that `tokens` queries see, of which the last is the key before `end`.
    int64_t first_block(int64_t end, int64_t tokens) const {
        if (step_.window == 0) return 0;
        return std::max<int64_t>(0, end - tokens + 1 - step_.window) / BLOCK_KEYS;
    }

    static int64_t last_block(int64_t end) { return (end + BLOCK_KEYS - 1) / BLOCK_KEYS; }

    void piece(int64_t request, int64_t head, int64_t token, int64_t tokens, int64_t block, int64_t blocks,
               int64_t merge, int64_t part) {
        if (step_.pieces != nullptr) {
            step_.pieces[step_.num_pieces] = {
                static_cast<int32_t>(request), static_cast<int32_t>(head),   static_cast<int32_t>(token),
                static_cast<int32_t>(tokens),  static_cast<int32_t>(block),  static_cast<int32_t>(blocks),
                static_cast<int32_t>(merge),   static_cast<int32_t>(part),
            };
        }
        step_.num_pieces++;
        step_.work += tokens * step_.group_heads() * blocks;
    }

    Step& step_;
};

int64_t cost(const Piece& piece) { return int64_t{piece.tokens} * piece.blocks; }

}  // namespace

// For Python, which lays them out as well.
extern "C" int step_bytes() { return sizeof(Step); }
extern "C" int piece_bytes() { return sizeof(Piece); }
extern "C" int merge_bytes() { return sizeof(Merge); }

// Counts pieces, merges and partials; with room for them, writes them too. Large pieces come first, so that the
// threads end together; pieces of equal cost stay in order, in which neighbours in memory follow each other.
extern "C" void attention_plan(Step* step) {
    Planner planner(*step);
    for (int64_t request = 0; request < step->requests; request++) planner.add(request);
    if (step->pieces == nullptr) return;
    std::stable_sort(step->pieces, step->pieces + step->num_pieces,
                     [](const Piece& a, const Piece& b) { return cost(a) > cost(b); });
}
