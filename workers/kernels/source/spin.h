// What a thread that waits for others in a loop needs.
#pragma once

#include <cstdint>
#include <ctime>

// Of a clock that all processes of a machine share and nobody sets.
inline int64_t now_ns() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

// Tells the processor that this is such a loop.
inline void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}
