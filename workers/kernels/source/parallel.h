// Threads for the kernels: the OpenMP runtime that torch has loaded already, with a count of our own.
#pragma once

#include <cstdint>

#include <omp.h>

// Set once by `set_num_threads`, before any kernel runs.
extern int num_threads;

// Calls body(begin, end) over 0..count, in one piece where there is not `grain` for every thread: to wake a thread
// costs microseconds.
template <class Body>
inline void parallel_for(int64_t count, int64_t grain, const Body& body) {
    if (num_threads == 1 || count < grain * num_threads) {
        if (count > 0) body(int64_t{0}, count);
        return;
    }
#pragma omp parallel num_threads(num_threads)
    {
        const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
        const int64_t begin = count * thread / threads, end = count * (thread + 1) / threads;
        if (begin < end) body(begin, end);
    }
}
