// The ops of one instruction set behind a table of functions. Included by isa_*.cpp inside namespace OMNI_NS.
#include "simd.h"
#include "sample.h"
#include "rows.h"
#include "gemm.h"
#include "layers.h"
#include "moe.h"
#include "attention.h"
#include "tile_attention.h"
#include "attend.h"
#include "step.h"

static const float* widened(const void* x, int dtype, int64_t n, float* room) {
    if (dtype == OMNI_F32) return static_cast<const float*>(x);
    widen(x, dtype, n, room);
    return room;
}

struct RouteCall {
    const omni_routing* routing;
    const float* logits;
    int64_t rows;
    int64_t* ids;
    float* weights;
};

static void route_body(Team& team, void* context) {
    const RouteCall& a = *static_cast<RouteCall*>(context);
    route_rows(team, *a.routing, a.logits, a.routing->experts, a.rows, a.ids, a.weights);
}

static int32_t route_op(const float* logits, int64_t rows, const omni_routing* routing, int64_t* ids, float* weights,
                        int64_t* counts, int32_t threads) {
    RouteCall call{routing, logits, rows, ids, weights};
    if (rows < 32) threads = 1;
    const int status = run_team(threads, route_body, &call);
    if (status) return status;
    for (int64_t i = 0; i < rows * routing->top_k; i++) counts[ids[i]]++;
    return OMNI_OK;
}

template <class A>
static void moe_body(Team& team, void* context) {
    const Moe& m = *static_cast<Moe*>(context);
    [[maybe_unused]] const TilesInUse<A> tiles;
    moe_up<A, Given<A>>(team, m);
    if (team.sync()) moe_down<A>(team, m);
}

// Whether rows of bfloat16 stay what they are with these weights, rather than become float32.
static bool rounded(int x_dtype, const omni_matrix& w) {
    return x_dtype == OMNI_BF16 && (!w.data || w.dtype == OMNI_BF16 || w.dtype == OMNI_I8);
}
static bool rounded(int x_dtype, const omni_experts& e) {
    return rounded(x_dtype, e.w13) && rounded(x_dtype, e.w2) && rounded(x_dtype, e.shared13) && rounded(x_dtype, e.shared2);
}

constexpr Bodies MOE_BODIES OMNI_BODIES(moe_body);

static int32_t moe_op(const void* x, int32_t dtype, int64_t rows, const omni_experts* experts, const int64_t* ids,
                      const float* weights, int64_t top_k, void* out, int32_t threads) {
    if (!rows) return OMNI_OK;
    const int64_t h = experts->w2.n, n = rows * h;
    Moe m{};
    m.experts = experts;
    m.rows = rows;
    m.top_k = top_k;
    m.ids = ids;
    m.weights = weights;
    Carver count{nullptr};
    carve(m, count);
    count.take<float>(2 * n);
    Carver carver{static_cast<char*>(call_memory(count.used))};
    if (!carver.base) return OMNI_NO_MEMORY;
    carve(m, carver);
    float* room = carver.take<float>(2 * n);
    const bool tiles = experts->w13.dtype != OMNI_I8 || rows * top_k >= 8 * experts->experts;
    const TeamBody halves = rounded(dtype, *experts) ? rounded_body(MOE_BODIES, tiles) : nullptr;
    m.x = halves ? x : widened(x, dtype, n, room);
    m.out = dtype == OMNI_F32 ? static_cast<float*>(out) : room + n;
    for (int64_t i = 0; i < n; i++) m.out[i] = 0.0f;
    int status = plan(m, nullptr);
    if (!status) status = run_team(threads, halves ? halves : exact_body(MOE_BODIES, experts->w13.dtype), &m);
    if (!status && dtype != OMNI_F32) narrow(m.out, n, out, dtype);
    return status;
}

struct LinearCall {
    const void* x;
    int64_t rows;
    const omni_matrix* w;
    void* out;
    int out_dtype;
};

template <class A>
static void linear_body(Team& team, void* context) {
    const LinearCall& a = *static_cast<LinearCall*>(context);
    [[maybe_unused]] const TilesInUse<A> tiles;
    const int64_t n = a.w->n, bytes = a.out_dtype == OMNI_BF16 ? 2 : 4;
    linear<A>(team, static_cast<const Given<A>*>(a.x), a.rows, *a.w, nullptr, [&](int64_t r0, int64_t rows, int64_t first, int64_t count, const float* c) {
        for (int64_t r = 0; r < rows; r++)
            narrow(c + r * LDC, count, static_cast<char*>(a.out) + ((r0 + r) * n + first) * bytes, a.out_dtype);
    });
}

constexpr Bodies LINEAR_BODIES OMNI_BODIES(linear_body);

static int32_t linear_op(const void* x, int32_t x_dtype, int64_t rows, const omni_matrix* w, void* out,
                         int32_t out_dtype, int32_t threads) {
    if (!rows || !w->n) return OMNI_OK;
    LinearCall call{x, rows, w, out, out_dtype};
    const bool tiles = w->dtype != OMNI_I8 || rows >= 8;
    if (const TeamBody halves = rounded(x_dtype, *w) ? rounded_body(LINEAR_BODIES, tiles) : nullptr)
        return run_team(threads, halves, &call);
    float* room = static_cast<float*>(call_memory(x_dtype == OMNI_F32 ? 64 : rows * w->k * 4));
    if (!room) return OMNI_NO_MEMORY;
    call.x = widened(x, x_dtype, rows * w->k, room);
    return run_team(threads, exact_body(LINEAR_BODIES, w->dtype), &call);
}

struct RowsCall {
    const void *x, *residual, *weight, *cos, *sin;
    void *out, *total;
    int64_t rows, width, weight_rows, heads, stride;
    float eps;
    int dtype;
    int64_t bytes() const { return dtype == OMNI_BF16 ? 2 : 4; }
    const void* at(const void* p, int64_t i) const { return static_cast<const char*>(p) + i * bytes(); }
    void* at(void* p, int64_t i) const { return static_cast<char*>(p) + i * bytes(); }
};

static void norm_body(Team& team, void* context) {
    const RowsCall& a = *static_cast<RowsCall*>(context);
    const int64_t n = a.width;
    float* room = static_cast<float*>(member_memory((4 + 1) * n * 4));
    if (!room) return team.fail(OMNI_NO_MEMORY);
    float *sum = room, *weight = room + n, *out = room + 2 * n, *other = room + 3 * n;
    const int64_t per_task = 8, tasks = (a.rows + per_task - 1) / per_task;
    for (int64_t task; (task = team.next(tasks)) >= 0;)
        for (int64_t r = task * per_task; r < min64((task + 1) * per_task, a.rows); r++) {
            const float* x = widened(a.at(a.x, r * n), a.dtype, n, sum);
            if (a.residual) {
                const float* y = widened(a.at(a.residual, r * n), a.dtype, n, other);
                for (int64_t i = 0; i < n; i++) sum[i] = x[i] + y[i];
                narrow(sum, n, a.at(a.total, r * n), a.dtype);
                x = a.dtype == OMNI_F32 ? sum : widened(a.at(a.total, r * n), a.dtype, n, sum);
            }
            const float* w = widened(a.at(a.weight, r % a.weight_rows * n), a.dtype, n, weight);
            float* y = a.dtype == OMNI_F32 ? static_cast<float*>(a.at(a.out, r * n)) : out;
            norm_row(x, w, n, a.eps, y);
            if (a.dtype != OMNI_F32) narrow(y, n, a.at(a.out, r * n), a.dtype);
        }
}

static int32_t norm_op(const void* x, const void* residual, const void* weight, int64_t rows, int64_t width,
                       int64_t weight_rows, float eps, int32_t dtype, void* out, void* total, int32_t threads) {
    RowsCall call{x, residual, weight, nullptr, nullptr, out, total, rows, width, weight_rows, 0, 0, eps, dtype};
    return run_team(rows * width < 65536 ? 1 : threads, norm_body, &call);
}

static void rope_body(Team& team, void* context) {
    const RowsCall& a = *static_cast<RowsCall*>(context);
    const int64_t n = a.width;
    float* room = static_cast<float*>(member_memory(4 * n * 4));
    if (!room) return team.fail(OMNI_NO_MEMORY);
    for (int64_t r; (r = team.next(a.rows)) >= 0;) {
        const float* cos = widened(a.at(a.cos, r * n), a.dtype, n, room);
        const float* sin = widened(a.at(a.sin, r * n), a.dtype, n, room + n);
        for (int64_t h = 0; h < a.heads; h++) {
            const float* x = widened(a.at(a.x, r * a.stride + h * n), a.dtype, n, room + 2 * n);
            void* out = a.at(a.out, (r * a.heads + h) * n);
            float* y = a.dtype == OMNI_F32 ? static_cast<float*>(out) : room + 3 * n;
            rope_row(x, cos, sin, n, y);
            if (a.dtype != OMNI_F32) narrow(y, n, out, a.dtype);
        }
    }
}

static int32_t rope_op(const void* x, const void* cos, const void* sin, int64_t rows, int64_t heads, int64_t dim,
                       int64_t row_stride, int32_t dtype, void* out, int32_t threads) {
    RowsCall call{x, nullptr, nullptr, cos, sin, out, nullptr, rows, dim, 1, heads, row_stride, 0.0f, dtype};
    return run_team(rows * heads * dim < 65536 ? 1 : threads, rope_body, &call);
}

static void silu_body(Team& team, void* context) {
    const RowsCall& a = *static_cast<RowsCall*>(context);
    const int64_t n = a.width;
    float* room = static_cast<float*>(member_memory(3 * n * 4));
    if (!room) return team.fail(OMNI_NO_MEMORY);
    for (int64_t r; (r = team.next(a.rows)) >= 0;) {
        const float* gate = widened(a.at(a.x, 2 * r * n), a.dtype, n, room);
        const float* up = widened(a.at(a.x, (2 * r + 1) * n), a.dtype, n, room + n);
        float* y = a.dtype == OMNI_F32 ? static_cast<float*>(a.at(a.out, r * n)) : room + 2 * n;
        silu_row(gate, up, n, y);
        if (a.dtype != OMNI_F32) narrow(y, n, a.at(a.out, r * n), a.dtype);
    }
}

static int32_t silu_op(const void* x, int64_t rows, int64_t width, int32_t dtype, void* out, int32_t threads) {
    RowsCall call{x, nullptr, nullptr, nullptr, nullptr, out, nullptr, rows, width, 1, 0, 0, 0.0f, dtype};
    return run_team(rows * width < 16384 ? 1 : threads, silu_body, &call);
}

static void attend_body(Team& team, void* context) { attend(team, *static_cast<Attend*>(context)); }

static int32_t attention_op(const void* q, int32_t dtype, int64_t q_heads, int64_t q_row_stride,
                            const omni_ragged* ragged, const omni_cache* cache, float scale, void* out,
                            int32_t threads) {
    const int64_t rows = ragged->query_start[ragged->sequences];
    if (!rows) return OMNI_OK;
    const int status = check_tables(*ragged, *cache);
    if (status) return status;
    const int64_t in = rows * q_heads * cache->dim, n = rows * q_heads * cache->value_dim;
    Carver carver{static_cast<char*>(call_memory(dtype == OMNI_F32 ? 64 : (in + n + 32) * 4))};
    if (!carver.base) return OMNI_NO_MEMORY;
    Attend a{static_cast<const float*>(q), q_row_stride, q_heads, ragged, cache, scale, static_cast<float*>(out), false, false};
    if (dtype != OMNI_F32) {
        float* wide = carver.take<float>(in);
        for (int64_t r = 0; r < rows; r++)
            widen(static_cast<const uint16_t*>(q) + r * q_row_stride, dtype, q_heads * cache->dim,
                  wide + r * q_heads * cache->dim);
        a.q = wide;
        a.q_stride = q_heads * cache->dim;
        a.out = carver.take<float>(n);
    }
    const int failed = run_team(threads, attend_body, &a);
    if (!failed && dtype != OMNI_F32) narrow(a.out, n, out, dtype);
    return failed;
}

// The most multiply-adds the machine can do: registers only.
static void fma_body(Team& team, void* context) {
    const int64_t rounds = *static_cast<int64_t*>(context);
    constexpr int N = W == 16 ? 16 : 12;
    vf acc[N], a = splat(0.999f), b = splat(1e-3f);
    unroll<N>(EACH { acc[i] = splat(float(i + team.rank)); });
    for (int64_t r = 0; r < rounds; r++) unroll<N>(EACH { acc[i] = acc[i] * a + b; });
    vf sum{};
    unroll<N>(EACH { sum += acc[i]; });
    volatile float sink = hsum(sum);
    (void)sink;
}

static double bench_fma(int64_t rounds, int32_t threads) {
    run_team(threads, fma_body, &rounds);
    return double(rounds) * (W == 16 ? 16 : 12) * W * 2.0 * threads;
}

// The same by pairs of bfloat16; 0 where there is no such instruction.
#if defined(OMNI_PAIRS)
static void pairs_body(Team& team, void* context) {
    const int64_t rounds = *static_cast<int64_t*>(context);
    vf acc[16];
    vu w = (vu)splat(1e-3f);
    unroll<16>(EACH { acc[i] = splat(float(i + team.rank)); });
    for (int64_t r = 0; r < rounds; r++) {
        unroll<16>(EACH { acc[i] = dot_pair(acc[i], w, 0x3c003c00u); });
        __asm__ volatile("" : "+v"(w));
    }
    vf sum{};
    unroll<16>(EACH { sum += acc[i]; });
    volatile float sink = hsum(sum);
    (void)sink;
}
#endif
static double bench_pairs(int64_t rounds, int32_t threads) {
#if defined(OMNI_PAIRS)
    if (!pairs_ready()) return 0;
    run_team(threads, pairs_body, &rounds);
    return double(rounds) * 16 * W * 4.0 * threads;
#else
    (void)rounds;
    (void)threads;
    return 0;
#endif
}

// The same by quads of int8.
#if defined(OMNI_PAIRS)
static void quads_body(Team& team, void* context) {
    const int64_t rounds = *static_cast<int64_t*>(context);
    vi acc[16];
    vi w = vi{} + 0x01020304;
    unroll<16>(EACH { acc[i] = vi{} + int32_t(i + team.rank); });
    for (int64_t r = 0; r < rounds; r++) {
        unroll<16>(EACH { acc[i] = (vi)_mm512_dpbusd_epi32((__m512i)acc[i], (__m512i)w, (__m512i)w); });
        __asm__ volatile("" : "+v"(w));
    }
    vi sum{};
    unroll<16>(EACH { sum += acc[i]; });
    volatile int32_t sink = sum[0];
    (void)sink;
}
#endif
static double bench_quads(int64_t rounds, int32_t threads) {
#if defined(OMNI_PAIRS)
    if (!vnni_ready()) return 0;
    run_team(threads, quads_body, &rounds);
    return double(rounds) * 16 * W * 8.0 * threads;
#else
    (void)rounds;
    (void)threads;
    return 0;
#endif
}

struct ReadCall {
    const char* data;
    int64_t bytes;
    std::atomic<int64_t> sum{0};
};

static void read_body(Team& team, void* context) {
    ReadCall& a = *static_cast<ReadCall*>(context);
    constexpr int64_t PIECE = 1 << 18;
    vu sum[4] = {};
    for (int64_t piece; (piece = team.next(a.bytes / PIECE)) >= 0;) {
        const char* p = a.data + piece * PIECE;
        for (int64_t i = 0; i < PIECE; i += 512) {  // eight lines at once, 4 kB ahead
            for (int j = 0; j < 512; j += 64) __builtin_prefetch(p + i + 4096 + j);
            for (int j = 0; j < 512; j += 16 * W)
                unroll<4>([&](auto v) __attribute__((always_inline)) {
                    sum[v] += *reinterpret_cast<const vu_any*>(p + i + j + v * 4 * W);
                });
        }
    }
    vu all = sum[0] + sum[1] + sum[2] + sum[3];
    a.sum += int64_t(all[0]) + all[W - 1];
}

static double bench_read(const void* data, int64_t bytes, int32_t threads) {
    ReadCall call{static_cast<const char*>(data), bytes};
    run_team(threads, read_body, &call);
    return double(call.sum.load());
}

const Ops OPS = {linear_op, route_op, moe_op, norm_op, rope_op, silu_op, attention_op, step, best,
                 chances, bench_read, bench_fma, bench_pairs, bench_quads};
