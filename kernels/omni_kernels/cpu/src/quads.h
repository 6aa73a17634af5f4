// Products of whole numbers: rows and weights of 8 bits, four k at a time. Included inside namespace OMNI_NS, after gemm.h.
//
//   A: blocks of MR rows, [k/4][MR] quads of int8         B: panels of 16 outputs, [k/4][16][4] int8
//
// Sums are exact, so instruction set, tile and order change no bit of them. A row of 16 bits is two rows of 8 bits, high
// and low, one after the other ("planes"). AVX512_VNNI multiplies unsigned with signed bytes: weights get 128 added there,
// and 128 times the sum of the row is taken off again.
#if OMNI_LANES == 16
// Even and odd bytes as 16 bits: their products' sums of two fit in 32 bits, whatever they are.
INLINE __m512i even_bytes(__m512i v) { return _mm512_srai_epi16(_mm512_slli_epi16(v, 8), 8); }
INLINE __m512i odd_bytes(__m512i v) { return _mm512_srai_epi16(v, 8); }
INLINE vi dot_bytes(vi sum, vi w, uint32_t x) {
    const __m512i row = _mm512_set1_epi32(int(x));
    sum += (vi)_mm512_madd_epi16(even_bytes((__m512i)w), even_bytes(row));
    return sum + (vi)_mm512_madd_epi16(odd_bytes((__m512i)w), odd_bytes(row));
}
#elif OMNI_LANES != 8
INLINE vi dot_bytes(vi sum, vi w, uint32_t x) {
    for (int j = 0; j < 4; j++) sum += (w << (24 - 8 * j) >> 24) * int32_t(int8_t(x >> (8 * j)));
    return sum;
}
#endif

// One step of four k: acc[MR][N] += a[MR] . w[N].
//
// AVX2 multiplies unsigned with signed bytes as well, but adds the products of two in 16 bits. So the sizes of one side are
// multiplied with the other, which takes over their signs: 2 * 128 * 127 fits. `BY_ROWS`: sizes are those of the rows. A byte
// of -128 has a size and no negative: weights have none, low planes of rows do, whose size must therefore be what is taken.
template <bool BY_ROWS, int MR, int N>
INLINE void quad_step(vi (&acc)[MR * N], const vi (&w)[N], const Quad* a) {
#if OMNI_LANES == 8
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i size[N];
    if constexpr (!BY_ROWS) unroll<N>(EACH { size[i] = _mm256_abs_epi8((__m256i)w[i]); });
    unroll<MR>([&](auto r) __attribute__((always_inline)) {
        const __m256i x = _mm256_set1_epi32(int(a[r].bits)), by = BY_ROWS ? _mm256_abs_epi8(x) : x;
        unroll<N>(EACH {
            const __m256i pairs = BY_ROWS ? _mm256_maddubs_epi16(by, _mm256_sign_epi8((__m256i)w[i], x))
                                          : _mm256_maddubs_epi16(size[i], _mm256_sign_epi8(by, (__m256i)w[i]));
            acc[r * N + i] += (vi)_mm256_madd_epi16(pairs, ones);
        });
    });
#else
    unroll<MR>([&](auto r) __attribute__((always_inline)) {
        unroll<N>(EACH { acc[r * N + i] = dot_bytes(acc[r * N + i], w[i], a[r].bits); });
    });
#endif
}

INLINE vi load_ints(const void* p) { return (vi)*reinterpret_cast<const vu_any*>(p); }
INLINE void store_ints(void* p, vi v) { *reinterpret_cast<vu_any*>(p) = (vu)v; }

// c[MR][ldc] (+)= a[k][MR] . NP panels, 32-bit sums in the place of floats.
template <bool VNNI, int MR, int NP, bool BY_ROWS>
static void quad_tile(const void* __restrict rows, const uint8_t* __restrict b, int64_t stride, int64_t k,
                      float* __restrict c, int64_t ldc, bool first, Ahead ahead) {
    const Quad* __restrict a = static_cast<const Quad*>(rows);
    constexpr int N = NP * VP;
    vi acc[MR * N];
    unroll<MR * N>(EACH { acc[i] = first ? vi{} : load_ints(c + i / N * ldc + i % N * W); });
    for (; k > 0; k -= 4) {
        unroll<NP>(EACH { __builtin_prefetch(ahead.at + i * ahead.stride, 0, 2); });
        ahead.at += ahead.step;
        vi w[N];
        unroll<N>(EACH { w[i] = load_ints(b + i / VP * stride + i % VP * W * 4); });
#if defined(OMNI_PAIRS)
        if constexpr (VNNI) {
            unroll<N>(EACH { w[i] ^= (vi)(vu{} + 0x80808080u); });
            unroll<MR>([&](auto r) __attribute__((always_inline)) {
                const __m512i x = _mm512_set1_epi32(int(a[r].bits));
                unroll<N>(EACH {
                    acc[r * N + i] = (vi)_mm512_dpbusd_epi32((__m512i)acc[r * N + i], (__m512i)w[i], x);
                });
            });
        }
#endif
        if constexpr (!VNNI) quad_step<BY_ROWS, MR, N>(acc, w, a);
        a += MR;
        b += 64;
    }
    unroll<MR * N>(EACH { store_ints(c + i / N * ldc + i % N * W, acc[i]); });
}

// Of rows and weights the fewer are asked for their sizes.
constexpr bool by_rows(int mr, int np) { return OMNI_LANES != 8 || mr < np * VP; }
template <bool VNNI, int MR>
static constexpr void fill_quad_tiles(Tiles& t) {
    constexpr int NP = panels_of(MR);
    t.wide[OMNI_W8A8][MR] = quad_tile<VNNI, MR, NP, by_rows(MR, NP)>;
    t.single[OMNI_W8A8][MR] = quad_tile<VNNI, MR, 1, by_rows(MR, 1)>;
    t.wide[OMNI_W8A16][MR] = quad_tile<VNNI, MR, NP, true>;
    t.single[OMNI_W8A16][MR] = quad_tile<VNNI, MR, 1, true>;
    if constexpr (MR > 1) fill_quad_tiles<VNNI, MR - 1>(t);
}
template <bool VNNI>
static constexpr Tiles make_quad_tiles() {
    Tiles t{};
    fill_quad_tiles<VNNI, MR_MAX>(t);
    return t;
}
template <bool VNNI>
constexpr Tiles QUAD_TILES = make_quad_tiles<VNNI>();

#if defined(OMNI_PAIRS)
INLINE bool by_vnni() { return vnni_ready(); }
template <>
const Tiles& tiles_of<Quad>() {
    return by_vnni() ? QUAD_TILES<true> : QUAD_TILES<false>;
}
#else
INLINE bool by_vnni() { return false; }
template <>
const Tiles& tiles_of<Quad>() {
    return QUAD_TILES<false>;
}
#endif

// The lowest byte of each lane.
#if OMNI_LANES == 8
INLINE int64_t low_bytes(vi v) {  // GCC would take the lanes out one by one
    const __m256i each = _mm256_shuffle_epi8((__m256i)v, _mm256_set1_epi32(0x0c080400));
    return _mm_cvtsi128_si64(_mm_unpacklo_epi32(_mm256_castsi256_si128(each), _mm256_extracti128_si256(each, 1)));
}
#else
typedef int8_t vb __attribute__((vector_size(OMNI_LANES)));
INLINE vb low_bytes(vi v) { return __builtin_convertvector(v, vb); }
#endif

// Largest magnitude of a row: by its bits, so that a NaN is the largest.
INLINE float largest(const float* x, int64_t k) {
    vi most{};
    int64_t i = 0;
    for (; i + W <= k; i += W) {
        const vi size = (vi)load(x + i) & 0x7fffffff;
        most = size > most ? size : most;
    }
    int32_t best = 0;
#if OMNI_LANES >= 8
    const float lanes = fold((vf)most, [](__m256 a, __m256 b) __attribute__((always_inline)) {
        return (__m256)_mm256_max_epi32((__m256i)a, (__m256i)b);
    });
    __builtin_memcpy(&best, &lanes, 4);
#else
    for (int j = 0; j < W; j++) best = most[j] > best ? most[j] : best;
#endif
    for (; i < k; i++) {
        int32_t bits;
        __builtin_memcpy(&bits, x + i, 4);
        bits &= 0x7fffffff;
        best = bits > best ? bits : best;
    }
    float y;
    __builtin_memcpy(&y, &best, 4);
    return y;
}

// x * factor as whole numbers, half to even; the product is rounded before, on every instruction set.
INLINE vi whole(vf x, vf factor) {
#if OMNI_LANES == 16
    return (vi)_mm512_cvtps_epi32((__m512)(x * factor));
#elif OMNI_LANES == 8
    return (vi)_mm256_cvtps_epi32((__m256)(x * factor));
#else
    float lane[W];
    store(lane, x * factor);
    __asm__ volatile("" : : "r"(lane) : "memory");  // else multiply and add may become one
    const vf magic = splat(12582912.0f);
    return (vi)(load(lane) + magic) - (vi)magic;
#endif
}

// One row as whole numbers, `PLANES` rows of `padded` bytes behind one another, with its scale and its planes' sums.
template <int PLANES>
static void quantise_row(const float* x, int64_t k, int8_t* out, int64_t padded, float* scale, int32_t* sum) {
    constexpr float TINY = 1.17549435e-38f;
    float s = largest(x, k) / (PLANES == 1 ? 127.0f : 32512.0f);
    s = s < TINY ? TINY : s;
    *scale = s;
    const vf factor = splat(1.0f / s);
    vi sums[2] = {};
    const auto put = [&](vf v, int64_t i, int64_t n) __attribute__((always_inline)) {
        const vi q = whole(v, factor), low = PLANES == 1 ? q : ((q + 128) & 255) - 128;
        const vi plane[2] = {PLANES == 1 ? q : (q - low) >> 8, low};
        unroll<PLANES>([&](auto p) __attribute__((always_inline)) {
            const auto bytes = low_bytes(plane[p]);
            __builtin_memcpy(out + p * padded + i, &bytes, size_t(n));
            sums[p] += plane[p];
        });
    };
    int64_t i = 0;
    for (; i + W <= k; i += W) put(load(x + i), i, W);
    for (; i < padded; i += W) {
        float lane[W] = {};
        for (int64_t j = i; j < k; j++) lane[j - i] = x[j];
        put(load(lane), i, min64(W, padded - i));
    }
    for (int64_t p = 0; p < PLANES; p++) {
        int32_t lane[W];
        store_ints(lane, sums[p]);
        sum[p] = 0;
        for (int j = 0; j < W; j++) sum[p] += lane[j];
    }
}

// Sums of `rows` rows, `planes` each, as floats in the rows' order: sum * scale of the row * scale of the output. `offset`: what
// was added to every weight.
INLINE void dequantise(float* c, int64_t rows, int64_t columns, const RowScales& by, const float* scale, int32_t offset) {
    const int64_t planes = by.planes;  // what is stored below might be `by`, for all the compiler knows
    for (int64_t r = 0; r < rows; r++) {
        const float* in = c + r * planes * LDC;
        const int32_t* sum = by.sum + r * planes;
        const int32_t high = offset * sum[0], low = planes == 2 ? offset * sum[1] : 0;
        const vf row = splat(by.scale[r]);
        for (int64_t j = 0; j < columns; j += W) {
            vf y = __builtin_convertvector(load_ints(in + j) - high, vf);
            if (planes == 2) y = y * splat(256.0f) + __builtin_convertvector(load_ints(in + LDC + j) - low, vf);
            store(c + r * LDC + j, y * row * load(scale + j));
        }
    }
}
