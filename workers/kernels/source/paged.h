// How a paged cache lies in memory: shared by what writes it and what reads it.
//
// A page is 16 keys of one head with their values. Both are made of words of 32 bits: one float, or the two bfloat16
// that one instruction multiplies.
//   keys    [head_dim / P][16 keys][P], P being the values of a word: sixteen keys meet one word of a query at a time
//   values  [16 keys / P][head_dim][P]: sixteen dimensions meet one word of a row's weights at a time
// A cache is [blocks][kv_heads][pages of a block][2][16 * head_dim], keys before values.
#pragma once

#include "simd.h"

constexpr int64_t PAGE_KEYS = 16;
constexpr int64_t MAX_HEAD_DIM = 256;  // that kernels have room for

// Values of type T in a word.
template <class T>
constexpr int64_t PER_WORD = 4 / sizeof(T);

template <class T>
struct Cache {
    T* data;
    int64_t kv_heads, head_dim, block_pages;

    // The keys of a page; its values follow after `values_offset()`.
    T* page(int64_t block, int64_t head, int64_t index) const {
        return data + ((block * kv_heads + head) * block_pages + index) * 2 * values_offset();
    }

    int64_t values_offset() const { return PAGE_KEYS * head_dim; }
};

template <class Words>
inline Words load_words(const void* from) {
    Words words;
    std::memcpy(&words, from, sizeof words);
    return words;
}

inline uint32_t load_word(const void* from) {
    uint32_t word;
    std::memcpy(&word, from, 4);
    return word;
}

template <class Words>
inline Words spread(uint32_t word) {
    return Words{} + word;
}

// acc + a * b of each lane's word, over the values in it.
template <class T>
inline f32v multiply_words(f32v acc, u32v a, u32v b);

template <>
inline f32v multiply_words<float>(f32v acc, u32v a, u32v b) {
    return acc + (f32v)a * (f32v)b;
}

template <>
inline f32v multiply_words<bf16>(f32v acc, u32v a, u32v b) {
#if defined(__AVX512BF16__)
    return (f32v)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
    acc += (f32v)(a << 16) * (f32v)(b << 16);
    return acc + (f32v)(a & 0xffff0000u) * (f32v)(b & 0xffff0000u);
#endif
}
