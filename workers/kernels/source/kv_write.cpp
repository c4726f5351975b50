// What happens to a step's queries, keys and values between their product and attention.
#include "paged.h"
#include "parallel.h"

#include <cmath>

namespace {

constexpr int64_t MAX_HEAD_DIM = 256;
constexpr int64_t TOKENS_GRAIN = 8;

template <class T>
struct Rotation {
    const T* cos;  // [head_dim]
    const T* sin;  // [head_dim], the first half negated
    float eps;
    int64_t head_dim;

    // head * cos + (head with its halves swapped) * sin, after RMSNorm where there is a weight: sixteen values at a
    // time to take(offset, values).
    template <class Take>
    void over(const T* head, const T* weight, const Take& take) const {
        float twice[2 * MAX_HEAD_DIM];  // the swapped halves are what lies half a head further
        f32x16 squares = {};
        for (int64_t at = 0; at < head_dim; at += LANES) {
            const f32x16 x = load(head + at);
            squares += x * x;
            store(twice + at, x);
        }
        if (weight != nullptr) {
            const float scale = 1.0f / std::sqrt(sum(squares) / static_cast<float>(head_dim) + eps);
            for (int64_t at = 0; at < head_dim; at += LANES) {
                store(twice + at, load(twice + at) * scale * load(weight + at));
            }
        }
        for (int64_t at = 0; at < head_dim; at += LANES) store(twice + head_dim + at, load(twice + at));
        for (int64_t at = 0; at < head_dim; at += LANES) {
            take(at, load(twice + at) * load(cos + at) + load(twice + at + head_dim / 2) * load(sin + at));
        }
    }
};

// Sixteen values of a key into its page, `at` their first dimension. Every word belongs to one token.
template <class T>
inline void put_key(T* keys, int64_t key, int64_t at, f32x16 values) {
    T narrow[LANES];
    store(narrow, values);
    for (int64_t i = 0; i < LANES; i += PER_WORD<T>) {
        std::memcpy(keys + (at + i) * PAGE_KEYS + key * PER_WORD<T>, narrow + i, 4);
    }
}

// A value vector into its page. The words are shared with the token beside it, which another thread may be writing.
template <class T>
inline void put_value(T* values, int64_t key, const T* from, int64_t head_dim) {
    T* to = values + key / PER_WORD<T> * PER_WORD<T> * head_dim + key % PER_WORD<T>;
    for (int64_t at = 0; at < head_dim; at++) to[at * PER_WORD<T>] = from[at];
}

template <class T>
void rotate_and_write(T* qkv, const T* cos_sin, const T* query_weight, const T* key_weight, float eps, T* data,
                      const int64_t* slots, int64_t tokens, int64_t query_heads, int64_t kv_heads, int64_t head_dim,
                      int64_t block_pages) {
    const Cache<T> cache{data, kv_heads, head_dim, block_pages};
    const int64_t row_size = (query_heads + 2 * kv_heads) * head_dim;
    parallel_for(tokens, TOKENS_GRAIN, [&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; token++) {
            const T* cos = cos_sin + token * 2 * head_dim;
            const Rotation<T> rotation{cos, cos + head_dim, eps, head_dim};
            T* head = qkv + token * row_size;
            for (int64_t h = 0; h < query_heads; h++, head += head_dim) {
                rotation.over(head, query_weight, [&](int64_t at, f32x16 x) { store(head + at, x); });
            }
            const int64_t page = slots[token] / PAGE_KEYS, key = slots[token] % PAGE_KEYS;
            for (int64_t h = 0; h < kv_heads; h++, head += head_dim) {
                T* keys = cache.page(page / block_pages, h, page % block_pages);
                rotation.over(head, key_weight, [&](int64_t at, f32x16 x) { put_key(keys, key, at, x); });
                put_value(keys + cache.values_offset(), key, head + kv_heads * head_dim, head_dim);
            }
        }
    });
}

}  // namespace

// qkv [tokens][(query_heads + 2 * kv_heads) * head_dim], whose queries are rotated in place; cos_sin
// [tokens][2][head_dim]; weights [head_dim] or null; slots [tokens] count keys, over the blocks of the cache.
extern "C" void rotate_and_write_f32(float* qkv, const float* cos_sin, const float* query_weight,
                                     const float* key_weight, float eps, float* cache, const int64_t* slots,
                                     int64_t tokens, int64_t query_heads, int64_t kv_heads, int64_t head_dim,
                                     int64_t block_pages) {
    rotate_and_write(qkv, cos_sin, query_weight, key_weight, eps, cache, slots, tokens, query_heads, kv_heads, head_dim,
                     block_pages);
}

extern "C" void rotate_and_write_bf16(bf16* qkv, const bf16* cos_sin, const bf16* query_weight, const bf16* key_weight,
                                      float eps, bf16* cache, const int64_t* slots, int64_t tokens,
                                      int64_t query_heads, int64_t kv_heads, int64_t head_dim, int64_t block_pages) {
    rotate_and_write(qkv, cos_sin, query_weight, key_weight, eps, cache, slots, tokens, query_heads, kv_heads, head_dim,
                     block_pages);
}
