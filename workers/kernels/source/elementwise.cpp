// What lies between the products of a layer, one pass over memory each.
#include "parallel.h"
#include "simd.h"

#include <cmath>

namespace {

constexpr int64_t ROWS_GRAIN = 4;

// Calls body(offset, count) for whole vectors, and once more for what is left.
template <class Body>
inline void over_row(int64_t size, const Body& body) {
    int64_t at = 0;
    for (; at + LANES <= size; at += LANES) body(at, int64_t{LANES});
    if (at < size) body(at, size - at);
}

// residual [rows, size] += delta, unless that is null, rounded to T; out = residual / rms(residual) * weight.
template <class T>
void add_rms_norm(T* residual, const T* delta, const T* weight, T* out, int64_t rows, int64_t size, float eps) {
    parallel_for(rows, ROWS_GRAIN, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            T* r = residual + row * size;
            f32x16 squares = {};
            over_row(size, [&](int64_t at, int64_t count) {
                f32x16 x = load_some(r + at, count);
                if (delta != nullptr) {
                    store_some(r + at, x + load_some(delta + row * size + at, count), count);
                    x = load_some(r + at, count);
                }
                squares += x * x;
            });
            const float scale = 1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + eps);
            over_row(size, [&](int64_t at, int64_t count) {
                const f32x16 normed = load_some(r + at, count) * scale;
                store_some(out + row * size + at, normed * load_some(weight + at, count), count);
            });
        }
    });
}

// gate_up [rows, 2 * size], gate first -> out [rows, size] = silu(gate) * up.
template <class T>
void silu_and_mul(const T* gate_up, T* out, int64_t rows, int64_t size) {
    parallel_for(rows, ROWS_GRAIN, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            const T* gate = gate_up + row * 2 * size;
            over_row(size, [&](int64_t at, int64_t count) {
                const f32x16 activated = silu(load_some(gate + at, count));
                store_some(out + row * size + at, activated * load_some(gate + size + at, count), count);
            });
        }
    });
}

}  // namespace

extern "C" void add_rms_norm_f32(float* residual, const float* delta, const float* weight, float* out, int64_t rows,
                                 int64_t size, float eps) {
    add_rms_norm(residual, delta, weight, out, rows, size, eps);
}

extern "C" void add_rms_norm_bf16(bf16* residual, const bf16* delta, const bf16* weight, bf16* out, int64_t rows,
                                  int64_t size, float eps) {
    add_rms_norm(residual, delta, weight, out, rows, size, eps);
}

extern "C" void silu_and_mul_f32(const float* gate_up, float* out, int64_t rows, int64_t size) {
    silu_and_mul(gate_up, out, rows, size);
}

extern "C" void silu_and_mul_bf16(const bf16* gate_up, bf16* out, int64_t rows, int64_t size) {
    silu_and_mul(gate_up, out, rows, size);
}
