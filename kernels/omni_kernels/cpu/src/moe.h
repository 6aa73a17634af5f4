// The gated MLP of many experts. Included inside namespace OMNI_NS, after gemm.h.
//
//  ids --count--> chunks of (expert, <= 96 rows) --phase 1--> h = silu(gate) * up, already packed as rows of GEMM 2
//                                                --sync--> phase 2: by output columns, experts in order: out += w * y
struct Chunk {
    const uint8_t *w13, *w2;
    const float *scale13, *scale2;
    int64_t wide;   // I
    int64_t row;    // first of the sorted rows
    int64_t rows;
    int64_t hidden_at;  // where its h starts, in values
    int32_t dtype13, dtype2;
};

struct Moe {
    const omni_experts* experts;
    int64_t rows, top_k;
    const void* x;          // [rows, H], float32 or, where rows are taken by pairs, bfloat16
    const int64_t* ids;     // [rows, top_k]; null: every row to expert 0 with weight 1
    const float* weights;
    float* out;             // [rows, H], added to
    const void* next;       // the weights that are read after these, or null
    // Made by `plan`.
    int64_t* source;        // sorted row -> row of x
    float* share;           // sorted row -> weight
    Chunk* chunk;
    int64_t chunks;
    void* hidden;           // float32 or pairs, packed, or bfloat16 rows; float32 rows before they become whole numbers
    Quad* quads;            // h packed, where weights and rows are whole numbers
    RowScales by;           // its scales
    int64_t planes;
    int64_t* start;         // [E + 1]
};

static int64_t most_rows(const Moe& m) {
    return m.rows * m.top_k + (m.experts->shared13.data ? m.rows : 0);
}

static void carve(Moe& m, Carver& carver) {
    const int64_t rows = most_rows(m), e = m.experts->experts;
    const int64_t wide = m.experts->w13.n / 2, shared = m.experts->shared13.data ? m.experts->shared13.n / 2 : 0;
    m.source = carver.take<int64_t>(rows);
    m.share = carver.take<float>(rows);
    m.planes = planes_of(m.experts->w13.dtype);
    const int64_t chunks = rows * m.planes / CHUNK_ROWS + e + 2;
    m.chunk = carver.take<Chunk>(chunks);
    m.start = carver.take<int64_t>(e + 2);
    // An AMX tile reads 16 rows, whatever there is.
    const int64_t over = 16 * row_room(wide > shared ? wide : shared);
    const int64_t values = m.rows * m.top_k * row_room(wide) + m.rows * row_room(shared) + over;
    m.hidden = carver.take<float>(values);
    const int64_t quads = of_quads(m.experts->w13.dtype) ? m.planes : 0;
    m.quads = carver.take<Quad>(quads ? quads * values / 4 + chunks * W : 0);
    m.by = {carver.take<float>(quads ? rows : 0), carver.take<int32_t>(quads * rows), m.planes};
}

static void add_chunks(Moe& m, const omni_matrix& w13, const omni_matrix& w2, int64_t expert, int64_t row, int64_t rows,
                       int64_t& hidden_at) {
    if (!rows) return;
    const int64_t wide = w13.n / 2, most = CHUNK_ROWS / m.planes, parts = (rows + most - 1) / most;
    const int64_t panels13 = 2 * panels(wide), panels2 = panels(w2.n);
    for (int64_t i = 0; i < parts; i++) {
        const int64_t a = i * rows / parts, b = (i + 1) * rows / parts;
        Chunk& c = m.chunk[m.chunks++];
        c.w13 = static_cast<const uint8_t*>(w13.data) + expert * panels13 * panel_bytes(w13.k, w13.dtype);
        c.w2 = static_cast<const uint8_t*>(w2.data) + expert * panels2 * panel_bytes(w2.k, w2.dtype);
        c.scale13 = w13.scale ? w13.scale + expert * panels13 * 16 : nullptr;
        c.scale2 = w2.scale ? w2.scale + expert * panels2 * 16 : nullptr;
        c.wide = wide;
        c.row = row + a;
        c.rows = b - a;
        c.hidden_at = hidden_at;
        c.dtype13 = w13.dtype;
        c.dtype2 = w2.dtype;
        hidden_at += (b - a) * row_room(wide);
    }
}

// Counting sort by expert; ids of -1 take no part. By one member.
static int plan(Moe& m, int64_t* expert_tokens) {
    const int64_t e = m.experts->experts, slots = m.rows * m.top_k;
    int64_t* at = m.start + 1;
    for (int64_t i = -1; i <= e; i++) at[i] = 0;
    for (int64_t i = 0; i < slots; i++) {
        const int64_t id = m.ids ? m.ids[i] : 0;
        if (id < -1 || id >= e) return OMNI_BAD_EXPERT;
        if (id >= 0) at[id]++;
    }
    for (int64_t i = 0; i < e; i++) {
        if (expert_tokens) expert_tokens[i] += at[i];
        at[i] += at[i - 1];
    }
    m.chunks = 0;
    int64_t hidden_at = 0;
    for (int64_t i = 0; i < e; i++)
        add_chunks(m, m.experts->w13, m.experts->w2, i, at[i - 1], at[i] - at[i - 1], hidden_at);
    const int64_t sorted = at[e - 1];
    for (int64_t i = 0; i < slots; i++) {
        const int64_t id = m.ids ? m.ids[i] : 0;
        if (id < 0) continue;
        const int64_t place = at[id - 1]++;
        m.source[place] = i / m.top_k;
        m.share[place] = m.ids ? m.weights[i] : 1.0f;
    }
    if (m.experts->shared13.data) {
        for (int64_t i = 0; i < m.rows; i++) {
            m.source[sorted + i] = i;
            m.share[sorted + i] = 1.0f;
        }
        add_chunks(m, m.experts->shared13, m.experts->shared2, 0, sorted, m.rows, hidden_at);
    }
    return OMNI_OK;
}

// A panel of h of one row: as float32, or as pairs.
INLINE void put_panel(const float* lane, float* out, float) { __builtin_memcpy(out, lane, 64); }
INLINE void put_panel(const float* lane, float* out, Pair) {
    uint16_t half[16];
    round_row(lane, 16, half);
    __builtin_memcpy(out, half, 32);
}

// h of gate and up panels side by side, written in the row blocks that GEMM 2 reads.
template <class A>
INLINE void activate(const Chunk& c, int64_t panel, int64_t count, const float* tile_out, A* hidden) {
    const int64_t padded = even(c.wide), each = K_EACH<A>;
    Blocks blocks(c.rows);
    float part[ROW_VECTORS][16];
    const char* row[ROW_VECTORS];
    for (int64_t r = 0; r < ROW_VECTORS; r++) row[r] = reinterpret_cast<const char*>(part[r]);
    for (int64_t b = 0; b < blocks.count; b++) {
        const int64_t r0 = blocks.first(b), mr = blocks.size(b);
        float* out = reinterpret_cast<float*>(hidden + (c.hidden_at + r0 * padded) / each);
        for (int64_t q = 0; q < count; q += 2) {
            const int64_t column = (panel + q) / 2 * 16, n = min64(16, padded - column) / each;
            for (int64_t r = 0; r < mr; r++) {
                float lane[16];
                for (int v = 0; v < 16; v += W) {
                    const float* gate = tile_out + (r0 + r) * LDC + q * 16 + v;
                    store(lane + v, silu(load(gate)) * load(gate + 16));
                }
                put_panel(lane, part[r], A{});
            }
            float* to = out + column / each * mr;
            if (mr == 1) __builtin_memcpy(to, part[0], size_t(n) * 4);
            else
                for (int64_t i = 0; i < n; i += 4) {
                    vf four[4];
                    columns<OMNI_F32>(row, i * 4, four);
                    for (int64_t j = 0; j < min64(4, n - i); j++) store_front(to + (i + j) * mr, four[j], mr);
                }
        }
    }
}

// As `activate`, h in rows: bfloat16 for AMX, or float32 whose scales are not known before all panels are done. What pads
// the last panel is zero, for weights there are.
INLINE void put_lanes(const float* lane, float* out) { __builtin_memcpy(out, lane, 64); }
INLINE void put_lanes(const float* lane, uint16_t* out) { round_row(lane, 16, out); }
template <class X>
INLINE void activate_rows(const Chunk& c, int64_t panel, int64_t count, const float* tile_out, X* hidden) {
    for (int64_t q = 0; q < count; q += 2) {
        const int64_t column = (panel + q) / 2 * 16;
        for (int64_t r = 0; r < c.rows; r++) {
            float lane[16];
            for (int v = 0; v < 16; v += W) {
                const float* gate = tile_out + r * LDC + q * 16 + v;
                store(lane + v, silu(load(gate)) * load(gate + 16));
            }
            X* out = hidden + c.hidden_at + r * row_room(c.wide) + column;
            put_lanes(lane, out);
            if (column + 16 >= c.wide)  // a tile's other half
                for (int j = 16; j < 32; j++) out[j] = 0;
        }
    }
}

// Where chunk i's h lies: as quads a vector after each is room for `pack_rows`, for chunks are packed in any order.
template <class A>
INLINE A* hidden_of(const Moe& m, int64_t i) {
    const int64_t at = m.chunk[i].hidden_at;
    if constexpr (K_EACH<A> == 4) return m.quads + at * m.planes / 4 + i * W;
    else if constexpr (WHOLE<A>) return reinterpret_cast<A*>(m.quads) + at * m.planes;
    else return static_cast<A*>(m.hidden) + at / K_EACH<A>;
}

// The rows of h of all chunks -> whole numbers.
template <class A>
static void pack_hidden(Team& team, const Moe& m) {
    int64_t most = 0;
    for (int64_t i = 0; i < m.chunks; i++) most = m.chunk[i].wide > most ? m.chunk[i].wide : most;
    Scratch<A> scratch = Scratch<A>::get(most);
    if (!scratch.c) return team.fail(OMNI_NO_MEMORY);
    const float* hidden = static_cast<const float*>(m.hidden);
    for (int64_t i; (i = team.next(m.chunks)) >= 0;) {
        const Chunk& c = m.chunk[i];
        scratch.by.scale = m.by.scale + c.row;
        scratch.by.sum = m.by.sum + c.row * m.planes;
        scratch.template pack<float>(c.rows, c.wide, m.planes, hidden_of<A>(m, i),
                                     [&](int64_t r) { return hidden + c.hidden_at + r * row_room(c.wide); });
    }
}

template <class A, class X>
static void moe_up(Team& team, const Moe& m) {
    const int64_t k = m.experts->w13.k;
    const auto* x = static_cast<const X*>(m.x);
    Scratch<A> scratch = Scratch<A>::get(k);
    if (!scratch.c) return team.fail(OMNI_NO_MEMORY);
    int64_t most = 0;
    for (int64_t i = 0; i < m.chunks; i++) most = m.chunk[i].wide > most ? m.chunk[i].wide : most;
    const int64_t size = panels_a_task(2 * panels(most), m.chunks, team.size());
    const int64_t groups = most ? (2 * panels(most) + size - 1) / size : 0;
    int64_t packed = -1;
    for (int64_t task; (task = team.next(m.chunks * groups)) >= 0;) {
        const int64_t i = task / groups, p0 = task % groups * size;
        const Chunk& c = m.chunk[i];
        const int64_t p1 = min64(p0 + size, 2 * panels(c.wide));
        if (p0 >= p1) continue;
        if (i != packed)
            scratch.template pack<X>(c.rows, k, m.planes, scratch.rows,
                                     [&](int64_t r) { return x + m.source[c.row + r] * k; });
        packed = i;
        const bool last = team.size() == 1 && p1 == 2 * panels(c.wide);
        const uint8_t* next = !last ? nullptr : i + 1 < m.chunks ? m.chunk[i + 1].w13 : m.chunk[0].w2;
        multiply(scratch.rows, c.rows, c.w13, c.scale13, k, c.dtype13, p0, p1, next, scratch,
                 [&](int64_t p, int64_t count, const float* out) {
                     if constexpr (WHOLE<A>) activate_rows(c, p, count, out, static_cast<float*>(m.hidden));
                     else if constexpr (TILED<A>) activate_rows(c, p, count, out, static_cast<uint16_t*>(m.hidden));
                     else activate(c, p, count, out, static_cast<A*>(m.hidden));
                 });
    }
}

// out += share * y for the `count` panels from `p` on.
INLINE void add_shares(const Moe& m, const Chunk& c, int64_t h, int64_t p, int64_t count, const float* y) {
    const int64_t first = p * 16, n = min64(count * 16, h - first);
    for (int64_t r = 0; r < c.rows; r++) {
        float* out = m.out + m.source[c.row + r] * h + first;
        const float share = m.share[c.row + r];
        int64_t j = 0;
        for (; j + W <= n; j += W) store(out + j, load(y + r * LDC + j) * splat(share) + load(out + j));
        for (; j < n; j++) out[j] = y[r * LDC + j] * share + out[j];
    }
}

// Panels a task of the down projection takes: all for few rows, else so many that the sums stay in L2.
INLINE int64_t down_size(int64_t h, int64_t slots, int team) {
    if (team == 1) return slots <= 64 ? panels(h) : 32;
    const int64_t size = (panels(h) + 4 * team - 1) / (4 * team);
    return size > 32 ? 32 : size < STEP ? STEP : (size + STEP - 1) / STEP * STEP;
}

template <class A>
static void moe_down(Team& team, const Moe& m) {
    const int64_t h = m.experts->w2.n, k = m.experts->w2.k, shared = m.experts->shared2.k;
    if constexpr (WHOLE<A>) {
        pack_hidden<A>(team, m);
        if (!team.sync()) return;
    }
    Scratch<A> scratch = Scratch<A>::get(!TILED<A> ? 0 : k > shared ? k : shared);
    if (!scratch.c) return team.fail(OMNI_NO_MEMORY);
    const int64_t size = down_size(h, m.rows * m.top_k, team.size()), groups = (panels(h) + size - 1) / size;
    for (int64_t task; (task = team.next(groups)) >= 0;) {
        const int64_t p0 = task * size, p1 = min64(p0 + size, panels(h));
        for (int64_t i = 0; i < m.chunks; i++) {
            const Chunk& c = m.chunk[i];
            const uint8_t* next = p1 == panels(h) ? static_cast<const uint8_t*>(m.next) : nullptr;
            if (i + 1 < m.chunks)
                next = m.chunk[i + 1].w2 + p0 * panel_bytes(m.chunk[i + 1].wide, m.chunk[i + 1].dtype2);
            scratch.by = {m.by.scale + c.row, m.by.sum + c.row * m.planes, m.planes};
            multiply(hidden_of<A>(m, i), c.rows, c.w2, c.scale2, c.wide, c.dtype2, p0, p1, next, scratch,
                     [&](int64_t p, int64_t count, const float* y) { add_shares(m, c, h, p, count, y); });
        }
    }
}
