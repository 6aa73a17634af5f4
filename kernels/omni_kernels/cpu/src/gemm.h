// Products of few rows with packed matrices. Included inside namespace OMNI_NS, after rows.h.
//
//   A: blocks of MR rows, [k][MR] each, float32         B: panels of 16 outputs, [k/2][16][2] or [k][16]
//      or [k/2][MR] pairs of bfloat16
//
// Rows are of type `float`, or `Pair` where the CPU multiplies pairs of bfloat16 (twice the products an instruction). Those of
// whole numbers and of AMX tiles are in quads.h and tiles.h.
// Every output is one chain of multiply-adds over ascending k, whatever the tile: a row's result does not depend
// on the rows beside it, nor on the number of threads.
#if OMNI_LANES == 16
constexpr int MR_MAX = 14;
constexpr int K_BLOCK = 256;
constexpr int panels_of(int mr) { return mr <= 2 ? 8 : mr <= 5 ? 4 : 2; }
#elif OMNI_LANES == 8
constexpr int MR_MAX = 6;
constexpr int K_BLOCK = 512;
constexpr int panels_of(int mr) { return mr <= 2 ? 2 : 1; }
#else
constexpr int MR_MAX = 4;
constexpr int K_BLOCK = 512;
constexpr int panels_of(int mr) { return mr == 1 ? 2 : 1; }
#endif
constexpr int STEP = 8;           // panels whose results lie in the scratch at once
constexpr int64_t LDC = STEP * 16;
constexpr int CHUNK_ROWS = 96;    // rows of one expert that are packed together

// What a tile fetches into L2 while it works: N lines for each two k, `stride` apart, `step` further on each time.
//
// Few rows read each panel once, side by side, which memory serves badly. So the panels that come next are fetched in
// the order in which they lie, all of them while these are worked on: one stream at the speed of a plain read.
// Many rows keep a block of k in L1 and fetch the same panels' next block.
struct Ahead {
    const uint8_t* at;
    int64_t stride, step;
    static Ahead linear(const uint8_t* next, int panels) { return {next, 64, int64_t(panels) * 64}; }
    static Ahead beside(const uint8_t* b, int64_t stride) { return {b + 2048, stride, 64}; }
};

// Sizes of the row blocks: as even as possible, 30 rows in blocks of at most 14 are 10 + 10 + 10.
struct Blocks {
    int64_t rows, count;
    explicit Blocks(int64_t rows) : rows(rows), count((rows + MR_MAX - 1) / MR_MAX) {}
    int64_t first(int64_t i) const { return i * rows / count; }
    int64_t size(int64_t i) const { return first(i + 1) - first(i); }
};

// Panel values at an even k (`half` 0) or the k after it (1), vector v of the panel.
template <int DT>
INLINE vf panel_load(const uint8_t* pair, int half, int v) {
    if (DT == OMNI_F32) return load(reinterpret_cast<const float*>(pair) + half * 16 + v * W);
    if (DT == OMNI_BF16) {
        vu both = *reinterpret_cast<const vu_any*>(pair + v * W * 4);
        return half ? (vf)(both & 0xffff0000u) : (vf)(both << 16);
    }
    const int8_t* q = reinterpret_cast<const int8_t*>(pair) + half * 16 + v * W;
#if OMNI_LANES == 16
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q))));
#elif OMNI_LANES == 8
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(q))));
#else
    vf y;
    for (int i = 0; i < W; i++) y[i] = float(q[i]);
    return y;
#endif
}

#if defined(OMNI_PAIRS)
// As `panel_load`, both k of a pair as bfloat16.
template <int DT>
INLINE vu pair_load(const uint8_t* pair) {
    if constexpr (DT == OMNI_BF16) return *reinterpret_cast<const vu_any*>(pair);
    const vu first = (vu)panel_load<DT>(pair, 0, 0), second = (vu)panel_load<DT>(pair, 1, 0);
    return (first >> 16) | (second & 0xffff0000u);  // int8 is exact in bfloat16
}
// bfloat16 of 0..127, low and high bytes apart: what `pairs_of_line` looks up.
struct Lookup {
    alignas(64) uint8_t low[128], high[128], order[64];
    constexpr Lookup() : low(), high(), order() {
        for (int i = 1; i < 128; i++) {
            int exponent = 0;
            while (i >> (exponent + 1)) exponent++;
            const int bits = (127 + exponent) << 7 | ((i << (7 - exponent)) & 0x7f);
            low[i] = uint8_t(bits & 0xff);
            high[i] = uint8_t(bits >> 8);
        }
        // Byte 16 l + 8 p + 2 j + h of a line: output 4 l + j, k 2 p + h.
        for (int i = 0; i < 64; i++) order[i] = uint8_t((i / 8 % 2 * 2 + i % 2) * 16 + i / 16 * 4 + i / 2 % 4);
    }
};
alignas(64) constexpr Lookup LOOKUP{};
// Four k of an int8 panel as two vectors of pairs: a look-up, for conversions by arithmetic take twice the instructions.
INLINE void pairs_of_line(const uint8_t* line, vu& first, vu& second) {
    const __m512i q = _mm512_permutexvar_epi8(_mm512_load_si512(LOOKUP.order), _mm512_loadu_si512(line));
    const __m512i size = _mm512_abs_epi8(q);
    const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(LOOKUP.low), size, _mm512_load_si512(LOOKUP.low + 64));
    const __m512i top = _mm512_permutex2var_epi8(_mm512_load_si512(LOOKUP.high), size, _mm512_load_si512(LOOKUP.high + 64));
    const __m512i high = _mm512_ternarylogic_epi32(top, q, _mm512_set1_epi8(-128), 0xf8);  // top | (q & sign)
    first = (vu)_mm512_unpacklo_epi8(low, high);
    second = (vu)_mm512_unpackhi_epi8(low, high);
}
INLINE vf dot_pair(vf sum, vu w, uint32_t x) {
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)_mm512_set1_epi32(int(x)));
}
#endif

// c[MR][ldc] (+)= a[k][MR] . NP panels.
template <class A, int DT, int MR, int NP>
static void tile(const void* __restrict rows, const uint8_t* __restrict b, int64_t stride, int64_t k,
                 float* __restrict c, int64_t ldc, bool first, Ahead ahead) {
    const A* __restrict a = static_cast<const A*>(rows);
    constexpr int N = NP * VP;
    constexpr int64_t PAIR = 32 * (DT == OMNI_F32 ? 4 : DT == OMNI_BF16 ? 2 : 1);
    vf acc[MR * N];
    unroll<MR * N>(EACH { acc[i] = first ? vf{} : load(c + i / N * ldc + i % N * W); });
    int64_t pair = 0;
#if defined(OMNI_PAIRS)
    if constexpr (K_EACH<A> == 2 && DT == OMNI_I8 && MR <= 5)  // with more rows the tables find no registers
        for (; pair + 4 <= k; pair += 4) {
            unroll<NP>(EACH { __builtin_prefetch(ahead.at + i * ahead.stride, 0, 2); });
            ahead.at += ahead.step;
            unroll<NP>([&](auto p) __attribute__((always_inline)) {
                vu first, second;
                pairs_of_line(b + p * stride, first, second);
                unroll<MR>(EACH { acc[i * N + p] = dot_pair(acc[i * N + p], first, a[i].bits); });
                unroll<MR>(EACH { acc[i * N + p] = dot_pair(acc[i * N + p], second, a[MR + i].bits); });
            });
            a += 2 * MR;
            b += 64;
        }
#endif
    for (; pair < k; pair += 2) {
        if (DT != OMNI_I8 || (pair & 2) == 0) {  // a line of int8 serves four k
            unroll<NP>(EACH { __builtin_prefetch(ahead.at + i * ahead.stride, 0, 2); });
            ahead.at += ahead.step;
        }
#if defined(OMNI_PAIRS)
        if constexpr (K_EACH<A> == 2) {
            vu w[N];
            unroll<N>(EACH { w[i] = pair_load<DT>(b + i * stride); });
            unroll<MR>([&](auto r) __attribute__((always_inline)) {
                unroll<N>(EACH { acc[r * N + i] = dot_pair(acc[r * N + i], w[i], a[r].bits); });
            });
            a += MR;
            b += PAIR;
            continue;
        }
#endif
        if constexpr (K_EACH<A> == 1) unroll<2>([&](auto half) __attribute__((always_inline)) {
            vf w[N];
            unroll<N>(EACH { w[i] = panel_load<DT>(b + i / VP * stride, half, i % VP); });
            unroll<MR>([&](auto r) __attribute__((always_inline)) {
                const vf x = splat(a[half * MR + r]);
                unroll<N>(EACH { acc[r * N + i] = x * w[i] + acc[r * N + i]; });
            });
#if OMNI_LANES == 8
            __asm__ volatile("" ::: "memory");  // reload the second half: registers are short
#endif
        });
        a += 2 * MR;
        b += PAIR;
    }
    unroll<MR * N>(EACH { store(c + i / N * ldc + i % N * W, acc[i]); });
}

typedef void (*Tile)(const void*, const uint8_t*, int64_t, int64_t, float*, int64_t, bool, Ahead);
struct Tiles {
    Tile wide[5][MR_MAX + 1], single[5][MR_MAX + 1];
};
template <class A, int DT, int MR>
static constexpr void fill_tiles(Tiles& t) {
    t.wide[DT][MR] = tile<A, DT, MR, panels_of(MR)>;
    t.single[DT][MR] = tile<A, DT, MR, 1>;
    if constexpr (MR > 1) fill_tiles<A, DT, MR - 1>(t);
}
template <class A>
static constexpr Tiles make_tiles() {
    Tiles t{};
    if constexpr (K_EACH<A> == 1) fill_tiles<A, OMNI_F32, MR_MAX>(t);
    fill_tiles<A, OMNI_BF16, MR_MAX>(t);
    fill_tiles<A, OMNI_I8, MR_MAX>(t);
    return t;
}
template <class A>
constexpr Tiles TILES = make_tiles<A>();
template <class A>
const Tiles& tiles_of() { return TILES<A>; }

// Scales of rows that were made whole numbers, and the sums of these: see quads.h.
struct RowScales {
    float* scale;   // [rows]
    int32_t* sum;   // [rows][planes]
    int64_t planes;
};
#include "quads.h"

// The first `count` lanes, and no others: a neighbour may write those.
INLINE void store_front(float* out, vf v, int64_t count) {
#if OMNI_LANES == 16
    _mm512_mask_storeu_ps(out, __mmask16((1u << count) - 1), (__m512)v);
#else
    float lane[W];
    store(lane, v);
    for (int64_t i = 0; i < count; i++) out[i] = lane[i];
#endif
}

// `rows` rows of `n` values of 32 bits, transposed: out [n][rows]. The caller owns a vector after the end.
INLINE void transpose_rows(const char* const* row, int64_t rows, int64_t n, float* out) {
    if (rows == 1) {
        __builtin_memcpy(out, row[0], size_t(n) * 4);
        return;
    }
    int64_t i = 0;
    if (rows > 3)
        for (; i + 4 <= n; i += 4) {
            vf column[4];
            columns<OMNI_F32>(row, i * 4, column);
            unroll<4>([&](auto j) __attribute__((always_inline)) { store(out + (i + j) * rows, column[j]); });
        }
    for (; i < n; i++)
        for (int64_t r = 0; r < rows; r++) out[i * rows + r] = reinterpret_cast<const float*>(row[r])[i];
}

constexpr int ROW_VECTORS = (MR_MAX + W - 1) / W * W;  // rows of a block, in whole vectors

// Rows -> blocks [k][MR], or [k/2][MR] pairs. `row(i)` points at row i's k values.
template <class A, class Row>
INLINE void pack_rows(int64_t rows, int64_t k, Row row, A* dst) {
    const int64_t each = K_EACH<A>, whole = k / each, padded = padded_to<A>(k) / each;
    Blocks blocks(rows);
    for (int64_t b = 0; b < blocks.count; b++) {
        const int64_t r0 = blocks.first(b), mr = blocks.size(b);
        float* out = reinterpret_cast<float*>(dst + r0 * padded);
        const char* in[ROW_VECTORS];
        for (int64_t r = 0; r < mr; r++) in[r] = reinterpret_cast<const char*>(row(r0 + r));
        for (int64_t r = mr; r < ROW_VECTORS; r++) in[r] = in[0];
        transpose_rows(in, mr, whole, out);
        if (whole == padded) continue;
        for (int64_t r = 0; r < mr; r++) {
            uint32_t last = 0;
            if (each == 2) __builtin_memcpy(&last, in[r] + whole * 4, 2);
            __builtin_memcpy(out + whole * mr + r, &last, 4);
        }
    }
}

// Scratch of one member: packed rows and a tile of results.
template <class A>
struct Scratch {
    A* rows;
    float* c;
    void* half;  // rows on their way to pairs or quads; two panels on their way from int8 to bfloat16
    RowScales by;
    static Scratch get(int64_t k) {
        Scratch s{};
        Carver count{nullptr};
        s.carve(count, k);
        Carver carver{static_cast<char*>(member_memory(count.used))};
        if (carver.base) s.carve(carver, k);
        return s;
    }
    void carve(Carver& from, int64_t k) {
        const int64_t values = CHUNK_ROWS * (TILED<A> ? row_room(k) : padded_to<A>(k));
        rows = from.take<A>(values / K_EACH<A> + W);
        c = from.take<float>(CHUNK_ROWS * STEP * 16);
        half = from.take<char>(K_EACH<A> == 2 ? values * 2 : K_EACH<A> == 4 ? values : TILED<A> ? 64 * row_room(k) : 0);
        by.scale = from.take<float>(CHUNK_ROWS);
        by.sum = from.take<int32_t>(CHUNK_ROWS);
    }
    // `n` rows of k values, row(i) points at them: rounded or made whole numbers if A wants that, then packed.
    template <class X, class Row>
    void pack(int64_t n, int64_t k, int64_t planes, A* out, Row row) {
        by.planes = planes;
        if constexpr (WHOLE<A>) {
            const int64_t room = TILED<A> ? row_room(k) : quad(k);
            int8_t* bytes = static_cast<int8_t*>(TILED<A> ? static_cast<void*>(out) : half);
            const auto quantise = planes == 1 ? quantise_row<1> : quantise_row<2>;
            for (int64_t r = 0; r < n; r++)
                quantise(row(r), k, bytes + r * planes * room, room, by.scale + r, by.sum + r * planes);
            if constexpr (!TILED<A>) pack_rows(n * planes, room, [&](int64_t r) { return bytes + r * room; }, out);
        } else if constexpr (TILED<A>) {
            for (int64_t r = 0; r < n; r++) {
                uint16_t* to = reinterpret_cast<uint16_t*>(out) + r * row_room(k);
                if constexpr (sizeof(X) == 4) round_row(row(r), k, to);
                else __builtin_memcpy(to, row(r), size_t(k) * 2);
                for (int64_t i = k; i % 32; i++) to[i] = 0;
            }
        } else if constexpr (K_EACH<A> == 2 && sizeof(X) == 4) {
            uint16_t* rounded = static_cast<uint16_t*>(half);
            pack_rows(n, k, [&](int64_t r) {
                narrow(row(r), k, rounded + r * even(k), OMNI_BF16);
                return rounded + r * even(k);
            }, out);
        } else {
            pack_rows(n, k, row, out);
        }
    }
};

// Packed rows times the `count` panels from `data` on, c [rows][STEP * 16]. `next`: what is read after these panels.
template <class A>
INLINE void multiply_panels(const A* a, int64_t rows, const uint8_t* data, int64_t k, int dtype, int64_t count,
                            const uint8_t* next, const Scratch<A>& scratch) {
    const int64_t padded = padded_to<A>(k), stride = panel_bytes(k, dtype);
    float* c = scratch.c;
    const Tiles& tiles = tiles_of<A>();
    Blocks blocks(rows);
    const int64_t k_block = blocks.count == 1 ? padded : WHOLE<A> ? 2 * K_BLOCK : K_BLOCK;
    // As many panels at a time as the widest tile takes: their k-block stays in L1 for all row blocks. Two blocks of rows that
    // take single panels read each twice in a row, and memory once.
    const bool once = blocks.count == 1 || (blocks.count == 2 && panels_of(int(blocks.size(0))) == 1);
    const int64_t group = blocks.count == 1 ? count : once ? 1 : 2;
    for (int64_t g = 0; g < count; g += group)
        for (int64_t kb = 0; kb < padded; kb += k_block) {
            const int64_t kn = min64(k_block, padded - kb);
            for (int64_t i = 0; i < blocks.count; i++) {
                const int64_t r0 = blocks.first(i), mr = blocks.size(i);
                const A* rows_at = a + (r0 * padded + kb * mr) / K_EACH<A>;
                const int np = panels_of(int(mr));
                for (int64_t q = g; q < min64(g + group, count);) {
                    const bool wide = q + np <= min64(g + group, count);
                    const uint8_t* b = data + q * stride + kb * 16 * element_bytes(dtype);
                    Tile f = wide ? tiles.wide[dtype][mr] : tiles.single[dtype][mr];
                    const int taken = wide ? np : 1;
                    const uint8_t* after = q + taken >= count ? next : b + taken * stride;
                    f(rows_at, b, stride, kn, c + r0 * LDC + q * 16, LDC, kb == 0,
                      once ? Ahead::linear(after, taken) : Ahead::beside(b, stride));
                    q += taken;
                }
            }
        }
}
#include "tiles.h"

// Packed rows times panels [p0, p1) of one matrix; `done(panel, count, c)` gets c [rows][STEP * 16] of `count` panels.
// `next`: what will be read after panel p1 - 1, as a guess; null if that is the panel after it.
template <class A, class Done>
INLINE void multiply(const A* a, int64_t rows, const uint8_t* data, const float* scale, int64_t k, int dtype,
                     int64_t p0, int64_t p1, const uint8_t* next, const Scratch<A>& scratch, Done done) {
    const RowScales& by = scratch.by;
    float* c = scratch.c;
    for (int64_t p = p0; p < p1; p += STEP) {
        const int64_t count = min64(STEP, p1 - p), stride = panel_bytes(k, dtype);
        const uint8_t* b = data + p * stride;
        multiply_panels(a, WHOLE<A> ? rows * by.planes : rows, b, k, dtype, count,
                        next && p + count == p1 ? next : b + count * stride, scratch);
        if (WHOLE<A>) dequantise(c, rows, count * 16, by, scale + p * 16, K_EACH<A> == 4 && by_vnni() ? 128 : 0);
        else if (scale)
            for (int64_t r = 0; r < rows; r++)
                for (int64_t j = 0; j < count * 16; j += W)
                    store(c + r * LDC + j, load(c + r * LDC + j) * load(scale + p * 16 + j));
        done(p, count, c);
    }
}

// How many panels one task takes: enough tasks for the team, few enough to keep the packed rows in use.
INLINE int64_t panels_a_task(int64_t total, int64_t chunks, int team) {
    if (team == 1) return total;
    int64_t wanted = (4 * team + chunks - 1) / chunks;
    int64_t size = (total + wanted - 1) / wanted;
    return size < STEP ? STEP : (size + STEP - 1) / STEP * STEP;
}

// out = x . w^T for rows of float32 or bfloat16, the latter by pairs (A is Pair), and so those of float32 once rounded;
// `done(first row, rows, first output, outputs, c)`, c [rows][STEP * 16]. `next`: the weights that are read after these,
// or null.
template <class A, class X, class Done>
static void linear(Team& team, const X* x, int64_t rows, const omni_matrix& w, const void* next, Done done) {
    const int64_t planes = planes_of(w.dtype), most = CHUNK_ROWS / planes;
    const int64_t chunks = (rows + most - 1) / most, total = panels(w.n);
    const int64_t size = panels_a_task(total, chunks, team.size()), groups = (total + size - 1) / size;
    Scratch<A> scratch = Scratch<A>::get(w.k);
    if (!scratch.c) return team.fail(OMNI_NO_MEMORY);
    int64_t packed = -1;
    for (int64_t task; (task = team.next(chunks * groups)) >= 0;) {
        const int64_t chunk = task / groups, p0 = task % groups * size;
        const int64_t r0 = chunk * rows / chunks, n = (chunk + 1) * rows / chunks - r0;
        if (chunk != packed)
            scratch.template pack<X>(n, w.k, planes, scratch.rows, [&](int64_t r) { return x + (r0 + r) * w.k; });
        packed = chunk;
        const int64_t p1 = min64(p0 + size, total);
        multiply(scratch.rows, n, static_cast<const uint8_t*>(w.data), w.scale, w.k, w.dtype, p0, p1,
                 p1 == total ? static_cast<const uint8_t*>(next) : nullptr, scratch,
                 [&](int64_t p, int64_t count, const float* c) {
                     done(r0, n, p * 16, min64(count * 16, w.n - p * 16), c);
                 });
    }
}
