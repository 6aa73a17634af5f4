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
#elif OMNI_LANES == 8
INLINE __m256i even_bytes(__m256i v) { return _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8); }
INLINE __m256i odd_bytes(__m256i v) { return _mm256_srai_epi16(v, 8); }
INLINE vi dot_bytes(vi sum, vi w, uint32_t x) {
    const __m256i row = _mm256_set1_epi32(int(x));
    sum += (vi)_mm256_madd_epi16(even_bytes((__m256i)w), even_bytes(row));
    return sum + (vi)_mm256_madd_epi16(odd_bytes((__m256i)w), odd_bytes(row));
}
#else
INLINE vi dot_bytes(vi sum, vi w, uint32_t x) {
    for (int j = 0; j < 4; j++) sum += (w << (24 - 8 * j) >> 24) * int32_t(int8_t(x >> (8 * j)));
    return sum;
}
#endif

INLINE vi load_ints(const void* p) { return (vi)*reinterpret_cast<const vu_any*>(p); }
INLINE void store_ints(void* p, vi v) { *reinterpret_cast<vu_any*>(p) = (vu)v; }

// c[MR][ldc] (+)= a[k][MR] . NP panels, 32-bit sums in the place of floats.
template <bool VNNI, int MR, int NP>
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
        if constexpr (!VNNI)
            unroll<MR>([&](auto r) __attribute__((always_inline)) {
                unroll<N>(EACH { acc[r * N + i] = dot_bytes(acc[r * N + i], w[i], a[r].bits); });
            });
        a += MR;
        b += 64;
    }
    unroll<MR * N>(EACH { store_ints(c + i / N * ldc + i % N * W, acc[i]); });
}

template <bool VNNI, int MR>
static constexpr void fill_quad_tiles(Tiles& t) {
    t.wide[OMNI_W8A8][MR] = t.wide[OMNI_W8A16][MR] = quad_tile<VNNI, MR, panels_of(MR)>;
    t.single[OMNI_W8A8][MR] = t.single[OMNI_W8A16][MR] = quad_tile<VNNI, MR, 1>;
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

typedef int8_t vb __attribute__((vector_size(OMNI_LANES)));

// Largest magnitude of a row: by its bits, so that a NaN is the largest.
INLINE float largest(const float* x, int64_t k) {
    vi most{};
    int64_t i = 0;
    for (; i + W <= k; i += W) {
        const vi size = (vi)load(x + i) & 0x7fffffff;
        most = size > most ? size : most;
    }
    int32_t best = 0, lane[W];
    store_ints(lane, most);
    for (int j = 0; j < W; j++) best = lane[j] > best ? lane[j] : best;
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
            const vb bytes = __builtin_convertvector(plane[p], vb);
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
    for (int64_t r = 0; r < rows; r++) {
        const float* in = c + r * by.planes * LDC;
        const int32_t* sum = by.sum + r * by.planes;
        for (int64_t j = 0; j < columns; j += W) {
            vf y = __builtin_convertvector(load_ints(in + j) - offset * sum[0], vf);
            if (by.planes == 2)
                y = y * splat(256.0f) + __builtin_convertvector(load_ints(in + LDC + j) - offset * sum[1], vf);
            store(c + r * LDC + j, y * splat(by.scale[r]) * load(scale + j));
        }
    }
}
