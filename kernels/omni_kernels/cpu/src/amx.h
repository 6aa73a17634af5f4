// The experts' products for bfloat16 rows on AMX tiles. Included inside namespace OMNI_NS, after moe.h.
//
// A panel's 32 values of k are one B tile as they lie. Rows are bfloat16, sums float32; h is rounded to bfloat16.
// Every output is summed over k in the same order, whatever rows share its tile.
#if defined(OMNI_AMX)
struct alignas(64) TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};

// Tiles 0..3: C of (row tile, panel); 4, 5: A; 6, 7: B. Row tiles have r0 and r1 rows.
INLINE void shape_tiles(int r0, int r1, int& now) {
    const int wanted = r0 * 32 + r1;
    if (wanted == now) return;
    now = wanted;
    TileConfig c;
    const int second = r1 ? r1 : r0;
    const int rows[8] = {r0, r0, second, second, r0, second, 16, 16};
    for (int i = 0; i < 8; i++) c.bytes[i] = 64, c.rows[i] = uint8_t(rows[i]);
    _tile_loadconfig(&c);
}

// c[32][LDC] = a[32][k] . two panels. `ahead`: the panels come from memory.
INLINE void amx_tile(const uint16_t* a, int64_t lda, bool second, const uint8_t* b0, const uint8_t* b1, int64_t k,
                     float* c, bool ahead) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const int64_t stride = lda * 2;
    for (int64_t i = 0; i < k; i += 32) {
        if (ahead)
            for (int64_t line = 0; line < 1024; line += 64) {
                __builtin_prefetch(b0 + 4096 + line);
                __builtin_prefetch(b1 + 4096 + line);
            }
        _tile_loadd(6, b0, 64);
        _tile_loadd(7, b1, 64);
        _tile_loadd(4, a + i, stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (second) {
            _tile_loadd(5, a + 16 * lda + i, stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
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
}

// An int8 panel as bfloat16 pairs: -127..127 are exact.
INLINE void widen_panel(const uint8_t* src, int64_t k, uint8_t* dst) {
    for (int64_t i = 0; i < k; i += 2) {
        const vu even = (vu)panel_load<OMNI_I8>(src + i * 16, 0, 0), odd = (vu)panel_load<OMNI_I8>(src + i * 16, 1, 0);
        *reinterpret_cast<vu_any*>(dst + i * 32) = (even >> 16) | (odd & 0xffff0000u);
    }
}

// Rows [rows][lda] of bfloat16 times panels [p0, p1), an even number of them; `done` as in `multiply`.
template <class Done>
INLINE void amx_multiply(const uint16_t* a, int64_t lda, int64_t rows, const uint8_t* data, const float* scale,
                         int64_t k, int dtype, int64_t p0, int64_t p1, uint8_t* wide, float* c, int& shape, Done done) {
    const int64_t stride = panel_bytes(k, dtype);
    for (int64_t p = p0; p < p1; p += 2) {
        const int64_t count = min64(2, p1 - p);
        const uint8_t *b0 = data + p * stride, *b1 = count == 2 ? b0 + stride : b0;
        if (dtype == OMNI_I8) {
            widen_panel(b0, k, wide);
            if (count == 2) widen_panel(b1, k, wide + k * 32);
            b0 = wide;
            b1 = count == 2 ? wide + k * 32 : wide;
        }
        for (int64_t r = 0; r < rows; r += 32) {
            const int64_t n = min64(32, rows - r);
            shape_tiles(int(min64(16, n)), int(n > 16 ? n - 16 : 0), shape);
            amx_tile(a + r * lda, lda, n > 16, b0, b1, k, c + r * LDC, r == 0 && dtype == OMNI_BF16);
        }
        if (scale)
            for (int64_t r = 0; r < rows; r++)
                for (int64_t j = 0; j < count * 16; j += W)
                    store(c + r * LDC + j, load(c + r * LDC + j) * load(scale + p * 16 + j));
        done(p, count, c);
    }
}

struct AmxMoe {
    Moe moe;
    const uint16_t* x;
    uint16_t* hidden;
};

struct AmxScratch {
    uint16_t* rows;
    uint8_t* wide;
    float* c;
    static AmxScratch get(int64_t k) {
        AmxScratch s{};
        Carver count{nullptr};
        s.carve(count, k);
        Carver carver{static_cast<char*>(member_memory(count.used))};
        if (carver.base) s.carve(carver, k);
        return s;
    }
    void carve(Carver& c_, int64_t k) {
        rows = c_.take<uint16_t>(CHUNK_ROWS * k);
        wide = c_.take<uint8_t>(2 * k * 32);
        c = c_.take<float>(CHUNK_ROWS * LDC);
    }
};

INLINE void store_bf16(uint16_t* p, vf v) {
    const vu bits = (vu)v;
    vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    rounded = v != v ? (bits >> 16) | 0x40u : rounded;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16((__m512i)rounded));
}

static void amx_up(Team& team, const AmxMoe& a) {
    const Moe& m = a.moe;
    const int64_t k = m.experts->w13.k;
    AmxScratch s = AmxScratch::get(k);
    if (!s.c) return team.fail(OMNI_NO_MEMORY);
    int64_t most = 0;
    for (int64_t i = 0; i < m.chunks; i++) most = m.chunk[i].wide > most ? m.chunk[i].wide : most;
    const int64_t size = panels_a_task(2 * panels(most), m.chunks, team.size());
    const int64_t groups = most ? (2 * panels(most) + size - 1) / size : 0;
    int64_t packed = -1;
    int shape = -1;
    for (int64_t task; (task = team.next(m.chunks * groups)) >= 0;) {
        const int64_t i = task / groups, p0 = task % groups * size;
        const Chunk& c = m.chunk[i];
        const int64_t p1 = min64(p0 + size, 2 * panels(c.wide));
        if (p0 >= p1) continue;
        if (i != packed)
            for (int64_t r = 0; r < c.rows; r++)
                __builtin_memcpy(s.rows + r * k, a.x + m.source[c.row + r] * k, size_t(k) * 2);
        packed = i;
        amx_multiply(s.rows, k, c.rows, c.w13, c.scale13, k, c.dtype13, p0, p1, s.wide, s.c, shape,
                     [&](int64_t p, int64_t, const float* y) {
                         uint16_t* out = a.hidden + c.hidden_at + p / 2 * 16;
                         for (int64_t r = 0; r < c.rows; r++)
                             store_bf16(out + r * c.wide, silu(load(y + r * LDC)) * load(y + r * LDC + 16));
                     });
    }
    _tile_release();
}

static void amx_down(Team& team, const AmxMoe& a) {
    const Moe& m = a.moe;
    const int64_t h = m.experts->w2.n;
    int64_t most = 0;
    for (int64_t i = 0; i < m.chunks; i++) most = m.chunk[i].wide > most ? m.chunk[i].wide : most;
    AmxScratch s = AmxScratch::get(most);
    if (!s.c) return team.fail(OMNI_NO_MEMORY);
    const int64_t size = down_size(h, m.rows * m.top_k, team.size()), groups = (panels(h) + size - 1) / size;
    int shape = -1;
    for (int64_t task; (task = team.next(groups)) >= 0;) {
        const int64_t p0 = task * size, p1 = min64(p0 + size, panels(h));
        for (int64_t i = 0; i < m.chunks; i++) {
            const Chunk& c = m.chunk[i];
            amx_multiply(a.hidden + c.hidden_at, c.wide, c.rows, c.w2, c.scale2, c.wide, c.dtype2, p0, p1, s.wide, s.c,
                         shape, [&](int64_t p, int64_t count, const float* y) { add_shares(m, c, h, p, count, y); });
        }
    }
    _tile_release();
}

static void amx_body(Team& team, void* context) {
    const AmxMoe& a = *static_cast<AmxMoe*>(context);
    amx_up(team, a);
    if (team.sync()) amx_down(team, a);
}

// Whole tiles only: every k a multiple of 32, weights bfloat16 or int8.
static bool amx_fits(const omni_experts& e) {
    const omni_matrix* all[4] = {&e.w13, &e.w2, &e.shared13, &e.shared2};
    for (const omni_matrix* w : all)
        if (w->data && (w->k % 32 || (w->dtype != OMNI_BF16 && w->dtype != OMNI_I8))) return false;
    return true;
}

static int32_t amx_moe_op(const uint16_t* x, int64_t rows, const omni_experts* experts, const int64_t* ids,
                          const float* weights, int64_t top_k, uint16_t* out, int32_t threads) {
    const int64_t n = rows * experts->w2.n;
    AmxMoe a{};
    Moe& m = a.moe;
    m.experts = experts;
    m.rows = rows;
    m.top_k = top_k;
    m.ids = ids;
    m.weights = weights;
    Carver count{nullptr};
    carve(m, count);
    count.take<float>(n);
    Carver carver{static_cast<char*>(call_memory(count.used))};
    if (!carver.base) return OMNI_NO_MEMORY;
    carve(m, carver);
    m.out = carver.take<float>(n);
    a.x = x;
    a.hidden = static_cast<uint16_t*>(m.hidden);
    for (int64_t i = 0; i < n; i++) m.out[i] = 0.0f;
    int status = plan(m, nullptr);
    if (!status) status = run_team(threads, amx_body, &a);
    if (!status) narrow(m.out, n, out, OMNI_BF16);
    return status;
}
#endif
