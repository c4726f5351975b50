// Threads for the kernels. They are our own and not OpenMP's: a model's step is some hundred short loops, between
// which no thread must fall asleep, and it shares its processors with processes that wake up all the time.
#pragma once

#include <algorithm>
#include <cstdint>

// Said by `set_num_threads`, while no kernel runs.
extern int num_threads;

// Calls body(context, piece) once for each of 0..pieces, on whichever threads come to it, and returns when all are
// done. Pieces are begun in their order. A call from a second thread of the process, while one runs, runs on that
// thread alone. A body must not throw, nor begin another loop.
void run_pieces(int64_t pieces, void (*body)(const void*, int64_t), const void* context);

// The same for anything that can be called.
template <class Body>
inline void parallel_pieces(int64_t pieces, const Body& body) {
    run_pieces(
        pieces, [](const void* context, int64_t piece) { (*static_cast<const Body*>(context))(piece); }, &body);
}

// Calls body(begin, end) for pieces that make up 0..count, in one piece where there is not `grain` for every thread:
// to share work costs microseconds. There are more pieces than threads, so that a thread that loses its processor
// holds up a piece and not its whole share.
template <class Body>
inline void parallel_for(int64_t count, int64_t grain, const Body& body) {
    constexpr int64_t PIECES = 4;  // a thread
    if (num_threads == 1 || count < grain * num_threads) {
        if (count > 0) body(int64_t{0}, count);
        return;
    }
    const int64_t pieces = std::min(count / std::max<int64_t>(grain, 1), PIECES * num_threads);
    parallel_pieces(pieces, [&](int64_t piece) { body(count * piece / pieces, count * (piece + 1) / pieces); });
}
