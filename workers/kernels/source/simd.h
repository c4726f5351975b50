// Sixteen floats at a time, in the compiler's own vector types: whatever the processor has, they are lowered to it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

using f32x16 = float __attribute__((vector_size(64)));
using i32x16 = int32_t __attribute__((vector_size(64)));
using u32x16 = uint32_t __attribute__((vector_size(64)));
using u16x16 = uint16_t __attribute__((vector_size(32)));

constexpr int LANES = 16;

// Floats of one of the processor's own registers, and how many registers there are: for loops that keep their sums in
// them. Wider types than these would live in memory.
#if defined(__AVX512F__)
constexpr int VECTOR = 16, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int VECTOR = 8, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int VECTOR = 4, REGISTERS = 32;
#else
constexpr int VECTOR = 4, REGISTERS = 16;
#endif
using f32v = float __attribute__((vector_size(VECTOR * 4)));
using u32v = uint32_t __attribute__((vector_size(VECTOR * 4)));

// Sums that a loop keeps in registers are cleared and stored one by one: an array that is set or copied whole lives in
// memory.
template <int ROWS, int VECTORS>
inline void clear(f32v (&sums)[ROWS][VECTORS]) {
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++) {
#pragma GCC unroll 16
        for (int v = 0; v < VECTORS; v++) sums[row][v] = f32v{};
    }
}

template <int VECTORS>
inline void store_vectors(float* to, const f32v (&sums)[VECTORS]) {
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS; v++) std::memcpy(to + v * VECTOR, &sums[v], sizeof sums[v]);
}

// The bits of a bfloat16: the upper half of a float.
struct bf16 {
    uint16_t bits;
};

inline float to_float(float x) { return x; }

inline float to_float(bf16 x) {
    const uint32_t bits = uint32_t{x.bits} << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline f32x16 load(const float* from) {
    f32x16 value;
    std::memcpy(&value, from, 64);
    return value;
}

inline f32x16 load(const bf16* from) {
    u16x16 bits;
    std::memcpy(&bits, from, 32);
    return (f32x16)(__builtin_convertvector(bits, u32x16) << 16);
}

inline void store(float* to, f32x16 value) { std::memcpy(to, &value, 64); }

// To the nearest, ties to even. A NaN stays one.
inline void store(bf16* to, f32x16 value) {
#if defined(__AVX512BF16__)
    const __m256bh rounded = _mm512_cvtneps_pbh((__m512)value);
    std::memcpy(to, &rounded, 32);
#else
    const u32x16 bits = (u32x16)value;
    const u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const u32x16 quiet = (bits >> 16) | 0x40;
    const u16x16 narrow = __builtin_convertvector(value == value ? rounded : quiet, u16x16);
    std::memcpy(to, &narrow, 32);
#endif
}

inline bf16 to_bf16(float x) {
    f32x16 value = {x};
    bf16 narrow[LANES];
    store(narrow, value);
    return narrow[0];
}

inline void store_one(float* to, float value) { *to = value; }
inline void store_one(bf16* to, float value) { *to = to_bf16(value); }

// The first `count` lanes, where fewer than all are there, and zeros behind them. Nothing for a count below 1.
template <class T>
inline f32x16 load_some(const T* from, int64_t count) {
    if (count >= LANES) return load(from);
    T padded[LANES] = {};
    std::copy_n(from, std::max<int64_t>(count, 0), padded);
    return load(padded);
}

// Where there is no room for all lanes, the first `count`.
template <class T>
inline void store_some(T* to, f32x16 value, int64_t count) {
    if (count >= LANES) {
        store(to, value);
        return;
    }
    T narrow[LANES];
    store(narrow, value);
    std::copy_n(narrow, std::max<int64_t>(count, 0), to);
}

// What follows is for vectors of any width.

template <class V>
inline V load_vector(const float* from) {
    V value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <class V>
inline float sum(V x) {
#if defined(__AVX512F__)
    if constexpr (sizeof(V) == 64) return _mm512_reduce_add_ps((__m512)x);
#endif
    float total = 0;
    for (unsigned lane = 0; lane < sizeof(V) / 4; lane++) total += x[lane];
    return total;
}

template <class V>
inline float largest(V x) {
#if defined(__AVX512F__)
    if constexpr (sizeof(V) == 64) return _mm512_reduce_max_ps((__m512)x);
#endif
    float most = x[0];
    for (unsigned lane = 1; lane < sizeof(V) / 4; lane++) most = x[lane] > most ? x[lane] : most;
    return most;
}

// The larger of both; b where either is not a number.
template <class V>
inline V maximum(V a, V b) {
#if defined(__AVX512F__)
    if constexpr (sizeof(V) == 64) return (V)_mm512_max_ps((__m512)a, (__m512)b);
#endif
    return a > b ? a : b;
}

// e^x to about 2 units in the last place; 0 below -87, as for -inf; e^88 above 88, as for inf. A NaN stays one.
// Argument reduction by powers of two and a polynomial for 2^f with f in [-0.5, 0.5] (Taylor coefficients of exp in
// f * ln 2).
template <class V>
inline V exp(V x) {
    using Ints = decltype(x > x);
    const V zero = {};
    const V low = zero - 87.0f, high = zero + 88.0f;
    const V clamped = x > low ? (x < high ? x : high) : low;
    const V scaled = clamped * 1.44269504088896341f;
    const V magic = zero + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const V shifted = scaled + magic;
    const V whole = shifted - magic;
    const V rest = (clamped - whole * 0.693359375f) - whole * -2.12194440e-4f;  // ln 2 in two parts
    V p = zero + 1.3981999507e-3f;
    p = p * rest + 8.3334519073e-3f;
    p = p * rest + 4.1665795894e-2f;
    p = p * rest + 1.6666665459e-1f;
    p = p * rest + 5.0000001201e-1f;
    p = p * rest * rest + rest + 1.0f;
    const Ints exponent = ((Ints)shifted - (Ints)magic + 127) << 23;
    const V result = p * (V)exponent;
    return x > low ? result : (x == x ? zero : x);
}

// 2^x to about 1 unit in the last place; 0 below -126, as for -inf, infinity from 128 on. Smaller numbers are not
// made on the way either: some processors take a hundred times as long over them.
template <class V>
inline V exp2(V x) {
    using Ints = decltype(x > x);
    const V zero = {}, smallest = zero - 126.0f;
    const V clamped = maximum(smallest, x);  // -inf would leave no fraction behind. A NaN passes.
    V whole;
#if defined(__AVX512F__)
    if constexpr (sizeof(V) == 64) {
        whole = (V)_mm512_roundscale_ps((__m512)clamped, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    } else
#endif
    {
        const V magic = zero + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
        whole = (clamped + magic) - magic;
    }
    const V rest = clamped - whole;  // in [-0.5, 0.5]
    V p = zero + 1.32647273e-3f;
    p = p * rest + 9.67151299e-3f;
    p = p * rest + 5.55073358e-2f;
    p = p * rest + 2.40222424e-1f;
    p = p * rest + 6.93147004e-1f;
    p = p * rest + 1.0f;
#if defined(__AVX512F__)
    if constexpr (sizeof(V) == 64) {
        const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, (__m512)smallest, _CMP_NLT_UQ);
        return (V)_mm512_maskz_scalef_ps(normal, (__m512)p, (__m512)whole);
    }
#endif
    const Ints exponent = (__builtin_convertvector(whole, Ints) + 127) << 23;
    return x < smallest ? zero : whole > 127.0f ? zero + __builtin_inff() : p * (V)exponent;
}

// x / (1 + e^-x)
template <class V>
inline V silu(V x) {
    return x / (exp(-x) + 1.0f);
}
