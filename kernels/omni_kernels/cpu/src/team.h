// A team of threads that carries out one call together, and memory that outlives the call. No instruction set here.
#pragma once
#include <stdint.h>

#include <atomic>

#include "omni_cpu.h"

// Phases of a call are separated by `sync`; inside one, `next` deals out task numbers.
struct Team {
    struct Shared {
        int size;
        std::atomic<int> arrived{0};
        std::atomic<int> generation{0};
        std::atomic<int64_t> ticket[2];
        std::atomic<int> status{0};
        void* note = nullptr;  // what one member leaves for the others
        int agreed = 0;  // the status at the last barrier: the same for all members
    };
    Shared* shared;
    int rank;
    int phase = 0;

    int size() const { return shared->size; }
    void fail(int status) { shared->status.store(status, std::memory_order_relaxed); }
    // The next task number of this phase below `count`, or -1. With one thread: 0, 1, 2, ...
    int64_t next(int64_t count) {
        int64_t got = shared->ticket[phase & 1].fetch_add(1, std::memory_order_relaxed);
        return got < count ? got : -1;
    }
    bool sync();  // waits for all; false if one of them has failed
};

typedef void (*TeamBody)(Team& team, void* context);
int run_team(int threads, TeamBody body, void* context, void* note = nullptr);  // returns the status

// Says that the first `layers` layers' keys and values are in the cache, where somebody wants to know.
void tell_progress(const omni_step_args* args, int64_t layers);

// Memory of the calling thread, grown when needed and kept for the next call. Null when there is none left.
void* call_memory(int64_t bytes);
// Likewise, for what one member of a team needs for itself.
void* member_memory(int64_t bytes);

// Whether AMX is there, allowed by the system and not switched off.
bool amx_ready();
// Whether the CPU multiplies pairs of bfloat16 (AVX512_BF16), and that is not switched off.
bool pairs_ready();
// Whether the CPU multiplies quads of int8 (AVX512_VNNI), and that is not switched off.
bool vnni_ready();

// Deals pieces of one block of memory. First pass with base null counts the bytes.
struct Carver {
    char* base;
    int64_t used = 0;
    template <class T>
    T* take(int64_t count) {
        T* at = base ? reinterpret_cast<T*>(base + used) : nullptr;
        used += (count * int64_t(sizeof(T)) + 63) & ~int64_t(63);
        return at;
    }
};
