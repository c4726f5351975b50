// Samples tokens from whole rows of logits, as workers/penalties.py, draws.py and noise.py define it.
#include "parallel.h"
#include "row.h"

#include <algorithm>

namespace {

using u64x8 = uint64_t __attribute__((vector_size(64)));

constexpr int64_t ROWS_GRAIN = 2;  // a row takes 5 to 100 microseconds
constexpr uint64_t GAMMA = 0x9E3779B97F4A7C15;
constexpr double LARGEST_NOISE = 36.75;

// As PARAMETERS in workers/kernels/sampling.py.
struct Parameters {
    double top_p, min_p;
    uint64_t seed;
    int64_t top_k;
    float temperature, repetition_penalty, presence_penalty, frequency_penalty;

    bool penalize() const { return repetition_penalty != 1 || presence_penalty != 0 || frequency_penalty != 0; }
};
static_assert(sizeof(Parameters) == 4 * 8 + 4 * 4);

// What is added to logits: logit_bias, and -inf for tokens that are forbidden.
struct Additions {
    const int64_t* starts;  // [rows + 1]; null where no row has any
    const int64_t* token_ids;
    const float* values;
};

// The tokens before the one that is drawn.
struct Context {
    const int32_t* token_ids;
    int64_t size, num_prompt;
};

// Only tokens of the context are touched. `counts` is zero for every token, before and after.
void penalize(Row& row, const Context& context, const Parameters& parameters, int64_t vocab_size,
              std::vector<int32_t>& counts) {
    if (static_cast<int64_t>(counts.size()) < vocab_size) counts.resize(vocab_size);
    const auto each = [&](int64_t from, const auto& body) {
        for (int64_t at = from; at < context.size; at++) {
            const int32_t id = context.token_ids[at];
            if (id >= 0 && id < vocab_size) body(id);
        }
    };
    each(context.num_prompt, [&](int32_t id) { counts[id]++; });
    each(0, [&](int32_t id) {
        if (counts[id] < 0) return;  // done
        float value = row[id];
        value = value > 0 ? value / parameters.repetition_penalty : value * parameters.repetition_penalty;
        value -= parameters.frequency_penalty * static_cast<float>(counts[id]);
        if (counts[id] > 0) value -= parameters.presence_penalty;
        row[id] = value;
        counts[id] = -1;
    });
    each(0, [&](int32_t id) { counts[id] = 0; });
}

inline uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
}

inline double noise_of(uint64_t key, int64_t token_id) {
    const uint64_t hash = mix(key + (static_cast<uint64_t>(token_id) + 1) * GAMMA);
    return -std::log(-std::log((static_cast<double>(hash >> 12) + 0.5) * 0x1p-52));
}

// The upper halves of the hashes of 16 tokens, those with even and with odd ids, but for their lowest bits: those the
// last step of `mix` may change.
inline u32x16 upper_halves(u64x8 even, u64x8 odd) {
    even = (even ^ (even >> 30)) * 0xBF58476D1CE4E5B9;
    odd = (odd ^ (odd >> 30)) * 0xBF58476D1CE4E5B9;
    even = (even ^ (even >> 27)) * 0x94D049BB133111EB;
    odd = (odd ^ (odd >> 27)) * 0x94D049BB133111EB;
    return (u32x16)((even >> 32) | (odd & 0xFFFFFFFF00000000));  // the lower half of a lane comes first
}

// The token whose value plus noise is largest, of those within the limit and not below the floor. The best is 0.
//
// Two logarithms a token would be most of the work, so each is first held against the leader. To lead by noise,
// -log(-log(u)) > leader - value, takes -log(u) < exp(value - leader), and 1 - u < -log(u): a token whose hash makes
// 1 - u larger than that is out. The exponential is bounded from above by a straight line in the bits of a float
// between powers of two (Schraudolph, 1999), at most 6% too high. Of a vocabulary some ten tokens remain.
int32_t race(Row& row, uint64_t key, Place limit, double floor) {
    constexpr double SLOPE = 12102203.161561485;        // 2^23 / ln 2
    constexpr double ONE = (127.0 + 24.0) * 8388608.0;  // the bits of 2^24: 1 - u is taken in units of 2^-24
    constexpr double SLACK = 512.0;                     // more than what is rounded
    const float floor_below = std::nextafter(static_cast<float>(floor), NO_LIMIT.value);
    int32_t winner;
    double leader;
    float lowest, offset;
    const auto lead = [&](double noisy, int32_t id) {
        winner = id;
        leader = noisy;
        lowest = std::max({limit.value, floor_below, static_cast<float>(leader - LARGEST_NOISE)});
        offset = static_cast<float>(ONE + SLACK - leader * SLOPE);
    };
    lead(noise_of(key, row.best.id), row.best.id);
    u64x8 even, odd;
    for (int lane = 0; lane < 8; lane++) {
        even[lane] = key + (2 * lane + 1) * GAMMA;
        odd[lane] = key + (2 * lane + 2) * GAMMA;
    }
    const f32x16 smallest = f32x16{} + 8388608.0f;  // the bits of 2^-126
    row.each([&](int64_t id, f32x16 values, i32x16) {
        const i32x16 possible = values >= lowest;
        if (bits_of(possible)) {
            const f32x16 bits = maximum(values * static_cast<float>(SLOPE) + offset, smallest);
            const f32x16 bound = (f32x16)__builtin_convertvector(bits, i32x16);
            const i32x16 complement = (i32x16)(~upper_halves(even, odd) >> 8);
            const i32x16 in = possible & (__builtin_convertvector(complement, f32x16) <= bound);
            for (uint32_t rest = bits_of(in); rest; rest &= rest - 1) {
                const int lane = __builtin_ctz(rest);
                const Place place = {values[lane], static_cast<int32_t>(id) + lane};
                if (!within(place, limit) || place.value < floor) continue;
                const double noisy = noise_of(key, place.id) + place.value;
                if (noisy > leader) lead(noisy, place.id);
            }
        }
        even += 16 * GAMMA;
        odd += 16 * GAMMA;
    });
    return winner;
}

// A draw from scaled values by top_k, top_p and min_p, without sorting.
//
// Each of them keeps the tokens before some place of the ranking. top_k's is looked for, min_p's is a value. As for
// top_p: the winner among more tokens is the winner among the kept ones if it is one of them, and the weight of what
// ranks before it says whether it is. If not, nothing behind it is kept either, and those before it race again.
int32_t draw(Row& row, uint64_t key, const Parameters& parameters, int64_t vocab_size) {
    const bool top_k = parameters.top_k > 0 && parameters.top_k < vocab_size;
    const Place last = top_k ? row.top(parameters.top_k).back() : NO_LIMIT;
    const double floor = std::log(parameters.min_p);
    int32_t winner = race(row, key, last, floor);
    if (parameters.top_p >= 1) return winner;
    const double share = parameters.top_p * row.weight(last);
    while (winner != row.best.id) {
        const Place before = {row[winner], winner - 1};
        if (row.weight(before) < share) break;
        winner = race(row, key, before, floor);
    }
    return winner;
}

template <class T>
void sample(const T* logits, int64_t stride, int64_t rows, int64_t vocab_size, const Parameters* table,
            const int64_t* slots, const int32_t* tokens, int64_t tokens_stride, const int64_t* context_lens,
            const int64_t* output_positions, const Additions& additions, int64_t* token_ids, uint8_t* finite) {
    parallel_for(rows, ROWS_GRAIN, [&](int64_t begin, int64_t end) {
        static thread_local Row row;
        static thread_local std::vector<int32_t> counts;
        for (int64_t at = begin; at < end; at++) {
            const Parameters& parameters = table[slots[at]];
            row.read(logits + at * stride, vocab_size);
            finite[at] = row.finite;
            bool changed = parameters.penalize();
            if (additions.starts != nullptr) {
                for (int64_t i = additions.starts[at]; i < additions.starts[at + 1]; i++) {
                    const int64_t id = additions.token_ids[i];
                    if (id >= 0 && id < vocab_size) row[id] += additions.values[i];
                    changed = true;
                }
            }
            if (parameters.penalize()) {
                const int32_t* context = tokens + slots[at] * tokens_stride;
                penalize(row, {context, context_lens[at], context_lens[at] - output_positions[at]}, parameters,
                         vocab_size, counts);
            }
            if (changed) row.find_best();
            token_ids[at] = row.best.id;
            if (parameters.temperature > 0 && row.finite) {
                row.scale(parameters.temperature);
                const uint64_t key = mix(mix(parameters.seed + GAMMA) + output_positions[at] * GAMMA);
                token_ids[at] = draw(row, key, parameters, vocab_size);
            }
        }
    });
}

}  // namespace

// For Python, which lays them out as well.
extern "C" int parameters_bytes() { return sizeof(Parameters); }

// logits [rows, stride], of which vocab_size are a row's; table, tokens [slots, tokens_stride]; slots, context_lens and
// output_positions [rows] -> token_ids and finite [rows].
#define SAMPLE(T, name)                                                                                               \
    extern "C" void name(const T* logits, int64_t stride, int64_t rows, int64_t vocab_size, const Parameters* table,  \
                         const int64_t* slots, const int32_t* tokens, int64_t tokens_stride,                          \
                         const int64_t* context_lens, const int64_t* output_positions, const int64_t* starts,         \
                         const int64_t* added_ids, const float* added, int64_t* token_ids, uint8_t* finite) {         \
        sample(logits, stride, rows, vocab_size, table, slots, tokens, tokens_stride, context_lens, output_positions, \
               {starts, added_ids, added}, token_ids, finite);                                                        \
    }
SAMPLE(float, sample_f32)
SAMPLE(bf16, sample_bf16)
