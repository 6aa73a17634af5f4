// Vectors of the instruction set that the including file has chosen: GCC vector extensions, a few intrinsics.
// Included inside namespace OMNI_NS, after OMNI_LANES is set.
typedef float vf __attribute__((vector_size(OMNI_LANES * 4)));
typedef int32_t vi __attribute__((vector_size(OMNI_LANES * 4)));
typedef uint32_t vu __attribute__((vector_size(OMNI_LANES * 4)));
typedef float vf_any __attribute__((vector_size(OMNI_LANES * 4), aligned(4), may_alias));
typedef uint32_t vu_any __attribute__((vector_size(OMNI_LANES * 4), aligned(4), may_alias));

constexpr int W = OMNI_LANES;
constexpr int VP = 16 / W;  // vectors a panel

#define INLINE static inline __attribute__((always_inline))

// f(Int<0>), f(Int<1>), ...: unrolled while arrays can still become registers, which loops are not.
template <int I>
struct Int {
    constexpr operator int() const { return I; }
};
template <int N, int I = 0, class F>
INLINE void unroll(const F& f) {
    if constexpr (I < N) {
        f(Int<I>{});
        unroll<N, I + 1>(f);
    }
}
#define EACH [&](auto i) __attribute__((always_inline))

INLINE vf splat(float x) { return x - vf{}; }
INLINE vf load(const float* p) { return *reinterpret_cast<const vf_any*>(p); }
INLINE void store(float* p, vf v) { *reinterpret_cast<vf_any*>(p) = v; }
INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }
INLINE vf vmin(vf a, vf b) { return a < b ? a : b; }

INLINE float from_bf16(uint16_t x) {
    uint32_t bits = uint32_t(x) << 16;
    float y;
    __builtin_memcpy(&y, &bits, 4);
    return y;
}
// Round to nearest even; a NaN stays one.
INLINE uint16_t to_bf16(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16, quiet = (bits >> 16) | 0x40u;
    return uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);  // no branch: loops become vectors
}
INLINE float get(const void* p, int dtype, int64_t i) {
    return dtype == OMNI_BF16 ? from_bf16(static_cast<const uint16_t*>(p)[i]) : static_cast<const float*>(p)[i];
}
// W consecutive values of a cache or a row.
template <int DT>
INLINE vf load_as(const void* p) {
    if constexpr (DT == OMNI_F32) return load(static_cast<const float*>(p));
#if OMNI_LANES == 16
    const __m256i half = _mm256_loadu_si256(static_cast<const __m256i*>(p));
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
#elif OMNI_LANES == 8
    const __m128i half = _mm_loadu_si128(static_cast<const __m128i*>(p));
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16);
#else
    const uint16_t* half = static_cast<const uint16_t*>(p);
    vu bits;
    for (int i = 0; i < W; i++) bits[i] = uint32_t(half[i]) << 16;
    return (vf)bits;
#endif
}
static void widen(const void* src, int dtype, int64_t n, float* dst) {
    if (dtype == OMNI_F32) {
        __builtin_memcpy(dst, src, size_t(n) * 4);
        return;
    }
    const uint16_t* s = static_cast<const uint16_t*>(src);
    for (int64_t i = 0; i < n; i++) dst[i] = from_bf16(s[i]);
}
static void narrow(const float* src, int64_t n, void* dst, int dtype) {
    if (dtype == OMNI_F32) {
        __builtin_memcpy(dst, src, size_t(n) * 4);
        return;
    }
    uint16_t* d = static_cast<uint16_t*>(dst);
    for (int64_t i = 0; i < n; i++) d[i] = to_bf16(src[i]);
}

// Sum and maximum of the lanes: of its halves, of their halves and so on, whatever the instruction set.
#if OMNI_LANES >= 8
template <class F>
INLINE float fold(vf v, const F& both) {
#if OMNI_LANES == 16
    const __m256 eight = both(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
#else
    const __m256 eight = (__m256)v;
#endif
    const __m256 four = both(eight, _mm256_permute2f128_ps(eight, eight, 1));
    const __m256 two = both(four, _mm256_permute_ps(four, 0x4e));
    return _mm256_cvtss_f32(both(two, _mm256_permute_ps(two, 0xb1)));
}
INLINE float hsum(vf v) {
    return fold(v, [](__m256 a, __m256 b) __attribute__((always_inline)) { return a + b; });
}
INLINE float hmax(vf v) {
    return fold(v, [](__m256 a, __m256 b) __attribute__((always_inline)) { return _mm256_max_ps(a, b); });
}
#else
INLINE float hsum(vf v) {
    float lane[W];
    store(lane, v);
    for (int half = W / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lane[i] += lane[i + half];
    return lane[0];
}
INLINE float hmax(vf v) {
    float lane[W];
    store(lane, v);
    float best = lane[0];
    for (int i = 1; i < W; i++) best = lane[i] > best ? lane[i] : best;
    return best;
}
#endif

// e^x: 2^n by exponent bits, the rest by a polynomial of degree 6 (Cephes' expf); error below 2 ulp. 0 below -87.3.
INLINE vf vexp(vf x) {
#if OMNI_LANES == 16
    // 2^n by the instruction for it, 2^f for f in [-1/2, 1/2] by its Taylor polynomial of degree 7. Min keeps a NaN, which
    // is its second operand. What would not be a normal number is left out: Intel takes a hundred cycles for such a vector.
    const __m512 y = _mm512_min_ps(splat(88.37f), (__m512)x);
    const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, splat(-87.3f), _CMP_NLT_UQ);
    const __m512 log2e = _mm512_set1_ps(1.44269504f), rest = _mm512_set1_ps(1.92596299e-8f);
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(y, log2e), 8);
    const vf f = (vf)_mm512_fmadd_ps(y, rest, _mm512_fmsub_ps(y, log2e, n));
    vf p = splat(1.52527338e-5f);
    p = p * f + splat(1.54035304e-4f);
    p = p * f + splat(1.33335581e-3f);
    p = p * f + splat(9.61812911e-3f);
    p = p * f + splat(5.55041087e-2f);
    p = p * f + splat(2.40226507e-1f);
    p = p * f + splat(6.93147181e-1f);
    p = p * f + splat(1.0f);
    return (vf)_mm512_maskz_scalef_ps(normal, (__m512)p, n);
#else
    const vf low = splat(-87.3f), high = splat(88.37f), magic = splat(12582912.0f);
    vf y = vmax(vmin(x, high), low);
    y = x != x ? x : y;
    vf shifted = y * splat(1.44269504088896341f) + magic;
    vf n = shifted - magic;
    vf r = y - n * splat(0.693359375f);
    r = r - n * splat(-2.12194440e-4f);
    vf p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * r * r + r + splat(1.0f);
    vi exponent = ((vi)shifted - (vi)magic) << 23;
    vf scaled = (vf)((vi)p + exponent);
    scaled = x < low ? vf{} : scaled;
    return x != x ? x : scaled;
#endif
}
INLINE vf silu(vf x) {
    const vf d = splat(1.0f) + vexp(-x);
#if OMNI_LANES == 16
    const vf r = (vf)_mm512_rcp14_ps((__m512)d);  // and one step of Newton's: a division takes four times as long
    return x * (r * (splat(2.0f) - d * r));
#else
    return x / d;
#endif
}

#if OMNI_LANES >= 8
// Four values of a row.
template <int DT>
INLINE __m128 four_lanes(const char* p) {
    if constexpr (DT == OMNI_F32) return _mm_loadu_ps(reinterpret_cast<const float*>(p));
    const __m128i half = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return _mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(half), 16));
}
#endif

// Four columns of W rows, one vector each: out[i][j] = row[j][i], from `at` bytes on. Four lanes of four rows are loaded
// into each vector, which halves the shuffles of a transposition.
template <int DT>
INLINE void columns(const char* const* rows, int64_t at, vf (&out)[4]) {
#if OMNI_LANES == 16
    __m512 row[4];
    unroll<4>(EACH {
        row[i] = _mm512_castps128_ps512(four_lanes<DT>(rows[i] + at));
        row[i] = _mm512_mask_broadcast_f32x4(row[i], 0x00f0, four_lanes<DT>(rows[i + 4] + at));
        row[i] = _mm512_mask_broadcast_f32x4(row[i], 0x0f00, four_lanes<DT>(rows[i + 8] + at));
        row[i] = _mm512_mask_broadcast_f32x4(row[i], 0xf000, four_lanes<DT>(rows[i + 12] + at));
    });
    const __m512d a = (__m512d)_mm512_unpacklo_ps(row[0], row[1]), b = (__m512d)_mm512_unpackhi_ps(row[0], row[1]);
    const __m512d c = (__m512d)_mm512_unpacklo_ps(row[2], row[3]), d = (__m512d)_mm512_unpackhi_ps(row[2], row[3]);
    out[0] = (vf)_mm512_unpacklo_pd(a, c);
    out[1] = (vf)_mm512_unpackhi_pd(a, c);
    out[2] = (vf)_mm512_unpacklo_pd(b, d);
    out[3] = (vf)_mm512_unpackhi_pd(b, d);
#elif OMNI_LANES == 8
    __m256 row[4];
    unroll<4>(EACH {
        row[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(four_lanes<DT>(rows[i] + at)), four_lanes<DT>(rows[i + 4] + at), 1);
    });
    const __m256d a = (__m256d)_mm256_unpacklo_ps(row[0], row[1]), b = (__m256d)_mm256_unpackhi_ps(row[0], row[1]);
    const __m256d c = (__m256d)_mm256_unpacklo_ps(row[2], row[3]), d = (__m256d)_mm256_unpackhi_ps(row[2], row[3]);
    out[0] = (vf)_mm256_unpacklo_pd(a, c);
    out[1] = (vf)_mm256_unpackhi_pd(a, c);
    out[2] = (vf)_mm256_unpacklo_pd(b, d);
    out[3] = (vf)_mm256_unpackhi_pd(b, d);
#else
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < W; j++) out[i][j] = get(rows[j] + at, DT, i);
#endif
}
