// One row of logits as floats in the cache, and the order of its tokens.
#pragma once

#include "simd.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

// A place in a row's ranking: largest value first, ties to the lowest id. As a limit it is the last token that is in.
struct Place {
    float value;
    int32_t id;
};
constexpr Place NO_LIMIT = {-std::numeric_limits<float>::infinity(), std::numeric_limits<int32_t>::max()};

inline bool before(Place a, Place b) { return a.value > b.value || (a.value == b.value && a.id < b.id); }

inline bool within(Place place, Place limit) { return !before(limit, place); }

// All bits of a lane are set where it is in.
inline i32x16 within(f32x16 values, i32x16 ids, Place limit) {
    return (values > limit.value) | ((values == limit.value) & (ids <= limit.id));
}

// One bit a lane, from a comparison's result.
inline uint32_t bits_of(i32x16 mask) {
#if defined(__AVX512DQ__)
    return _mm512_movepi32_mask((__m512i)mask);
#else
    uint32_t bits = 0;
    for (int lane = 0; lane < LANES; lane++) bits |= static_cast<uint32_t>(mask[lane] & 1) << lane;
    return bits;
#endif
}

class Row {
  public:
    // No value is NaN, and the largest is a number. What is said below of ranks and sums needs that.
    bool finite;
    // The first place of the ranking.
    Place best;

    float& operator[](int64_t id) { return values_[id]; }

    // Calls body(first id, values, ids) for 16 tokens at a time. Behind the last token come values of -inf, which rank
    // behind every token.
    template <class Body>
    void each(const Body& body) const {
        i32x16 ids = first_ids();
        for (int64_t id = 0; id < padded_; id += LANES, ids += LANES) body(id, at(id), ids);
    }

    template <class T>
    void read(const T* from, int64_t size) {
        padded_ = (size + LANES - 1) / LANES * LANES;
        if (static_cast<int64_t>(values_.size()) < padded_) values_.resize(padded_);
        const int64_t whole = size / LANES * LANES;
        for (int64_t id = 0; id < whole; id += LANES) store(&values_[id], load(from + id));
        for (int64_t id = whole; id < padded_; id++) values_[id] = id < size ? to_float(from[id]) : NO_LIMIT.value;
        find_best();
    }

    // After values were changed, which may have made them no numbers.
    void find_best() {
        f32x16 most = at(0);
        i32x16 unordered = most != most;
        for (int64_t id = LANES; id < padded_; id += LANES) {
            const f32x16 x = at(id);
            most = maximum(most, x);
            unordered |= x != x;
        }
        best = {largest(most), 0};
        finite = bits_of(unordered) == 0 && std::isfinite(best.value);
        for (int64_t id = 0; id < padded_; id += LANES) {
            if (const uint32_t found = bits_of(at(id) == best.value)) {
                best.id = static_cast<int32_t>(id) + __builtin_ctz(found);
                return;
            }
        }
    }

    // Values become (value - best) / temperature: at most 0, so that nothing overflows however cold it is.
    void scale(float temperature) {
        for (int64_t id = 0; id < padded_; id += LANES) {
            const f32x16 below = at(id) - best.value;
            store(&values_[id], temperature == 1.0f ? below : below / temperature);
        }
        best.value = 0.0f;
    }

    // The sum of exp(value - best) of the tokens within the limit.
    double weight(Place limit) const {
        constexpr int64_t BLOCK = 16 * LANES;  // what is summed in floats
        double total = 0;
        i32x16 ids = first_ids();
        for (int64_t begin = 0; begin < padded_; begin += BLOCK) {
            f32x16 weights = {};
            for (int64_t id = begin; id < std::min(begin + BLOCK, padded_); id += LANES, ids += LANES) {
                const i32x16 in = within(at(id), ids, limit);
                if (bits_of(in)) weights += (f32x16)((i32x16)exp(at(id) - best.value) & in);
            }
            total += sum(weights);
        }
        return total;
    }

    // The best `count` tokens, 1 <= count <= size, in no order but that the last of them comes last. Until the next
    // call.
    std::vector<Place>& top(int64_t count) {
        // Of the largest values of more than `count` groups of tokens, those that are among the best `count` belong to
        // as many tokens. With twice the groups hardly more tokens are as large.
        const int64_t blocks = 2 * count / LANES + 1;
        const int64_t size = std::max<int64_t>(padded_ / LANES / blocks, 1) * LANES;
        group_bests_.clear();
        for (int64_t begin = 0; begin < padded_; begin += size) {
            f32x16 most = at(begin);
            for (int64_t id = begin; id < std::min(begin + size, padded_); id += LANES) most = maximum(most, at(id));
            for (int lane = 0; lane < LANES; lane++) group_bests_.push_back(most[lane]);
        }
        const auto last = group_bests_.begin() + count - 1;
        std::nth_element(group_bests_.begin(), last, group_bests_.end(), std::greater<float>());
        top_.clear();
        each([&](int64_t id, f32x16 values, i32x16) {
            for (uint32_t in = bits_of(values >= *last); in; in &= in - 1) {
                const int lane = __builtin_ctz(in);
                top_.push_back({values[lane], static_cast<int32_t>(id) + lane});
            }
        });
        std::nth_element(top_.begin(), top_.begin() + count - 1, top_.end(), before);
        top_.resize(count);
        return top_;
    }

  private:
    static i32x16 first_ids() {
        i32x16 ids;
        for (int lane = 0; lane < LANES; lane++) ids[lane] = lane;
        return ids;
    }

    f32x16 at(int64_t id) const { return load(values_.data() + id); }

    std::vector<float> values_, group_bests_;
    std::vector<Place> top_;
    int64_t padded_ = 0;
};
