// What happens to a step's queries, keys and values between their product and attention.
#include "paged.h"
#include "parallel.h"

#include <cmath>

namespace {

constexpr int64_t TOKENS_GRAIN = 8;

// One token's rotation: cosines, and sines whose first half is negated.
struct Rotation {
    alignas(64) float cos[MAX_HEAD_DIM];
    alignas(64) float sin[MAX_HEAD_DIM];
    int64_t head_dim;
    float eps;

    template <class T>
    void set(const T* cos_sin) {
        for (int64_t at = 0; at < head_dim; at += LANES) {
            store(cos + at, load(cos_sin + at));
            store(sin + at, load(cos_sin + head_dim + at));
        }
    }

    // Turns a head in place: head * cos + (head with its halves swapped) * sin, after RMSNorm where there is a weight.
    template <class T>
    void turn(T* head, const T* weight) const {
        alignas(64) float twice[2 * MAX_HEAD_DIM];  // the swapped halves are what lies half a head further
        f32x16 squares = {};
        for (int64_t at = 0; at < head_dim; at += LANES) {
            const f32x16 x = load(head + at);
            if (weight != nullptr) squares += x * x;
            store(twice + at, x);
            store(twice + head_dim + at, x);
        }
        if (weight != nullptr) {
            const float scale = 1.0f / std::sqrt(sum(squares) / static_cast<float>(head_dim) + eps);
            for (int64_t at = 0; at < head_dim; at += LANES) {
                const f32x16 x = load(twice + at) * scale * load(weight + at);
                store(twice + at, x);
                store(twice + head_dim + at, x);
            }
        }
        for (int64_t at = 0; at < head_dim; at += LANES) {
            store(head + at, load(twice + at) * load(cos + at) + load(twice + at + head_dim / 2) * load(sin + at));
        }
    }
};

// A key into its page: every word of it lies sixteen words from the next.
template <class T>
inline void put_key(T* keys, int64_t key, const T* from, int64_t head_dim) {
    T* to = keys + key * PER_WORD<T>;
    for (int64_t at = 0; at < head_dim; at += PER_WORD<T>) std::memcpy(to + at * PAGE_KEYS, from + at, 4);
}

// A value into its page.
inline void put_value(float* values, int64_t key, const float* from, int64_t head_dim) {
    std::memcpy(values + key * head_dim, from, head_dim * sizeof(float));
}

// The same, in the lower or the upper halves of words whose other halves are those of the token beside it.
inline void put_value(bf16* values, int64_t key, const bf16* from, int64_t head_dim) {
    bf16* to = values + key / 2 * 2 * head_dim;
    const uint32_t kept = key % 2 == 0 ? 0xffff0000u : 0xffffu;
    for (int64_t at = 0; at < head_dim; at += LANES) {
        u16x16 halves;
        std::memcpy(&halves, from + at, 32);
        const u32x16 wide = __builtin_convertvector(halves, u32x16);
        const u32x16 words = (load_words<u32x16>(to + at * 2) & kept) | (key % 2 == 0 ? wide : wide << 16);
        std::memcpy(to + at * 2, &words, 64);
    }
}

template <class T>
void rotate_and_write(T* qkv, const T* cos_sin, const T* query_weight, const T* key_weight, float eps, T* data,
                      const int64_t* slots, int64_t tokens, int64_t query_heads, int64_t kv_heads, int64_t head_dim,
                      int64_t block_pages) {
    const Cache<T> cache{data, kv_heads, head_dim, block_pages};
    const int64_t row_size = (query_heads + 2 * kv_heads) * head_dim;
    // Tokens whose values share words are one thread's.
    const auto continues = [&](int64_t token) {
        return 0 < token && token < tokens && slots[token] % PER_WORD<T> != 0 && slots[token] == slots[token - 1] + 1;
    };
    parallel_for(tokens, TOKENS_GRAIN, [&](int64_t begin, int64_t end) {
        begin += continues(begin), end += continues(end);
        Rotation rotation;
        rotation.head_dim = head_dim, rotation.eps = eps;
        for (int64_t token = begin; token < end; token++) {
            rotation.set(cos_sin + token * 2 * head_dim);
            T* head = qkv + token * row_size;
            for (int64_t h = 0; h < query_heads; h++, head += head_dim) rotation.turn(head, query_weight);
            const int64_t page = slots[token] / PAGE_KEYS, key = slots[token] % PAGE_KEYS;
            for (int64_t h = 0; h < kv_heads; h++, head += head_dim) {
                T* keys = cache.page(page / block_pages, h, page % block_pages);
                rotation.turn(head, key_weight);
                put_key(keys, key, head, head_dim);
                put_value(keys + cache.values_offset(), key, head + kv_heads * head_dim, head_dim);
            }
        }
    });
}

}  // namespace

// qkv [tokens][(query_heads + 2 * kv_heads) * head_dim], whose queries and keys are turned in place; cos_sin
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
