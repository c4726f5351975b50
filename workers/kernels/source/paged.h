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

inline u32x16 load_words(const void* from) {
    u32x16 words;
    std::memcpy(&words, from, 64);
    return words;
}

inline uint32_t load_word(const void* from) {
    uint32_t word;
    std::memcpy(&word, from, 4);
    return word;
}

inline u32x16 spread(uint32_t word) { return u32x16{} + word; }

// acc + a * b of each lane's word, over the values in it.
template <class T>
inline f32x16 multiply_words(f32x16 acc, u32x16 a, u32x16 b);

template <>
inline f32x16 multiply_words<float>(f32x16 acc, u32x16 a, u32x16 b) {
    return acc + (f32x16)a * (f32x16)b;
}

template <>
inline f32x16 multiply_words<bf16>(f32x16 acc, u32x16 a, u32x16 b) {
#if defined(__AVX512BF16__)
    return (f32x16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
    acc += (f32x16)(a << 16) * (f32x16)(b << 16);
    return acc + (f32x16)(a & 0xffff0000u) * (f32x16)(b & 0xffff0000u);
#endif
}
