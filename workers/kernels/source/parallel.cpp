// A pool of threads that spin between loops that follow each other closely, and else sleep.
//
// Whoever waits spins first: the next loop of a step comes within microseconds. Then it sleeps in the kernel, so that
// nothing spins when there is no work, and so that a thread that another process has driven off its processor can go
// on where the sleeper was.
#include "parallel.h"
#include "spin.h"

#include <atomic>
#include <climits>
#include <mutex>
#include <system_error>
#include <thread>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

int num_threads = 1;

namespace {

constexpr int64_t SPIN_NS = 100'000;       // for the next loop: longer than what lies between two of a step
constexpr int64_t STRAGGLER_NS = 20'000;   // for the last piece of a loop: its thread may have lost its processor

// A number that threads wait for to change. Whoever changes it makes a system call only where somebody sleeps.
class Signal {
  public:
    uint32_t value() const { return value_.load(std::memory_order_acquire); }

    void add(uint32_t step) {
        value_.fetch_add(step);
        if (sleepers_.load() != 0) call(FUTEX_WAKE_PRIVATE, INT_MAX);
    }

    void set(uint32_t value) { value_.store(value, std::memory_order_relaxed); }

    // Returns once the value is not `seen`.
    void wait_while(uint32_t seen, int64_t spin_ns) {
        for (const int64_t began = now_ns(); now_ns() - began < spin_ns;) {
            for (int turn = 0; turn < 32; turn++) {
                if (value() != seen) return;
                pause_briefly();
            }
        }
        // Counted before the value is looked at again: whoever changes it after that sees the sleeper.
        sleepers_.fetch_add(1);
        while (value_.load() == seen) call(FUTEX_WAIT_PRIVATE, seen);
        sleepers_.fetch_sub(1);
    }

  private:
    void call(int operation, uint32_t value) {
        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&value_), operation, value, nullptr, nullptr, 0);
    }

    alignas(64) std::atomic<uint32_t> value_{0};
    alignas(64) std::atomic<uint32_t> sleepers_{0};
};

class Pool {
  public:
    // Starts helpers, as many as the system allows; how many. They end with the process, and the pool is never freed:
    // it outlives whatever runs at exit.
    int start(int helpers) {
        for (int started = 0; started < helpers; started++) {
            try {
                std::thread([this] { help(); }).detach();
            } catch (const std::system_error&) {
                return started;
            }
        }
        return helpers;
    }

    void run(uint32_t pieces, void (*body)(const void*, int64_t), const void* context) {
        std::unique_lock<std::mutex> only_one(in_use_, std::try_to_lock);
        if (!only_one.owns_lock()) {
            for (uint32_t piece = 0; piece < pieces; piece++) body(context, piece);
            return;
        }
        body_ = body, context_ = context;
        done_.set(0);
        claims_.store(uint64_t{pieces} << 32, std::memory_order_release);
        loop_.add(1);
        work();
        // Only for pieces that others have begun: whoever has not come yet is not waited for.
        for (uint32_t done; (done = done_.value()) != pieces;) done_.wait_while(done, STRAGGLER_NS);
    }

  private:
    [[noreturn]] void help() {
        for (uint32_t seen = 0;;) {
            loop_.wait_while(seen, SPIN_NS);
            seen = loop_.value();
            work();
        }
    }

    // Takes pieces until none are left. Who has taken one may read what belongs to its loop: `run` waits for it.
    void work() {
        uint32_t mine = 0;
        while (true) {
            const uint64_t claim = claims_.fetch_add(1, std::memory_order_acq_rel);
            const uint32_t piece = static_cast<uint32_t>(claim), pieces = static_cast<uint32_t>(claim >> 32);
            if (piece >= pieces) break;
            body_(context_, piece);
            mine++;
        }
        if (mine != 0) done_.add(mine);
    }

    Signal loop_, done_;  // loops begun; pieces done of the last one
    alignas(64) std::atomic<uint64_t> claims_{0};  // upper half: pieces of the last loop; lower: those begun, or more
    void (*body_)(const void*, int64_t);
    const void* context_;
    std::mutex in_use_;
};

Pool* pool = nullptr;

}  // namespace

void run_pieces(int64_t pieces, void (*body)(const void*, int64_t), const void* context) {
    if (num_threads > 1 && pieces > 1) {
        pool->run(static_cast<uint32_t>(pieces), body, context);
    } else {
        for (int64_t piece = 0; piece < pieces; piece++) body(context, piece);
    }
}

// Call it while no kernel runs. Returns how many there are: fewer where the system gives no more.
extern "C" int set_num_threads(int count) {
    if (count != num_threads && count >= 1) {
        // A pool that is left sleeps for ever.
        pool = new Pool;
        num_threads = 1 + pool->start(count - 1);
    }
    return num_threads;
}
