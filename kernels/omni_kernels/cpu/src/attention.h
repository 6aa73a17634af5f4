// Causal attention over paged keys, 64 keys at a time with a running softmax (Dao et al. 2022; Milakov and
// Gimelshein 2018). Included inside namespace OMNI_NS, after simd.h.
//
// Tiles start at key 0 and a row masks what it may not see with exact zeros: its result is the same whether it is
// computed alone (decode), in a chunk, or after a prefix that others have computed.
constexpr int64_t KEYS = 64;
#if defined(OMNI_PAIRS)
typedef Pair PAIRS;
#else
typedef float PAIRS;
#endif

struct Attend {
    const float* q;  // [rows, row stride], heads of dim each
    int64_t q_stride, q_heads;
    const omni_ragged* ragged;
    const omni_cache* cache;
    float scale;
    float* out;      // [rows, q_heads * value_dim]
    bool pairs, tiles;  // queries may be rounded to bfloat16 where the keys are of it, and multiplied by pairs; on AMX tiles
};

// Queries and keys are multiplied by values, or by pairs of bfloat16. A pair takes a float's place: as many bytes, and
// what moves floats moves pairs.
template <class A>
INLINE vf meet(vf sum, vf key, const float* q) {
    if constexpr (K_EACH<A> == 1) return splat(*q) * key + sum;
#if defined(OMNI_PAIRS)
    uint32_t both;
    __builtin_memcpy(&both, q, 4);
    return dot_pair(sum, (vu)key, both);
#else
    return sum;
#endif
}

struct AttendScratch {
    float *q, *s, *kt, *row, *v, *o, *most, *sum;
    static AttendScratch get(int64_t vectors, int64_t dim, int64_t value_dim) {
        AttendScratch a;
        Carver count{nullptr};
        a.carve(count, vectors, dim, value_dim);
        Carver carver{static_cast<char*>(member_memory(count.used))};
        if (carver.base) a.carve(carver, vectors, dim, value_dim);
        return a;
    }
    void carve(Carver& c, int64_t vectors, int64_t dim, int64_t value_dim) {
        q = c.take<float>(vectors * (dim + W));
        s = c.take<float>(4 * KEYS);
        kt = c.take<float>((dim + W) * KEYS);
        row = c.take<float>(KEYS * (dim + W));
        v = c.take<float>(KEYS * (value_dim + W));
        o = c.take<float>(vectors * (value_dim + W));
        most = c.take<float>(vectors);
        sum = c.take<float>(vectors);
    }
};

// Where keys [base, base + n) of a sequence and their values lie, those of the first head of a block.
struct TileRows {
    const char* key[KEYS];
    const char* value[KEYS];
    int64_t n = 0;
};

INLINE void find_rows(const Attend& a, const int64_t* table, int64_t head, int64_t base, int64_t n, TileRows& rows) {
    const omni_cache& c = *a.cache;
    const int64_t bytes = c.dtype == OMNI_BF16 ? 2 : 4, step = c.row_stride * bytes;
    rows.n = n;
    int64_t block = base / c.block_size, in_block = base % c.block_size;
    for (int64_t j = 0; j < n; block++, in_block = 0) {
        int64_t at = ((table[block] * c.block_size + in_block) * c.row_stride + head * c.head_stride) * bytes;
        for (; j < n && in_block < c.block_size; j++, in_block++, at += step) {
            rows.key[j] = static_cast<const char*>(c.keys) + at;
            rows.value[j] = static_cast<const char*>(c.values) + at;
        }
    }
}

// Query rows [r0, r0 + rows) of sequence `s`, heads [head, head + heads) of the keys. `after`: the sequence whose keys are read
// next, as a guess; -1 if nobody's.
struct Block {
    int64_t s, r0, rows, head, heads, after;
};

// The tile after that of keys [base, base + KEYS) of a block's `keys`: the next sequence's first where it is the last.
INLINE void find_next_rows(const Attend& a, const Block& b, int64_t base, int64_t keys, TileRows& rows) {
    const omni_ragged& r = *a.ragged;
    const int64_t next = base + KEYS;
    rows.n = 0;
    if (next < keys) find_rows(a, r.tables + r.table_start[b.s], b.head, next, min64(KEYS, keys - next), rows);
    else if (b.after >= 0)
        find_rows(a, r.tables + r.table_start[b.after], 0, 0, min64(KEYS, r.kv_lens[b.after]), rows);
}

// Fetches the next tile into L2 while this one's keys are read, in whole rows, as they lie: head by head, memory would be read
// in steps, which takes up to twice as long.
struct Coming {
    const TileRows* rows;
    int64_t key_bytes, value_bytes;  // of a row, all heads; of heads that do not lie side by side the first
    int64_t each, at = 0;
    // `times`: how often `fetch` will be called.
    Coming(const omni_cache& c, int64_t heads, const TileRows& rows, int64_t times)
        : rows(&rows), each((rows.n + times - 1) / times) {
        const int64_t bytes = c.dtype == OMNI_BF16 ? 2 : 4;
        key_bytes = (c.head_stride == c.dim ? heads : 1) * c.dim * bytes;
        value_bytes = c.keys == c.values ? 0 : (c.head_stride == c.value_dim ? heads : 1) * c.value_dim * bytes;
    }
    __attribute__((always_inline)) void fetch() {
        const int64_t end = min64(at + each, rows->n);
        for (; at < end; at++) {
            for (int64_t i = 0; i < key_bytes; i += 64) __builtin_prefetch(rows->key[at] + i, 0, 2);
            for (int64_t i = 0; i < value_bytes; i += 64) __builtin_prefetch(rows->value[at] + i, 0, 2);
        }
    }
};

// Rows of whole vectors, as float32, padded with zeros, in `room`.
INLINE void copy_rows(const char* const* row, int64_t offset, int64_t n, int64_t width, int64_t padded, int dtype,
                      float* room) {
    for (int64_t j = 0; j < n; j++) {
        float* out = room + j * padded;
        for (int64_t d = 0; d < width; d++) out[d] = get(row[j] + offset, dtype, d);
        for (int64_t d = width; d < padded; d++) out[d] = 0.0f;
    }
}

INLINE void widen_rows(const char* const* row, int64_t offset, int64_t n, int64_t width, float* room) {
    for (int64_t j = 0; j < n; j++)
        for (int64_t d = 0; d < width; d += W) store(room + j * width + d, load_as<OMNI_BF16>(row[j] + offset + d * 2));
}

// Columns of W rows of keys, from `at` bytes on: four, or eight of bfloat16, two moved as one float and parted behind the
// shuffles, which are half as many then.
template <int DT>
constexpr int COLUMNS = DT == OMNI_BF16 && W >= 8 ? 8 : 4;
template <int DT>
INLINE void key_columns(const char* const* key, int64_t at, vf (&out)[4]) {
    columns<COLUMNS<DT> == 8 ? OMNI_F32 : DT>(key, at, out);
}
template <int DT>
INLINE vf column_of(const vf (&four)[4], int i) {
    if constexpr (COLUMNS<DT> == 4) return four[i];
    const vu pair = (vu)four[i / 2];
    return i % 2 ? (vf)(pair & 0xffff0000u) : (vf)(pair << 16);
}

// kt [padded][KEYS] of whole-vector rows; `key` names rows up to a whole vector of them.
template <int DT>
INLINE void transpose_keys(const char* const* key, int64_t n, int64_t padded, float* kt, Coming& coming) {
    constexpr int64_t BYTES = DT == OMNI_BF16 ? 2 : 4;
    for (int64_t j0 = 0; j0 < n; j0 += W) {
        coming.fetch();
        for (int64_t d = 0; d < padded; d += COLUMNS<DT>) {
            vf column[4];
            key_columns<DT>(key + j0, d * BYTES, column);
            unroll<COLUMNS<DT>>(EACH { store(kt + (d + i) * KEYS + j0, column_of<DT>(column, i)); });
        }
    }
}

// s[m][KEYS] = q[m][dim] . keys, for G vectors of keys from j0 on: as `scores`, without the way over kt.
template <class A, int DT, int M, int G>
INLINE void few_scores(const char* const* key, int64_t j0, int64_t dim, const float* q, float* s, Coming& coming) {
    constexpr int64_t BYTES = DT == OMNI_BF16 ? 2 : 4;
    vf acc[G * M] = {};
    for (int g = 0; g < G; g++) coming.fetch();
    for (int64_t d = 0; d < dim; d += COLUMNS<DT>) {
        vf column[G][4];
        unroll<G>(EACH { key_columns<DT>(key + j0 + i * W, d * BYTES, column[i]); });
        unroll<COLUMNS<DT>>([&](auto i) __attribute__((always_inline)) {
            unroll<G>([&](auto g) __attribute__((always_inline)) {
                const vf now = column_of<DT>(column[g], i);
                unroll<M>([&](auto m) __attribute__((always_inline)) {
                    acc[g * M + m] = meet<A>(acc[g * M + m], now, q + m * dim + d + i);
                });
            });
        });
    }
    unroll<G * M>(EACH { store(s + i % M * KEYS + j0 + i / M * W, acc[i]); });
}

// One head's tile: where its keys lie (up to a whole vector of them, the last again), and its values, both padded to
// whole vectors.
struct HeadTile {
    const char* key[KEYS];
    const void* value[KEYS];
    int dtype;    // of the keys
    bool halves;  // the values are of bfloat16, as they lie; else float32
};

// Sums over values of bfloat16 keep even and odd columns apart, W and W of each 2 W; this brings them together.
INLINE void join_halves(const float* sum, float factor, int64_t width, float* out) {
    for (int64_t d = 0; d < width; d += 2 * W)
        for (int i = 0; i < W; i++) {
            out[d + 2 * i] = sum[d + i] * factor;
            out[d + 2 * i + 1] = sum[d + W + i] * factor;
        }
}

INLINE void load_tile(const omni_cache& c, const TileRows& rows, int64_t offset, AttendScratch& s, HeadTile& tile) {
    const int64_t wide = (c.dim + W - 1) / W * W, padded = (c.value_dim + W - 1) / W * W, n = rows.n;
    tile.dtype = wide == c.dim ? c.dtype : OMNI_F32;
    if (wide != c.dim) copy_rows(rows.key, offset, n, c.dim, wide, c.dtype, s.row);
    for (int64_t j = 0; j < n; j++)
        tile.key[j] = wide == c.dim ? rows.key[j] + offset : reinterpret_cast<const char*>(s.row + j * wide);
    for (int64_t j = n; j % W; j++) tile.key[j] = tile.key[n - 1];
    const bool whole = padded == c.value_dim;
    if (tile.halves || (whole && c.dtype == OMNI_F32)) {
        for (int64_t j = 0; j < n; j++) tile.value[j] = rows.value[j] + offset;
        return;
    }
    if (whole) widen_rows(rows.value, offset, n, padded, s.v);
    else copy_rows(rows.value, offset, n, c.value_dim, padded, c.dtype, s.v);
    for (int64_t j = 0; j < n; j++) tile.value[j] = s.v + j * padded;
}

// s[m][KEYS] = q[m][dim] . kt, M rows and N vectors of keys at a time: enough chains to hide a multiply-add's latency.
template <class A, int M, int N>
INLINE void score_vectors(const float* q, const float* kt, int64_t dim, float* s) {
    vf acc[N * M] = {};
    for (int64_t d = 0; d < dim; d++) {
        vf k[N];
        unroll<N>(EACH { k[i] = load(kt + d * KEYS + i * W); });
        unroll<M>([&](auto m) __attribute__((always_inline)) {
            unroll<N>(EACH { acc[m * N + i] = meet<A>(acc[m * N + i], k[i], q + m * dim + d); });
        });
    }
    unroll<N * M>(EACH { store(s + i / N * KEYS + i % N * W, acc[i]); });
}
template <class A, int M>
INLINE void scores(const float* q, const float* kt, int64_t n, int64_t dim, float* s) {
    constexpr int N = W == 16 || (W == 8 && M < 4) ? 4 : 2;
    int64_t j = 0;
    for (; j + N * W <= n; j += N * W) score_vectors<A, M, N>(q, kt + j, dim, s + j);
    for (; j < n; j += W) score_vectors<A, M, 1>(q, kt + j, dim, s + j);
}

// Scores of M rows of KEYS -> weights; of a row's first `n` keys `seen` are visible, none if that is below 1. `most` and `sum`
// are the rows' own; `keep`: what older sums must be scaled by. All rows at once: an exponential is a long chain.
template <int M>
INLINE void soften(float* s, const int64_t* seen, int64_t n, float* most, float* sum, float* keep) {
    const int64_t whole = (n + W - 1) / W * W;
    unroll<M>([&](auto m) __attribute__((always_inline)) {
        for (int64_t j = seen[m] > 0 ? seen[m] : 0; j < whole; j++) s[m * KEYS + j] = -__builtin_inff();
    });
    vf highest[M], top[M], total[M] = {};
    unroll<M>(EACH { highest[i] = load(s + i * KEYS); });
    for (int64_t j = W; j < whole; j += W) unroll<M>(EACH { highest[i] = vmax(load(s + i * KEYS + j), highest[i]); });
    float now[M];
    unroll<M>(EACH {
        now[i] = hmax(highest[i]);
        now[i] = most[i] > now[i] ? most[i] : now[i];
        // A row that has seen nothing has no highest: what is below it is nothing.
        top[i] = splat(now[i] == -__builtin_inff() ? 0.0f : now[i]);
    });
    for (int64_t j = 0; j < whole; j += W) unroll<M>(EACH {
        const vf p = vexp(load(s + i * KEYS + j) - top[i]);
        store(s + i * KEYS + j, p);
        total[i] += p;
    });
    unroll<M>(EACH {
        float lane[W];
        store(lane, vexp(splat(most[i]) - top[i]));
        keep[i] = seen[i] <= 0 ? 1.0f : most[i] == -__builtin_inff() ? 0.0f : lane[0];
        sum[i] = sum[i] * keep[i] + hsum(total[i]);
        most[i] = now[i];
    });
}

// o[m][padded] = o * keep[m] + p[m][n] . rows v[n]; N vectors from column d on, float32 or (HALVES) of bfloat16.
template <int M, int N, bool HALVES>
INLINE void gather_columns(const float* p, const void* const* v, const float* keep, int64_t n, int64_t padded,
                           int64_t d, float* o) {
    vf acc[M * N];
    unroll<M * N>(EACH { acc[i] = load(o + i / N * padded + d + i % N * W) * splat(keep[i / N]); });
    for (int64_t j = 0; j < n; j++) {
        vf x[N];
        if constexpr (HALVES) unroll<N / 2>(EACH {
            const vu both = *reinterpret_cast<const vu_any*>(static_cast<const char*>(v[j]) + d * 2 + i * 4 * W);
            x[2 * i] = (vf)(both << 16);
            x[2 * i + 1] = (vf)(both & 0xffff0000u);
        });
        else unroll<N>(EACH { x[i] = load(static_cast<const float*>(v[j]) + d + i * W); });
        unroll<M>([&](auto m) __attribute__((always_inline)) {
            const vf share = splat(p[m * KEYS + j]);
            unroll<N>(EACH { acc[m * N + i] = share * x[i] + acc[m * N + i]; });
        });
    }
    unroll<M * N>(EACH { store(o + i / N * padded + d + i % N * W, acc[i]); });
}

template <int M, bool HALVES>
INLINE void gather_values(const float* p, const void* const* v, const float* keep, int64_t n, int64_t padded, float* o) {
    int64_t d = 0;
    if constexpr (M < 4)
        for (; d + 4 * W <= padded; d += 4 * W) gather_columns<M, 4, HALVES>(p, v, keep, n, padded, d, o);
    for (; d + 2 * W <= padded; d += 2 * W) gather_columns<M, 2, HALVES>(p, v, keep, n, padded, d, o);
    if constexpr (!HALVES)
        for (; d < padded; d += W) gather_columns<M, 1, false>(p, v, keep, n, padded, d, o);
}

// What the query vectors of one head meet in one tile; vector v of the head is number `at` + v of the block's.
struct Meeting {
    const HeadTile* tile;
    int64_t at, group, seen0, n, dim, padded;  // `seen0` keys of the tile are visible to the block's first row
};

// M vectors from v on, whose scores are in t.s.
template <int M>
INLINE void weigh(AttendScratch& t, const Meeting& x, int64_t v) {
    float keep[M];
    int64_t seen[M];
    for (int i = 0; i < M; i++) seen[i] = min64(x.seen0 + (v + i) / x.group, x.n);
    soften<M>(t.s, seen, x.n, t.most + x.at + v, t.sum + x.at + v, keep);
    float* o = t.o + (x.at + v) * x.padded;
    if (x.tile->halves) gather_values<M, true>(t.s, x.tile->value, keep, x.n, x.padded, o);
    else gather_values<M, false>(t.s, x.tile->value, keep, x.n, x.padded, o);
}

template <class A, int M>
INLINE void attend_vectors(AttendScratch& t, const Meeting& x, int64_t v) {
    Meeting part = x;  // of those keys that the last of the vectors sees
    part.n = min64(x.n, x.seen0 + (v + M - 1) / x.group);
    if (part.n <= 0) return;
    scores<A, M>(t.q + (x.at + v) * x.dim, t.kt, part.n, x.dim, t.s);
    weigh<M>(t, part, v);
}

// The head's only M vectors.
template <class A, int DT, int M>
INLINE void attend_few(AttendScratch& t, const Meeting& x, Coming& coming) {
    const float* q = t.q + x.at * x.dim;
    int64_t j = 0;
    for (; j + 2 * W <= x.n; j += 2 * W) few_scores<A, DT, M, 2>(x.tile->key, j, x.dim, q, t.s, coming);
    for (; j < x.n; j += W) few_scores<A, DT, M, 1>(x.tile->key, j, x.dim, q, t.s, coming);
    weigh<M>(t, x, 0);
}

template <class A, int DT>
INLINE void attend_head(AttendScratch& t, const Meeting& x, int64_t vectors, Coming& coming) {
    if (vectors == 1) return attend_few<A, DT, 1>(t, x, coming);
    if (vectors == 2) return attend_few<A, DT, 2>(t, x, coming);
    transpose_keys<DT>(x.tile->key, x.n, x.dim, t.kt, coming);
    int64_t v = 0;
    for (; v + 4 <= vectors; v += 4) attend_vectors<A, 4>(t, x, v);
    for (; v + 2 <= vectors; v += 2) attend_vectors<A, 2>(t, x, v);
    for (; v < vectors; v++) attend_vectors<A, 1>(t, x, v);
}

// Query vectors [wide], or [wide / 2] pairs, scaled; sums of zero.
INLINE void begin_block(const Attend& a, const Block& b, bool pairs, int64_t wide, int64_t padded, AttendScratch& t) {
    const int64_t group = a.q_heads / a.cache->heads, dim = a.cache->dim, each = b.rows * group;
    for (int64_t v = 0; v < b.heads * each; v++) {
        const int64_t head = b.head + v / each, m = v % each;
        const float* q = a.q + (b.r0 + m / group) * a.q_stride + (head * group + m % group) * dim;
        float* scaled = pairs ? t.row : t.q + v * wide;
        for (int64_t d = 0; d < dim; d++) scaled[d] = q[d] * a.scale;
        for (int64_t d = dim; d < wide; d++) scaled[d] = 0.0f;
        if (pairs) narrow(scaled, wide, t.q + v * (wide / 2), OMNI_BF16);
        for (int64_t d = 0; d < padded; d++) t.o[v * padded + d] = 0.0f;
        t.most[v] = -__builtin_inff();
        t.sum[v] = 0.0f;
    }
}

INLINE void end_block(const Attend& a, const Block& b, bool halves, int64_t padded, const float* o, const float* sum) {
    const int64_t group = a.q_heads / a.cache->heads, width = a.cache->value_dim, each = b.rows * group;
    for (int64_t v = 0; v < b.heads * each; v++) {
        const int64_t head = b.head + v / each, m = v % each;
        float* out = a.out + ((b.r0 + m / group) * a.q_heads + head * group + m % group) * width;
        const float inverse = 1.0f / sum[v];
        if (halves) join_halves(o + v * padded, inverse, width, out);
        else for (int64_t d = 0; d < width; d++) out[d] = o[v * padded + d] * inverse;
    }
}

// The keys lie head beside head: with all heads of a tile before the next tile they are read once, in order.
static void attend_block(const Attend& a, const Block& b, AttendScratch& t) {
    const omni_cache& c = *a.cache;
    const int64_t group = a.q_heads / c.heads, wide = (c.dim + W - 1) / W * W;
    const int64_t padded = (c.value_dim + W - 1) / W * W;
    const int64_t first = a.ragged->query_start[b.s], vectors = b.rows * group;
    const int64_t seen0 = a.ragged->kv_lens[b.s] - (a.ragged->query_start[b.s + 1] - first) + (b.r0 - first) + 1;
    const int64_t keys = seen0 + b.rows - 1, next_head = c.head_stride * (c.dtype == OMNI_BF16 ? 2 : 4);
    const bool pairs = a.pairs && c.dtype == OMNI_BF16 && wide == c.dim;
    TileRows tiles[2];
    HeadTile tile;
    // With many vectors it pays to widen values once for all.
    tile.halves = c.dtype == OMNI_BF16 && c.value_dim % (2 * W) == 0 && vectors <= 4;
    begin_block(a, b, pairs, wide, padded, t);
    find_next_rows(a, b, -KEYS, keys, tiles[0]);
    for (int64_t base = 0, turn = 0; base < keys; base += KEYS, turn ^= 1) {
        const TileRows& rows = tiles[turn];
        find_next_rows(a, b, base, keys, tiles[turn ^ 1]);
        Coming coming(c, b.heads, tiles[turn ^ 1], b.heads * ((rows.n + W - 1) / W));
        for (int64_t h = 0; h < b.heads; h++) {
            load_tile(c, rows, h * next_head, t, tile);
            const Meeting x{&tile, h * vectors, group, seen0 - base, rows.n, pairs ? wide / 2 : wide, padded};
            if (pairs) attend_head<PAIRS, OMNI_F32>(t, x, vectors, coming);
            else if (tile.dtype == OMNI_BF16) attend_head<float, OMNI_BF16>(t, x, vectors, coming);
            else attend_head<float, OMNI_F32>(t, x, vectors, coming);
        }
    }
    end_block(a, b, tile.halves, padded, t.o, t.sum);
}
