// Attention of bfloat16 on AMX tiles, whose columns are query vectors. Included inside namespace OMNI_NS, after attention.h.
//
//   scores [16 keys][16 vectors] = keys as they lie [16][dim] . queries as pairs [dim/2][16][2]
//   weights: a softmax down the columns, rounded to bfloat16
//   out [16 vectors][16 of value_dim] = out * keep + weights [16][64 keys] . values as pairs [32][16][2]
//
// With several heads a tile's columns are of some of them: where a head's keys meet another's column the query is zero.
#if defined(OMNI_AMX)
INLINE bool fits_tiles(const omni_cache& c) { return c.dtype == OMNI_BF16 && c.dim % 32 == 0 && c.value_dim % 16 == 0; }

struct TileAttention {
    uint32_t* q;  // for each group of 16 vectors and each head of it: dim / 32 tiles
    int32_t* row;  // of each vector, from the block's first
    float *s, *o, *most, *sum, *keep, *part;
    uint32_t *pairs, *p, *v;  // weights [32][16], these transposed: two tiles; values: for each head value_dim / 16 times two
    char* key;
    int64_t heads_each;  // heads of a group, at most

    static TileAttention get(int64_t vectors, int64_t each, const omni_cache& c) {
        TileAttention t;
        t.heads_each = min64(c.heads, 15 / each + 2);
        Carver count{nullptr};
        t.carve(count, (vectors + 15) / 16, each, c);
        Carver carver{static_cast<char*>(member_memory(count.used))};
        t.q = nullptr;
        if (carver.base) t.carve(carver, (vectors + 15) / 16, each, c);
        return t;
    }
    void carve(Carver& from, int64_t groups, int64_t each, const omni_cache& c) {
        q = from.take<uint32_t>(groups * heads_each * c.dim * 8);
        row = from.take<int32_t>(groups * 16);
        s = from.take<float>(KEYS * 16);
        o = from.take<float>(groups * 16 * c.value_dim);
        most = from.take<float>(groups * 16);
        sum = from.take<float>(groups * 16);
        keep = from.take<float>(16);
        part = from.take<float>(256);
        pairs = from.take<uint32_t>(KEYS / 2 * 16);
        p = from.take<uint32_t>(KEYS / 2 * 16);
        v = from.take<uint32_t>(min64(c.heads, groups * 16 / each) * c.value_dim * (KEYS / 2));
        key = from.take<char>(KEYS * c.dim * 2);
    }
    uint32_t* queries(const omni_cache& c, int64_t group, int64_t head) const {
        return q + (group * heads_each + head) * c.dim * 8;
    }
};

// Heads [first, last) of a block that have vectors in a group of 16, and the group's vectors of one of them.
struct GroupHeads {
    int64_t first, last;
};
INLINE GroupHeads heads_of(int64_t group, int64_t each, int64_t heads) {
    return {group * 16 / each, min64(heads, (group * 16 + 15) / each + 1)};
}

static void begin_tiles(const Attend& a, const Block& b, TileAttention& t) {
    const omni_cache& c = *a.cache;
    const int64_t group = a.q_heads / c.heads, each = b.rows * group, vectors = b.heads * each;
    const int64_t groups = (vectors + 15) / 16, dim = c.dim;
    __builtin_memset(t.q, 0, size_t(groups * t.heads_each * dim * 32));
    __builtin_memset(t.o, 0, size_t(groups * 16 * c.value_dim * 4));
    float* scaled = reinterpret_cast<float*>(t.key);
    for (int64_t v = 0; v < groups * 16; v++) {
        const int64_t head = v / each, m = v % each;
        t.row[v] = int32_t(m / group);
        t.most[v] = -__builtin_inff();
        t.sum[v] = 0.0f;
        if (v >= vectors) continue;
        const float* q = a.q + (b.r0 + m / group) * a.q_stride + ((b.head + head) * group + m % group) * dim;
        for (int64_t d = 0; d < dim; d++) scaled[d] = q[d] * a.scale;
        uint32_t* out = t.queries(c, v / 16, head - heads_of(v / 16, each, b.heads).first) + v % 16;
        for (int64_t d = 0; d < dim; d += 2)
            out[d * 8] = to_bf16(scaled[d]) | uint32_t(to_bf16(scaled[d + 1])) << 16;
    }
}

// Values of one head as pairs of keys, zeros beyond the last key, [value_dim / 16][2][16][16].
static void pair_values(const TileRows& rows, int64_t offset, int64_t width, uint32_t* out) {
    const auto half = [](const char* p) __attribute__((always_inline)) {
        return (vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    };
    for (int64_t j = 0; j < KEYS; j += 2) {
        uint32_t* to = out + j / 32 * 256 + j % 32 * 8;
        for (int64_t d = 0; d < width; d += 16, to += 512) {
            const vu low = j < rows.n ? half(rows.value[j] + offset + d * 2) : vu{};
            const vu high = j + 1 < rows.n ? half(rows.value[j + 1] + offset + d * 2) : vu{};
            *reinterpret_cast<vu_any*>(to) = low | high << 16;
        }
    }
}

// The first of each 16 keys of one head, `stride` apart: as they lie, or copied where blocks do not hold whole 16.
INLINE int64_t find_keys(const omni_cache& c, const TileRows& rows, int64_t offset, char* room, const char* (&at)[4]) {
    const int64_t bytes = c.dim * 2;
    const bool lie = c.block_size % 16 == 0;
    for (int64_t j = 0; j < rows.n; j++) {
        if (j % 16 == 0) at[j / 16] = lie ? rows.key[j] + offset : room + j * bytes;
        if (!lie) __builtin_memcpy(room + j * bytes, rows.key[j] + offset, size_t(bytes));
    }
    return lie ? c.row_stride * 2 : bytes;
}

// s [tiles * 16 keys][16 vectors] += keys of one head . its queries in a group, in tiles 0 to 3.
INLINE void score_tiles(const char* const (&at)[4], int64_t stride, int64_t tiles, const uint32_t* q, int64_t dim) {
    __asm__ volatile("" ::: "memory");
    for (int64_t d = 0; d < dim; d += 32, q += 256) {
        _tile_loadd(4, q, 64);
        _tile_loadd(5, at[0] + d * 2, stride);
        _tile_dpbf16ps(0, 5, 4);
        if (tiles < 2) continue;
        _tile_loadd(6, at[1] + d * 2, stride);
        _tile_dpbf16ps(1, 6, 4);
        if (tiles < 3) continue;
        _tile_loadd(5, at[2] + d * 2, stride);
        _tile_dpbf16ps(2, 5, 4);
        if (tiles < 4) continue;
        _tile_loadd(6, at[3] + d * 2, stride);
        _tile_dpbf16ps(3, 6, 4);
    }
}
INLINE void store_scores(float* s) {
    _tile_stored(0, s, 64);
    _tile_stored(1, s + 256, 64);
    _tile_stored(2, s + 512, 64);
    _tile_stored(3, s + 768, 64);
    __asm__ volatile("" ::: "memory");
}

// Scores of `n` keys, a multiple of 32, -> weights; each column sees `seen` of them. Leaves what older sums must be scaled by.
template <bool MASKED>
INLINE void soften_columns(TileAttention& t, int64_t n, vi seen, float* most, float* sum) {
    const vf before = load(most), lowest = splat(-__builtin_inff());
    vf high[2] = {before, before};
    for (int64_t j = 0; j < n; j += 2)
        unroll<2>(EACH {
            vf x = load(t.s + (j + i) * 16);
            if constexpr (MASKED) {
                x = seen > int32_t(j + i) ? x : lowest;
                store(t.s + (j + i) * 16, x);
            }
            high[i] = vmax(x, high[i]);
        });
    const vf top = vmax(high[0], high[1]);
    vf total{};
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                           20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    for (int64_t j = 0; j < n; j += 2) {
        vf x[2];
        unroll<2>(EACH {
            x[i] = vexp(load(t.s + (j + i) * 16) - top);
            total += x[i];
        });
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)x[1], (__m512)x[0]);
        _mm512_store_si512(t.pairs + j * 8, _mm512_permutexvar_epi16(order, both));
    }
    const vf keep = before == lowest ? vf{} : vexp(before - top);
    store(t.keep, keep);
    store(most, top);
    store(sum, load(sum) * keep + total);
}

// Sums of one head's vectors [v0, v1) of a group: out = out * keep + weights . values.
INLINE void weigh_values(TileAttention& t, const uint32_t* v, int64_t width, bool both, int64_t v0, int64_t v1, float* o) {
    __asm__ volatile("" ::: "memory");
    _tile_loadd(4, t.p, 64);
    if (both) _tile_loadd(5, t.p + 256, 64);
    for (int64_t d = 0; d < width; d += 16, v += 512) {
        _tile_zero(0);
        _tile_loadd(6, v, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (both) {
            _tile_loadd(7, v + 256, 64);
            _tile_dpbf16ps(0, 5, 7);
        }
        _tile_stored(0, t.part, 64);
        __asm__ volatile("" ::: "memory");
        for (int64_t i = v0; i < v1; i++) {
            float* out = o + i * width + d;
            store(out, load(out) * splat(t.keep[i]) + load(t.part + i * 16));
        }
    }
}

// One group of vectors meets the keys of one tile; `seen0` of them are visible to the block's first row.
static void attend_group(const Attend& a, const Block& b, TileAttention& t, const TileRows& rows, int64_t group,
                         int64_t seen0, int64_t head_bytes) {
    const omni_cache& c = *a.cache;
    const int64_t each = b.rows * (a.q_heads / c.heads), last_vector = min64(group * 16 + 16, b.heads * each);
    const int32_t* row = t.row + group * 16;
    const GroupHeads heads = heads_of(group, each, b.heads);
    const int64_t last = heads.last - heads.first == 1 ? row[last_vector - 1 - group * 16] : b.rows - 1;
    const int64_t n = min64(rows.n, seen0 + last), whole = (n + 31) & ~int64_t(31);
    if (n <= 0) return;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t h = heads.first; h < heads.last; h++) {
        const char* at[4];
        const int64_t stride = find_keys(c, rows, h * head_bytes, t.key, at);
        score_tiles(at, stride, (n + 15) / 16, t.queries(c, group, h - heads.first), c.dim);
    }
    store_scores(t.s);
    const vi seen = load_ints(row) + int32_t(seen0);
    const auto soften = seen0 < whole ? soften_columns<true> : soften_columns<false>;
    soften(t, whole, seen, t.most + group * 16, t.sum + group * 16);
    for (int64_t k = 0; k < whole; k += 32) {
        const char* in[16];
        for (int64_t i = 0; i < 16; i++) in[i] = reinterpret_cast<const char*>(t.pairs + k * 8 + i * 16);
        transpose_rows(in, 16, 16, reinterpret_cast<float*>(t.p + k * 8));
    }
    for (int64_t h = heads.first; h < heads.last; h++) {
        const int64_t v0 = h * each - group * 16, v1 = min64(v0 + each, 16);
        weigh_values(t, t.v + h * c.value_dim * (KEYS / 2), c.value_dim, whole > 32, v0 > 0 ? v0 : 0, v1,
                     t.o + group * 16 * c.value_dim);
    }
}

static void attend_tiles(const Attend& a, const Block& b, TileAttention& t) {
    const omni_cache& c = *a.cache;
    const int64_t vectors = b.heads * b.rows * (a.q_heads / c.heads), head_bytes = c.head_stride * 2;
    const int64_t first = a.ragged->query_start[b.s];
    const int64_t seen0 = a.ragged->kv_lens[b.s] - (a.ragged->query_start[b.s + 1] - first) + (b.r0 - first) + 1;
    const int64_t keys = seen0 + b.rows - 1;
    TileRows tiles[2];
    begin_tiles(a, b, t);
    find_next_rows(a, b, -KEYS, keys, tiles[0]);
    for (int64_t base = 0, turn = 0; base < keys; base += KEYS, turn ^= 1) {
        const TileRows& rows = tiles[turn];
        find_next_rows(a, b, base, keys, tiles[turn ^ 1]);
        Coming(c, b.heads, tiles[turn ^ 1], 1).fetch();
        for (int64_t h = 0; h < b.heads; h++)
            pair_values(rows, h * head_bytes, c.value_dim, t.v + h * c.value_dim * (KEYS / 2));
        for (int64_t group = 0; group * 16 < vectors; group++) attend_group(a, b, t, rows, group, seen0 - base, head_bytes);
    }
    end_block(a, b, false, c.value_dim, t.o, t.sum);
}
#endif
