// What rows are made of while they are multiplied, and how panels are laid out. Included inside namespace OMNI_NS, after simd.h.
struct Pair {  // two successive values of k, bfloat16
    uint32_t bits;
};
struct Quad {  // four successive values of k, int8: see quads.h
    uint32_t bits;
};
struct Half {  // bfloat16 and int8 for AMX, rows as they lie: see tiles.h
    uint16_t bits;
};
struct Byte {
    int8_t value;
};
template <class A>
constexpr int64_t K_EACH = 1;  // values of k in an A
template <>
constexpr int64_t K_EACH<Pair> = 2;
template <>
constexpr int64_t K_EACH<Quad> = 4;

template <class A>
constexpr bool TILED = false;
template <>
constexpr bool TILED<Half> = true;
template <>
constexpr bool TILED<Byte> = true;
template <class A>
constexpr bool WHOLE = false;  // rows are made whole numbers
template <>
constexpr bool WHOLE<Quad> = true;
template <>
constexpr bool WHOLE<Byte> = true;

template <class A>
constexpr bool ROUNDED = false;  // rows are of bfloat16
template <>
constexpr bool ROUNDED<Pair> = true;
template <>
constexpr bool ROUNDED<Half> = true;
template <class A>
using Given = std::conditional_t<ROUNDED<A>, uint16_t, float>;  // what an op's rows are made of

INLINE int64_t even(int64_t k) { return (k + 1) & ~int64_t(1); }
INLINE int64_t quad(int64_t k) { return (k + 3) & ~int64_t(3); }
template <class A>
INLINE int64_t padded_to(int64_t k) { return K_EACH<A> == 4 ? quad(k) : even(k); }
// Values from one row to the next where rows lie as they are: whole tiles, and a line so that rows do not share cache sets.
INLINE int64_t row_room(int64_t k) { return ((k + 63) & ~int64_t(63)) + 64; }
INLINE int64_t panels(int64_t n) { return (n + 15) / 16; }
INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t element_bytes(int dtype) { return dtype == OMNI_F32 ? 4 : dtype == OMNI_BF16 ? 2 : 1; }
INLINE bool of_quads(int dtype) { return dtype == OMNI_W8A8 || dtype == OMNI_W8A16; }
INLINE int64_t planes_of(int dtype) { return dtype == OMNI_W8A16 ? 2 : 1; }
INLINE int64_t panel_bytes(int64_t k, int dtype) {
    const int64_t unit = of_quads(dtype) ? 64 : dtype == OMNI_BF16 ? 32 : 2;
    return (k + unit - 1) / unit * unit * 16 * element_bytes(dtype);
}

// A call's body for each type of rows; null where the compiler lacks the instructions.
struct Bodies {
    TeamBody floats, quads, pairs, halves, bytes;
};
#if defined(OMNI_AMX)
#define OMNI_BODIES(body) {body<float>, body<Quad>, body<Pair>, body<Half>, body<Byte>}
#else
#define OMNI_BODIES(body) {body<float>, body<Quad>, nullptr, nullptr, nullptr}
#endif
// For rows of bfloat16 that stay what they are; null: they cannot. int8 weights are widened on their way to AMX tiles, which
// pays from 8 rows on.
static TeamBody rounded_body(const Bodies& b, bool tiles = true) {
    return tiles && b.halves && amx_ready() ? b.halves : b.pairs && pairs_ready() ? b.pairs : nullptr;
}
static TeamBody exact_body(const Bodies& b, int dtype) {
    return !of_quads(dtype) ? b.floats : b.bytes && amx_ready() ? b.bytes : b.quads;
}

// As `narrow`, by the instruction for it where there is one; that makes zeros of denormal numbers, as products do.
INLINE void round_row(const float* x, int64_t n, uint16_t* out) {
    int64_t i = 0;
#if defined(OMNI_PAIRS)
    for (; i + 16 <= n; i += 16) {
        const __m256bh rounded = _mm512_cvtneps_pbh(_mm512_loadu_ps(x + i));
        __builtin_memcpy(out + i, &rounded, 32);
    }
#endif
    for (; i < n; i++) out[i] = to_bf16(x[i]);
}
