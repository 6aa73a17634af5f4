// The C interface: picks the instruction set, runs teams, packs and copies. Compiled for the baseline.
#include "omni_cpu.h"

#include <omp.h>
#include <stdlib.h>
#include <string.h>

#include "table.h"
#include "team.h"
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#if defined(__linux__)
#include <sys/syscall.h>
#endif
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>
#endif

#ifndef OMNI_SOURCE_HASH
#define OMNI_SOURCE_HASH "unknown"
#endif

namespace {

// ---- memory ----
struct Block {
    void* data = nullptr;
    int64_t bytes = 0;
    ~Block() { free(data); }
    void* at_least(int64_t wanted) {
        if (wanted <= bytes) return data;
        wanted = (wanted + wanted / 4 + 4095) & ~int64_t(4095);
        void* fresh = nullptr;
        if (posix_memalign(&fresh, 64, size_t(wanted))) return nullptr;
        free(data);
        data = fresh;
        bytes = wanted;
        return data;
    }
};
thread_local Block call_block, member_block;

// ---- instruction sets ----
struct Isa {
    const char* name;
    const Ops* ops;
    bool (*usable)();
};
const Isa ISAS[] = {
#if defined(__x86_64__)
    {"avx512", &omni_avx512::OPS,
     [] {
         return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
     }},
    {"avx2", &omni_avx2::OPS, [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }},
    {"plain", &omni_plain::OPS, [] { return true; }},
#else
    {"neon", &omni_plain::OPS, [] { return true; }},
#endif
};
constexpr int ISA_COUNT = sizeof(ISAS) / sizeof(ISAS[0]);

int best_isa() {
#if defined(__x86_64__)
    __builtin_cpu_init();
#endif
    for (int i = 0; i < ISA_COUNT; i++)
        if (ISAS[i].usable()) return i;
    return ISA_COUNT - 1;
}
std::atomic<int> current{best_isa()};

bool detect_pairs() {
#if defined(__x86_64__)
    unsigned a, b, c, d;  // by the bit: compilers name this feature late
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a >> 5 & 1)) return false;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c >> 1 & 1);  // VBMI: how int8 becomes pairs
#else
    return false;
#endif
}
std::atomic<bool> pairs_on{detect_pairs()};

// AMX (tiles, bfloat16, int8) needs the CPU's bits, the system's saving of tile registers, and Linux's permission for this process.
bool detect_amx() {
#if defined(__x86_64__) && defined(__linux__)
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d >> 22 & 13) != 13 || !detect_pairs()) return false;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return false;
    uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low >> 17 & 3) != 3) return false;
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
    return false;
#endif
}
std::atomic<bool> amx_on{detect_amx()};

bool detect_vnni() {
#if defined(__x86_64__)
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c >> 11 & 1);
#else
    return false;
#endif
}
std::atomic<bool> vnni_on{detect_vnni()};

void relax() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

int64_t element_bytes(int dtype) { return dtype == OMNI_F32 ? 4 : dtype == OMNI_BF16 ? 2 : 1; }
// How many k lie side by side in a panel, and the k that a panel is padded to.
int64_t k_together(int dtype) { return dtype == OMNI_BF16 ? 2 : dtype == OMNI_W8A8 || dtype == OMNI_W8A16 ? 4 : 1; }
int64_t padded(int64_t k, int dtype) {
    const int64_t unit = k_together(dtype) == 4 ? 64 : dtype == OMNI_BF16 ? 32 : 2;  // an AMX tile
    return (k + unit - 1) / unit * unit;
}

// Row of the source that output `column` of panel `panel` comes from, or -1 for padding.
int64_t source_row(int64_t panel, int64_t column, int64_t n, bool gated) {
    if (!gated) {
        const int64_t row = panel * 16 + column;
        return row < n ? row : -1;
    }
    const int64_t half = n / 2, row = panel / 2 * 16 + column;
    return row >= half ? -1 : panel % 2 ? half + row : row;
}

template <class T>
void pack_panel(const void* src, int64_t n, int64_t k, bool gated, int dtype, int64_t panel, void* dst) {
    const int64_t each = k_together(dtype), size = padded(k, dtype);
    T* out = static_cast<T*>(dst) + panel * size * 16;
    for (int64_t column = 0; column < 16; column++) {
        const int64_t row = source_row(panel, column, n, gated);
        for (int64_t i = 0; i < size; i++) {
            const T value = row < 0 || i >= k ? T(0) : static_cast<const T*>(src)[row * k + i];
            out[i / each * each * 16 + column * each + i % each] = value;
        }
    }
}

int64_t panel_count(int64_t n, bool gated) { return gated ? 2 * ((n / 2 + 15) / 16) : (n + 15) / 16; }

}  // namespace

const Ops& omni_ops() { return *ISAS[current.load(std::memory_order_relaxed)].ops; }

bool Team::sync() {
    Shared& s = *shared;
    const int generation = s.generation.load(std::memory_order_acquire);
    if (s.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == s.size) {
        s.agreed = s.status.load(std::memory_order_relaxed);
        s.ticket[phase & 1].store(0, std::memory_order_relaxed);
        s.arrived.store(0, std::memory_order_relaxed);
        s.generation.store(generation + 1, std::memory_order_release);
    } else {
        // Short waits spin; on a crowded machine the one waited for may need this very core.
        for (int spins = 0; s.generation.load(std::memory_order_acquire) == generation; spins++) {
            if (spins < 2000) relax();
#if defined(__unix__)
            else sched_yield();
#endif
        }
    }
    phase++;
    return s.agreed == 0;
}

int run_team(int threads, TeamBody body, void* context, void* note) {
    Team::Shared shared;
    shared.note = note;
    shared.ticket[0] = 0;
    shared.ticket[1] = 0;
    shared.size = threads < 1 ? 1 : threads;
    if (shared.size == 1) {
        Team team{&shared, 0};
        body(team, context);
        return shared.status.load();
    }
#pragma omp parallel num_threads(shared.size)
    {
#pragma omp single
        shared.size = omp_get_num_threads();
        Team team{&shared, omp_get_thread_num()};
        body(team, context);
    }
    return shared.status.load();
}

void tell_progress(const omni_step_args* args, int64_t layers) {
    if (!args->progress) return;
    __atomic_store_n(args->progress, layers, __ATOMIC_RELEASE);
#if defined(__unix__) || defined(__APPLE__)
    // A full pipe wakes its reader as well as one byte more would.
    if (args->progress_fd >= 0 && write(args->progress_fd, "", 1) < 0) return;
#endif
}

bool vnni_ready() { return vnni_on.load(std::memory_order_relaxed); }
bool pairs_ready() { return pairs_on.load(std::memory_order_relaxed); }
bool amx_ready() { return amx_on.load(std::memory_order_relaxed); }
void* call_memory(int64_t bytes) { return call_block.at_least(bytes); }
void* member_memory(int64_t bytes) { return member_block.at_least(bytes); }

extern "C" {

int32_t omni_version(void) { return 1; }
const char* omni_source_hash(void) { return OMNI_SOURCE_HASH; }
int32_t omni_isa_count(void) { return ISA_COUNT; }
const char* omni_isa_name(int32_t index) { return index < 0 || index >= ISA_COUNT ? "" : ISAS[index].name; }
int32_t omni_isa_usable(int32_t index) { return index >= 0 && index < ISA_COUNT && ISAS[index].usable(); }
int32_t omni_isa_current(void) { return current.load(); }
int32_t omni_isa_select(int32_t index) {
    if (!omni_isa_usable(index)) return 1;
    current = index;
    return 0;
}

int32_t omni_use_amx(int32_t on) {
    amx_on = on && detect_amx();
    return amx_on;
}

void omni_large_pages(void* data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    constexpr uintptr_t PAGE = uintptr_t(2) << 20;
    const uintptr_t first = (reinterpret_cast<uintptr_t>(data) + PAGE - 1) & ~(PAGE - 1);
    const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + uintptr_t(bytes)) & ~(PAGE - 1);
    if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
#else
    (void)data;
    (void)bytes;
#endif
}

int32_t omni_use_pairs(int32_t on) {
    pairs_on = on && detect_pairs();
    return pairs_on;
}

int32_t omni_vnni(void) { return vnni_ready(); }
int32_t omni_use_vnni(int32_t on) {
    vnni_on = on && detect_vnni();
    return vnni_on;
}

int64_t omni_packed_bytes(int64_t n, int64_t k, int32_t dtype, int32_t gated) {
    return panel_count(n, gated) * padded(k, dtype) * 16 * element_bytes(dtype);
}

void omni_pack(const void* src, int64_t n, int64_t k, int32_t dtype, int32_t gated, void* dst) {
    for (int64_t p = 0; p < panel_count(n, gated); p++) {
        if (dtype == OMNI_F32) pack_panel<float>(src, n, k, gated, dtype, p, dst);
        else if (dtype == OMNI_BF16) pack_panel<uint16_t>(src, n, k, gated, dtype, p, dst);
        else pack_panel<int8_t>(src, n, k, gated, dtype, p, dst);
    }
}

int32_t omni_linear(const void* x, int32_t x_dtype, int64_t rows, const omni_matrix* w, void* out, int32_t out_dtype,
                    int32_t threads) {
    return omni_ops().linear(x, x_dtype, rows, w, out, out_dtype, threads);
}
int32_t omni_route(const float* logits, int64_t rows, const omni_routing* routing, int64_t* ids, float* weights,
                   int64_t* counts, int32_t threads) {
    return omni_ops().route(logits, rows, routing, ids, weights, counts, threads);
}
int32_t omni_fused_moe(const void* x, int32_t dtype, int64_t rows, const omni_experts* experts, const int64_t* ids,
                       const float* weights, int64_t top_k, void* out, int32_t threads) {
    return omni_ops().fused_moe(x, dtype, rows, experts, ids, weights, top_k, out, threads);
}
int32_t omni_rms_norm(const void* x, const void* residual, const void* weight, int64_t rows, int64_t width,
                      int64_t weight_rows, float eps, int32_t dtype, void* out, void* total, int32_t threads) {
    return omni_ops().rms_norm(x, residual, weight, rows, width, weight_rows, eps, dtype, out, total, threads);
}
int32_t omni_rope(const void* x, const void* cos, const void* sin, int64_t rows, int64_t heads, int64_t dim,
                  int64_t row_stride, int32_t dtype, void* out, int32_t threads) {
    return omni_ops().rope(x, cos, sin, rows, heads, dim, row_stride, dtype, out, threads);
}
int32_t omni_silu_and_mul(const void* x, int64_t rows, int64_t width, int32_t dtype, void* out, int32_t threads) {
    return omni_ops().silu_and_mul(x, rows, width, dtype, out, threads);
}
int32_t omni_attention(const void* q, int32_t dtype, int64_t q_heads, int64_t q_row_stride, const omni_ragged* ragged,
                       const omni_cache* cache, float scale, void* out, int32_t threads) {
    return omni_ops().attention(q, dtype, q_heads, q_row_stride, ragged, cache, scale, out, threads);
}
int32_t omni_step(const omni_model* model, const omni_step_args* args, int32_t threads) {
    return omni_ops().step(model, args, threads);
}
double omni_bench_read(const void* data, int64_t bytes, int32_t threads) {
    return omni_ops().bench_read(data, bytes, threads);
}
double omni_bench_fma(int64_t rounds, int32_t threads) { return omni_ops().bench_fma(rounds, threads); }
double omni_bench_pairs(int64_t rounds, int32_t threads) { return omni_ops().bench_pairs(rounds, threads); }
double omni_bench_quads(int64_t rounds, int32_t threads) { return omni_ops().bench_quads(rounds, threads); }

int32_t omni_kv_write(const omni_cache* cache, const int64_t* slots, int64_t rows, const void* k, const void* v,
                      int64_t k_row_stride, int64_t v_row_stride) {
    const int64_t bytes = element_bytes(cache->dtype), count = cache->blocks * cache->block_size;
    for (int64_t i = 0; i < rows; i++)
        if (slots[i] < 0 || slots[i] >= count) return OMNI_BAD_SLOT;
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t h = 0; h < cache->heads; h++) {
            const int64_t at = (slots[i] * cache->row_stride + h * cache->head_stride) * bytes;
            const int64_t from = (i * k_row_stride + h * cache->dim) * bytes;
            const int64_t from_v = (i * v_row_stride + h * cache->value_dim) * bytes;
            memcpy(static_cast<char*>(cache->keys) + at, static_cast<const char*>(k) + from, cache->dim * bytes);
            memcpy(static_cast<char*>(cache->values) + at, static_cast<const char*>(v) + from_v,
                   cache->value_dim * bytes);
        }
    }
    return OMNI_OK;
}

// Between a cache [planes, blocks, block_bytes] and data [n, planes, block_bytes].
int32_t omni_kv_copy(uint8_t* cache, int64_t planes, int64_t blocks, int64_t block_bytes, const int64_t* ids, int64_t n,
                     uint8_t* data, int32_t to_cache) {
    for (int64_t i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= blocks) return OMNI_BAD_BLOCK;
    for (int64_t i = 0; i < n; i++)
        for (int64_t p = 0; p < planes; p++) {
            uint8_t* at = cache + (p * blocks + ids[i]) * block_bytes;
            uint8_t* piece = data + (i * planes + p) * block_bytes;
            if (to_cache) memcpy(at, piece, size_t(block_bytes));
            else memcpy(piece, at, size_t(block_bytes));
        }
    return OMNI_OK;
}

}  // extern "C"
