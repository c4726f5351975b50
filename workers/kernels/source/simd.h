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

inline float sum(f32x16 x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    float total = 0;
    for (int lane = 0; lane < LANES; lane++) total += x[lane];
    return total;
#endif
}

inline float largest(f32x16 x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float most = x[0];
    for (int lane = 1; lane < LANES; lane++) most = x[lane] > most ? x[lane] : most;
    return most;
#endif
}

// The larger of both; b where either is not a number.
inline f32x16 maximum(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

// e^x to about 2 units in the last place; 0 below -87, as for -inf; e^88 above 88, as for inf. A NaN stays one.
// Argument reduction by powers of two and a polynomial for 2^f with f in [-0.5, 0.5] (Taylor coefficients of exp in
// f * ln 2).
inline f32x16 exp(f32x16 x) {
    const f32x16 zero = {};
    const f32x16 low = zero - 87.0f, high = zero + 88.0f;
    const f32x16 clamped = x > low ? (x < high ? x : high) : low;
    const f32x16 scaled = clamped * 1.44269504088896341f;
    const f32x16 magic = zero + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const f32x16 shifted = scaled + magic;
    const f32x16 whole = shifted - magic;
    const f32x16 rest = (clamped - whole * 0.693359375f) - whole * -2.12194440e-4f;  // ln 2 in two parts
    f32x16 p = zero + 1.3981999507e-3f;
    p = p * rest + 8.3334519073e-3f;
    p = p * rest + 4.1665795894e-2f;
    p = p * rest + 1.6666665459e-1f;
    p = p * rest + 5.0000001201e-1f;
    p = p * rest * rest + rest + 1.0f;
    const i32x16 exponent = ((i32x16)shifted - (i32x16)magic + 127) << 23;
    const f32x16 result = p * (f32x16)exponent;
    return x > low ? result : (x == x ? zero : x);
}

// 2^x to about 1 unit in the last place; 0 below -126, as for -inf, infinity from 128 on. Smaller numbers are not
// made on the way either: some processors take a hundred times as long over them.
inline f32x16 exp2(f32x16 x) {
    const f32x16 zero = {}, smallest = zero - 126.0f;
    const f32x16 clamped = maximum(smallest, x);  // -inf would leave no fraction behind. A NaN passes.
#if defined(__AVX512F__)
    const f32x16 whole = (f32x16)_mm512_roundscale_ps((__m512)clamped, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const f32x16 magic = zero + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const f32x16 whole = (clamped + magic) - magic;
#endif
    const f32x16 rest = clamped - whole;  // in [-0.5, 0.5]
    f32x16 p = zero + 1.32647273e-3f;
    p = p * rest + 9.67151299e-3f;
    p = p * rest + 5.55073358e-2f;
    p = p * rest + 2.40222424e-1f;
    p = p * rest + 6.93147004e-1f;
    p = p * rest + 1.0f;
#if defined(__AVX512F__)
    const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, (__m512)smallest, _CMP_NLT_UQ);
    return (f32x16)_mm512_maskz_scalef_ps(normal, (__m512)p, (__m512)whole);
#else
    const i32x16 exponent = (__builtin_convertvector(whole, i32x16) + 127) << 23;
    return x < smallest ? zero : whole > 127.0f ? zero + __builtin_inff() : p * (f32x16)exponent;
#endif
}

// x / (1 + e^-x)
inline f32x16 silu(f32x16 x) { return x / (exp(-x) + 1.0f); }
