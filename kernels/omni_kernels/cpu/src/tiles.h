// Products on AMX tiles. Included inside namespace OMNI_NS, by gemm.h.
//
//   A: rows as they lie, bfloat16 or int8, `row_room(k)` values apart         B: panels, as for pairs and quads
//
// 32 values of k of a bfloat16 panel, or 64 of a panel of quads, are one B tile as they lie. All tiles have 16 rows, for fewer
// take as long; what the rows beyond the last hold is never looked at. Every output of bfloat16 is summed in the same order,
// by 32 k, whatever rows share its tile; sums of int8 are exact.
template <class A>
struct TilesInUse {};  // what a member of the team holds while it multiplies

#if defined(OMNI_AMX)
struct alignas(64) TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
constexpr TileConfig TILE_CONFIG{};

struct TilesHeld {
    TilesHeld() { _tile_loadconfig(&TILE_CONFIG); }
    ~TilesHeld() { _tile_release(); }
    TilesHeld(const TilesHeld&) = delete;
    TilesHeld& operator=(const TilesHeld&) = delete;
};
template <>
struct TilesInUse<Half> : TilesHeld {};
template <>
struct TilesInUse<Byte> : TilesHeld {};

// c[16 or (second) 32][LDC] = a . two panels, `bytes` of k in each row. Each step fetches `fetched` bytes from `ahead` on into L2.
template <class A>
INLINE void tile_products(const char* a, int64_t stride, bool second, const uint8_t* b0, const uint8_t* b1, int64_t bytes,
                          float* c, const uint8_t* ahead, int fetched) {
#define OMNI_DOT(sum, rows, panel)                                    \
    if constexpr (sizeof(A) == 2) _tile_dpbf16ps(sum, rows, panel); \
    else _tile_dpbssd(sum, rows, panel)
    __asm__ volatile("" ::: "memory");  // the intrinsics do not say that they read and write memory
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (const char* end = a + bytes; a < end; a += 64) {
        for (int line = 0; line < fetched; line += 64) __builtin_prefetch(ahead + line, 0, 2);
        ahead += fetched;
        _tile_loadd(6, b0, 64);
        _tile_loadd(7, b1, 64);
        _tile_loadd(4, a, stride);
        OMNI_DOT(0, 4, 6);
        OMNI_DOT(1, 4, 7);
        if (second) {
            _tile_loadd(5, a + 16 * stride, stride);
            OMNI_DOT(2, 5, 6);
            OMNI_DOT(3, 5, 7);
        }
        b0 += 1024;
        b1 += 1024;
    }
    _tile_stored(0, c, LDC * 4);
    _tile_stored(1, c + 16, LDC * 4);
    if (second) {
        _tile_stored(2, c + 16 * LDC, LDC * 4);
        _tile_stored(3, c + 16 * LDC + 16, LDC * 4);
    }
    __asm__ volatile("" ::: "memory");
#undef OMNI_DOT
}

// An int8 panel as bfloat16, padded to whole tiles.
INLINE void widen_panel(const uint8_t* src, int64_t k, uint8_t* dst) {
    vu_any* out = reinterpret_cast<vu_any*>(dst);
    int64_t i = 0;
    for (; i + 4 <= k; i += 4) {
        vu first, second;
        pairs_of_line(src + i * 16, first, second);
        out[i / 2] = first;
        out[i / 2 + 1] = second;
    }
    for (; i < k; i += 2) out[i / 2] = pair_load<OMNI_I8>(src + i * 16);
    for (; i % 32; i += 2) out[i / 2] = vu{};
}

template <class A>
INLINE void multiply_tiles(const A* a, int64_t rows, const uint8_t* data, int64_t k, int dtype, int64_t count,
                           const uint8_t* next, const Scratch<A>& scratch) {
    const int64_t stride = panel_bytes(k, dtype), room = row_room(k) * int64_t(sizeof(A));
    const int64_t bytes = (k * int64_t(sizeof(A)) + 63) & ~int64_t(63);
    uint8_t* wide = static_cast<uint8_t*>(scratch.half);
    for (int64_t p = 0; p < count; p += 2) {
        const bool two = p + 1 < count;
        const uint8_t *b0 = data + p * stride, *b1 = two ? b0 + stride : b0;
        const uint8_t* ahead = p + 2 < count ? b0 + 2 * stride : next;
        if (dtype == OMNI_I8) {
            widen_panel(b0, k, wide);
            if (two) widen_panel(b1, k, wide + bytes * 16);
            b0 = wide;
            b1 = two ? wide + bytes * 16 : wide;
        }
        for (int64_t r = 0; r < rows; r += 32)
            tile_products<A>(reinterpret_cast<const char*>(a) + r * room, rows == 1 ? 0 : room, rows - r > 16, b0, b1, bytes,
                             scratch.c + r * LDC + p * 16, ahead, r ? 0 : dtype == OMNI_I8 ? 1024 : 2048);
    }
}
INLINE void multiply_panels(const Half* a, int64_t rows, const uint8_t* data, int64_t k, int dtype, int64_t count,
                            const uint8_t* next, const Scratch<Half>& scratch) {
    multiply_tiles(a, rows, data, k, dtype, count, next, scratch);
}
INLINE void multiply_panels(const Byte* a, int64_t rows, const uint8_t* data, int64_t k, int dtype, int64_t count,
                            const uint8_t* next, const Scratch<Byte>& scratch) {
    multiply_tiles(a, rows, data, k, dtype, count, next, scratch);
}
#endif
