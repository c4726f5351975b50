// Sums and gathers over the ranks of one node, through memory that all of them map.
//
// A call goes in pieces of one slot. For each, a rank writes its values into its slot, adds itself to `arrivals`,
// waits until all have done so, and reads everybody's slots. Every rank has two slots and takes them in turn: it
// comes back to the first only after all have arrived at the piece in between, hence have read the first. So one
// meeting a piece is enough.
#include "parallel.h"
#include "simd.h"
#include "spin.h"

#include <atomic>
#include <cerrno>

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr int MAX_RANKS = 64;  // bits of `missing`
constexpr int64_t GRAIN = 1 << 15;
constexpr int64_t NAP_NS = 50'000'000;  // between two looks for ranks that have ended

// What one rank tells the others, on a cache line of its own.
struct alignas(64) Arrival {
    std::atomic<uint64_t> pieces;     // it has arrived at
    std::atomic<int64_t> entered[2];  // when it entered a call, by the turn of the call's first piece
};

// All zero at first. The slots follow: two a rank.
struct Segment {
    alignas(64) std::atomic<uint64_t> arrivals;  // of all ranks at all pieces; sleepers wait on its low half
    alignas(64) std::atomic<uint32_t> sleepers;
    std::atomic<uint64_t> missing;  // bit r: the group has given up because of rank r
    Arrival ranks[MAX_RANKS];
};

static_assert(std::atomic<uint64_t>::is_always_lock_free && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

// One rank's own notes; `_Rank` in workers/shared_memory.py has the same fields.
struct Rank {
    Segment* segment;
    int64_t rank, size;
    int64_t slot_bytes;
    int64_t yield_ns, deadline_ns;   // since the wait began: until it sleeps, and until it gives up
    int64_t waiting_ns, working_ns;  // totals: for the last rank to enter, and the rest
    int64_t calls;
    uint64_t pieces;
    uint64_t missing;
    int32_t processes[MAX_RANKS];  // a descriptor that is readable once the process has ended; -1 where there is none

    char* slot(int64_t of_rank) const {
        return reinterpret_cast<char*>(segment + 1) + (2 * of_rank + static_cast<int64_t>(pieces % 2)) * slot_bytes;
    }
};
static_assert(sizeof(Rank) == 11 * 8 + MAX_RANKS * 4);

long futex(std::atomic<uint64_t>& word, int operation, uint32_t value, const timespec* timeout) {
    return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, timeout, nullptr, 0);
}

uint64_t ended_ranks(const Rank& self) {
    pollfd polled[MAX_RANKS];
    for (int64_t r = 0; r < self.size; r++) polled[r] = {self.processes[r], POLLIN, 0};
    uint64_t ended = 0;
    if (poll(polled, static_cast<nfds_t>(self.size), 0) > 0) {
        for (int64_t r = 0; r < self.size; r++) ended |= uint64_t{polled[r].revents != 0} << r;
    }
    return ended;
}

// Ranks that have not arrived at the current piece.
uint64_t late_ranks(const Rank& self) {
    uint64_t late = 0;
    for (int64_t r = 0; r < self.size; r++) late |= uint64_t{self.segment->ranks[r].pieces < self.pieces} << r;
    return late;
}

// Wait without a processor; true once all have arrived, false when the group gives up.
bool sleep_until(Rank& self, uint64_t target, int64_t deadline) {
    Segment& segment = *self.segment;
    while (true) {
        // The last to arrive looks for sleepers after it has counted itself; a sleeper counts itself before it looks.
        segment.sleepers.fetch_add(1);
        const uint64_t seen = segment.arrivals.load();
        if (seen < target && segment.missing == 0) {
            const timespec nap = {0, NAP_NS};
            futex(segment.arrivals, FUTEX_WAIT, static_cast<uint32_t>(seen), &nap);
        }
        segment.sleepers.fetch_sub(1);
        if (segment.arrivals.load(std::memory_order_acquire) >= target) return true;
        if (segment.missing != 0) return false;
        uint64_t gone = ended_ranks(self);
        gone &= late_ranks(self);  // in this order: a rank may arrive and then end
        if (gone == 0 && now_ns() >= deadline) gone = late_ranks(self);
        uint64_t nobody = 0;
        if (gone != 0) segment.missing.compare_exchange_strong(nobody, gone);  // the first to give up says why
    }
}

// Arrive at the current piece and wait for the others.
bool meet(Rank& self) {
    Segment& segment = *self.segment;
    const uint64_t target = self.pieces * static_cast<uint64_t>(self.size);
    segment.ranks[self.rank].pieces.store(self.pieces, std::memory_order_release);
    if (segment.arrivals.fetch_add(1) + 1 == target) {
        if (segment.sleepers.load() != 0) futex(segment.arrivals, FUTEX_WAKE, INT32_MAX, nullptr);
        return true;
    }
    const int64_t began = now_ns();
    while (now_ns() - began < self.yield_ns) {
        for (int turn = 0; turn < 16; turn++) {
            if (segment.arrivals.load(std::memory_order_acquire) >= target) return true;
            pause_briefly();
        }
        sched_yield();  // the rank that is waited for may need this core
    }
    return sleep_until(self, target, began + self.deadline_ns);
}

// Calls write(slot, from, count) and, after all have written, read(from, count), for pieces of items of `item` bytes.
template <class Write, class Read>
int in_pieces(Rank& self, int64_t count, int64_t item, const Write& write, const Read& read) {
    Segment& segment = *self.segment;
    const int64_t entered = now_ns();
    const uint64_t turn = (self.pieces + 1) % 2;
    segment.ranks[self.rank].entered[turn].store(entered, std::memory_order_relaxed);
    int64_t last_entered = entered;
    const int64_t most = self.slot_bytes / item;
    for (int64_t from = 0; from < count; from += most) {
        const int64_t some = count - from < most ? count - from : most;
        self.pieces++;
        write(self.slot(self.rank), from, some);
        if (segment.missing != 0 || !meet(self)) {
            self.missing = segment.missing;
            return 1;
        }
        if (from == 0) {
            for (int64_t r = 0; r < self.size; r++) {
                const int64_t other = segment.ranks[r].entered[turn].load(std::memory_order_relaxed);
                if (other > last_entered) last_entered = other;
            }
        }
        read(from, some);
    }
    self.calls++;
    self.waiting_ns += last_entered - entered;
    self.working_ns += now_ns() - last_entered;
    return 0;
}

// out [count] = the sum of the parts in their order, in float32, rounded once. One of the parts may be out.
template <class T>
void add(const T* const* parts, int64_t num_parts, T* out, int64_t begin, int64_t end) {
    constexpr int UNROLLED = 4;
    int64_t at = begin;
    for (; at + UNROLLED * LANES <= end; at += UNROLLED * LANES) {
        f32x16 total[UNROLLED];
        for (int i = 0; i < UNROLLED; i++) total[i] = load(parts[0] + at + i * LANES);
        for (int64_t part = 1; part < num_parts; part++) {
            for (int i = 0; i < UNROLLED; i++) total[i] += load(parts[part] + at + i * LANES);
        }
        for (int i = 0; i < UNROLLED; i++) store(out + at + i * LANES, total[i]);
    }
    for (; at < end; at++) {
        float total = to_float(parts[0][at]);
        for (int64_t part = 1; part < num_parts; part++) total += to_float(parts[part][at]);
        store_one(out + at, total);
    }
}

template <class T>
int all_reduce(Rank* self, T* values, int64_t count) {
    return in_pieces(
        *self, count, sizeof(T),
        [&](char* slot, int64_t from, int64_t some) {
            parallel_for(some, GRAIN, [&](int64_t begin, int64_t end) {
                std::memcpy(reinterpret_cast<T*>(slot) + begin, values + from + begin, (end - begin) * sizeof(T));
            });
        },
        [&](int64_t from, int64_t some) {
            const T* parts[MAX_RANKS];
            for (int64_t r = 0; r < self->size; r++) parts[r] = reinterpret_cast<const T*>(self->slot(r));
            parts[self->rank] = values + from;
            parallel_for(some, GRAIN, [&](int64_t begin, int64_t end) {
                add(parts, self->size, values + from, begin, end);
            });
        });
}

}  // namespace

// For Python, which lays it out as well.
extern "C" int rank_bytes() { return sizeof(Rank); }

extern "C" int segment_header_bytes() { return sizeof(Segment); }

// A descriptor of `bytes` of zeros that have no name and live as long as somebody has them open or mapped; -errno
// when there is no room for them.
extern "C" int new_segment(int64_t bytes) {
    const int file = memfd_create("chunkserve", MFD_CLOEXEC);
    if (file < 0) return -errno;
    // Taken now: a page that is missing later is a SIGBUS.
    const int error = ftruncate(file, bytes) == 0 ? posix_fallocate(file, 0, bytes) : errno;
    if (error == 0) return file;
    close(file);
    return -error;
}

// A descriptor that is readable once the process has ended, or -errno.
extern "C" int watch_process(int process) {
    const long watched = syscall(SYS_pidfd_open, process, 0);
    return watched < 0 ? -errno : static_cast<int>(watched);
}

// values [count] = their sum over the ranks. 0, or 1 when the group has given up, with `missing` saying whose fault.
extern "C" int all_reduce_f32(Rank* self, float* values, int64_t count) { return all_reduce(self, values, count); }

extern "C" int all_reduce_bf16(Rank* self, bf16* values, int64_t count) { return all_reduce(self, values, count); }

// out [size, bytes] = every rank's values [bytes]. Returns as `all_reduce` does.
extern "C" int all_gather(Rank* self, const char* values, char* out, int64_t bytes) {
    return in_pieces(
        *self, bytes, 1,
        [&](char* slot, int64_t from, int64_t some) { std::memcpy(slot, values + from, some); },
        [&](int64_t from, int64_t some) {
            for (int64_t r = 0; r < self->size; r++) std::memcpy(out + r * bytes + from, self->slot(r), some);
        });
}
