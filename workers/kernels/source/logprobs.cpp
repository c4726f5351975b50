// Log-probabilities of one token a row and of the row's best tokens, as workers/logprobs.py defines them.
#include "parallel.h"
#include "row.h"

#include <algorithm>

namespace {

constexpr int64_t ROWS_GRAIN = 2;  // a row takes 20 to 100 microseconds

template <class T>
void logprobs(const T* logits, int64_t stride, const int64_t* picked, int64_t rows, int64_t vocab_size,
              const int64_t* token_ids, int64_t num_top, float* logprobs, int64_t* top_ids, float* top_logprobs) {
    parallel_for(rows, ROWS_GRAIN, [&](int64_t begin, int64_t end) {
        static thread_local Row row;
        std::vector<Place> top;
        for (int64_t at = begin; at < end; at++) {
            row.read(logits + picked[at] * stride, vocab_size);
            const double total = row.finite ? row.best.value + std::log(row.weight(NO_LIMIT)) : NAN;
            const int64_t id = token_ids[at];
            logprobs[at] = id >= 0 && id < vocab_size ? static_cast<float>(row[id] - total) : NAN;
            if (row.finite && num_top > 0) {
                top = row.top(num_top);
                std::sort(top.begin(), top.end(), before);
            } else {
                top.assign(num_top, {NAN, 0});
            }
            for (int64_t i = 0; i < num_top; i++) {
                top_ids[at * num_top + i] = top[i].id;
                top_logprobs[at * num_top + i] = static_cast<float>(top[i].value - total);
            }
        }
    });
}

}  // namespace

// logits [any, stride], of which vocab_size are a row's; picked [rows], which of them; token_ids [rows] -> logprobs
// [rows], top_ids and top_logprobs [rows, num_top]. NaN where a row holds no distribution.
#define LOGPROBS(T, name)                                                                                              \
    extern "C" void name(const T* logits, int64_t stride, const int64_t* picked, int64_t rows, int64_t vocab_size,     \
                         const int64_t* token_ids, int64_t num_top, float* token_logprobs, int64_t* top_ids,           \
                         float* top_logprobs) {                                                                        \
        logprobs(logits, stride, picked, rows, vocab_size, token_ids, num_top, token_logprobs, top_ids, top_logprobs); \
    }
LOGPROBS(float, logprobs_f32)
LOGPROBS(bf16, logprobs_bf16)
