// The largest value of each row and the first column where it stands; a NaN is larger than any number, as in torch.
#include "parallel.h"
#include "row.h"

namespace {

constexpr int64_t ROWS_GRAIN = 8;  // a row of a vocabulary takes a few microseconds

// Behind the row's end is -inf.
template <class T>
inline f32x16 load_within(const T* row, int64_t column, int64_t size) {
    if (column + LANES <= size) return load(row + column);
    f32x16 values = f32x16{} + NO_LIMIT.value;
    for (int64_t lane = 0; column + lane < size; lane++) values[lane] = to_float(row[column + lane]);
    return values;
}

template <class T>
void argmax(const T* values, int64_t stride, int64_t rows, int64_t size, T* largest_values, int64_t* columns) {
    parallel_for(rows, ROWS_GRAIN, [&](int64_t begin, int64_t end) {
        for (int64_t at = begin; at < end; at++) {
            const T* row = values + at * stride;
            f32x16 most = load_within(row, 0, size);
            i32x16 unordered = {};
            for (int64_t column = 0; column < size; column += LANES) {
                const f32x16 x = load_within(row, column, size);
                most = maximum(most, x);
                unordered |= x != x;
            }
            const bool is_nan = bits_of(unordered) != 0;
            const float best = is_nan ? NAN : largest(most);
            for (int64_t column = 0; column < size; column += LANES) {
                const f32x16 x = load_within(row, column, size);
                if (const uint32_t found = bits_of(is_nan ? x != x : x == best)) {
                    store_one(largest_values + at, best);
                    columns[at] = column + __builtin_ctz(found);
                    break;
                }
            }
        }
    });
}

}  // namespace

// values [rows, stride], of which `size` are a row's -> largest_values and columns [rows].
extern "C" void argmax_f32(const float* values, int64_t stride, int64_t rows, int64_t size, float* largest_values,
                           int64_t* columns) {
    argmax(values, stride, rows, size, largest_values, columns);
}

extern "C" void argmax_bf16(const bf16* values, int64_t stride, int64_t rows, int64_t size, bf16* largest_values,
                            int64_t* columns) {
    argmax(values, stride, rows, size, largest_values, columns);
}
