// Causal attention over paged keys, 64 keys at a time with a running softmax (Dao et al. 2022; Milakov and
// Gimelshein 2018). Included inside namespace OMNI_NS, after simd.h.
//
// Tiles start at key 0 and a row masks what it may not see with exact zeros: its result is the same whether it is
// computed alone (decode), in a chunk, or after a prefix that others have computed.
constexpr int64_t KEYS = 64;

struct Attend {
    const float* q;  // [rows, row stride], heads of dim each
    int64_t q_stride, q_heads;
    const omni_ragged* ragged;
    const omni_cache* cache;
    float scale;
    float* out;      // [rows, q_heads * value_dim]
    int64_t rows_a_task;
};

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
        q = c.take<float>(vectors * dim);
        s = c.take<float>(vectors * KEYS);
        kt = c.take<float>((dim + W) * KEYS);
        row = c.take<float>(KEYS * (dim + W));
        v = c.take<float>(KEYS * (value_dim + W));
        o = c.take<float>(vectors * (value_dim + W));
        most = c.take<float>(vectors);
        sum = c.take<float>(vectors);
    }
};

// Where the tile's keys and values lie: [base, base + n) of a sequence, then the zeros for the rest.
struct TileRows {
    const char* key[KEYS];
    const char* value[KEYS];
};

INLINE void find_rows(const Attend& a, const int64_t* table, int64_t head, int64_t base, int64_t n, TileRows& rows) {
    const omni_cache& c = *a.cache;
    const int64_t bytes = c.dtype == OMNI_BF16 ? 2 : 4;
    for (int64_t j = 0; j < n; j++) {
        const int64_t key = base + j;
        const int64_t token = table[key / c.block_size] * c.block_size + key % c.block_size;
        const int64_t at = (token * c.row_stride + head * c.head_stride) * bytes;
        rows.key[j] = static_cast<const char*>(c.keys) + at;
        rows.value[j] = static_cast<const char*>(c.values) + at;
    }
}

// Rows of whole vectors, as float32, padded with zeros, in `room`; the pointers then name those.
INLINE void copy_rows(const char** row, int64_t n, int64_t width, int64_t padded, int dtype, float* room) {
    for (int64_t j = 0; j < n; j++) {
        float* out = room + j * padded;
        for (int64_t d = 0; d < width; d++) out[d] = get(row[j], dtype, d);
        for (int64_t d = width; d < padded; d++) out[d] = 0.0f;
        row[j] = reinterpret_cast<const char*>(out);
    }
}

template <int DT>
INLINE void widen_rows(const char** row, int64_t n, int64_t width, float* room) {
    for (int64_t j = 0; j < n; j++) {
        float* out = room + j * width;
        for (int64_t d = 0; d < width; d += W)
            store(out + d, load_as<DT>(row[j] + d * (DT == OMNI_BF16 ? 2 : 4)));
        row[j] = reinterpret_cast<const char*>(out);
    }
}

// kt [padded][KEYS] of whole-vector rows; keys past n are zero.
template <int DT>
INLINE void transpose_keys(const char* const* key, int64_t n, int64_t padded, float* kt) {
    for (int64_t j0 = 0; j0 < KEYS; j0 += W)
        for (int64_t d = 0; d < padded; d += W) {
            vf square[W];
            if (j0 + W <= n) {
                unroll<W>(EACH { square[i] = load_as<DT>(key[j0 + i] + d * (DT == OMNI_BF16 ? 2 : 4)); });
            } else {
                for (int j = 0; j < W; j++)
                    square[j] = j0 + j < n ? load_as<DT>(key[j0 + j] + d * (DT == OMNI_BF16 ? 2 : 4)) : vf{};
            }
            if (j0 < n) transpose(square);
            unroll<W>(EACH { store(kt + (d + i) * KEYS + j0, square[i]); });
        }
}

// Keys [base, base + n) transposed to kt [dim][KEYS]; `rows.value` names float32 rows, padded to whole vectors.
INLINE void load_tile(const Attend& a, const int64_t* table, int64_t head, int64_t base, int64_t n, AttendScratch& s,
                      TileRows& rows) {
    const omni_cache& c = *a.cache;
    const int64_t wide = (c.dim + W - 1) / W * W, padded = (c.value_dim + W - 1) / W * W;
    find_rows(a, table, head, base, n, rows);
    if (wide != c.dim) {
        copy_rows(rows.key, n, c.dim, wide, c.dtype, s.row);
        transpose_keys<OMNI_F32>(rows.key, n, wide, s.kt);
    } else if (c.dtype == OMNI_BF16) {
        transpose_keys<OMNI_BF16>(rows.key, n, wide, s.kt);
    } else {
        transpose_keys<OMNI_F32>(rows.key, n, wide, s.kt);
    }
    if (padded != c.value_dim) copy_rows(rows.value, n, c.value_dim, padded, c.dtype, s.v);
    else if (c.dtype == OMNI_BF16) widen_rows<OMNI_BF16>(rows.value, n, padded, s.v);
}

// s[m][KEYS] = q[m][dim] . kt, M rows and N vectors of keys at a time: enough chains to hide a multiply-add's latency.
template <int M>
INLINE void scores(const float* q, const float* kt, int64_t dim, float* s) {
    constexpr int N = W == 16 || (W == 8 && M < 4) ? 4 : 2;
    for (int64_t j = 0; j < KEYS; j += N * W) {
        vf acc[N * M] = {};
        for (int64_t d = 0; d < dim; d++) {
            vf k[N];
            unroll<N>(EACH { k[i] = load(kt + d * KEYS + j + i * W); });
            unroll<M>([&](auto m) __attribute__((always_inline)) {
                const vf x = splat(q[m * dim + d]);
                unroll<N>(EACH { acc[m * N + i] = x * k[i] + acc[m * N + i]; });
            });
        }
        unroll<N * M>(EACH { store(s + i / N * KEYS + j + i % N * W, acc[i]); });
    }
}

// Scores of one row -> weights; `seen` keys of the tile are visible. Returns what older sums must be scaled by.
INLINE float soften(float* s, int64_t seen, float& most, float& sum) {
    for (int64_t j = seen; j < KEYS; j++) s[j] = -__builtin_inff();
    vf highest = load(s);
    for (int64_t j = W; j < KEYS; j += W) highest = vmax(load(s + j), highest);
    float top = hmax(highest);
    top = most > top ? most : top;
    vf total{};
    for (int64_t j = 0; j < KEYS; j += W) {
        vf p = vexp(load(s + j) - splat(top));
        store(s + j, p);
        total += p;
    }
    float lane[W];
    store(lane, vexp(splat(most - top)));
    const float keep = most == -__builtin_inff() ? 0.0f : lane[0];
    sum = sum * keep + hsum(total);
    most = top;
    return keep;
}

// o[m][padded] = o * keep[m] + p[m][n] . rows v[n], float32; N vectors from column d on.
template <int M, int N>
INLINE void gather_columns(const float* p, const char* const* v, const float* keep, int64_t n, int64_t padded,
                           int64_t d, float* o) {
    vf acc[M * N];
    unroll<M * N>(EACH { acc[i] = load(o + i / N * padded + d + i % N * W) * splat(keep[i / N]); });
    for (int64_t j = 0; j < n; j++) {
        const float* row = reinterpret_cast<const float*>(v[j]) + d;
        vf x[N];
        unroll<N>(EACH { x[i] = load(row + i * W); });
        unroll<M>([&](auto m) __attribute__((always_inline)) {
            const vf share = splat(p[m * KEYS + j]);
            unroll<N>(EACH { acc[m * N + i] = share * x[i] + acc[m * N + i]; });
        });
    }
    unroll<M * N>(EACH { store(o + i / N * padded + d + i % N * W, acc[i]); });
}

template <int M>
INLINE void gather_values(const float* p, const char* const* v, const float* keep, int64_t n, int64_t padded, float* o) {
    int64_t d = 0;
    if constexpr (M < 4)
        for (; d + 4 * W <= padded; d += 4 * W) gather_columns<M, 4>(p, v, keep, n, padded, d, o);
    for (; d + 2 * W <= padded; d += 2 * W) gather_columns<M, 2>(p, v, keep, n, padded, d, o);
    for (; d < padded; d += W) gather_columns<M, 1>(p, v, keep, n, padded, d, o);
}

// M query vectors from m on against one tile; `seen0` keys of it are visible to the block's first row.
template <int M>
INLINE void attend_vectors(AttendScratch& t, const TileRows& rows, int64_t m, int64_t group, int64_t seen0, int64_t n,
                           int64_t dim, int64_t padded) {
    if (seen0 + (m + M - 1) / group <= 0) return;
    float* s = t.s + m * KEYS;
    scores<M>(t.q + m * dim, t.kt, dim, s);
    float keep[M];
    for (int i = 0; i < M; i++) {
        const int64_t seen = seen0 + (m + i) / group;
        keep[i] = 1.0f;
        if (seen > 0) keep[i] = soften(s + i * KEYS, min64(seen, KEYS), t.most[m + i], t.sum[m + i]);
        else
            for (int64_t j = 0; j < KEYS; j++) s[i * KEYS + j] = 0.0f;
    }
    gather_values<M>(s, rows.value, keep, n, padded, t.o + m * padded);
}

// Query rows [r0, r0 + rows) of sequence `s` against the keys of one key head.
static void attend_block(const Attend& a, int64_t s, int64_t r0, int64_t rows, int64_t head, AttendScratch& t) {
    const omni_cache& c = *a.cache;
    const int64_t group = a.q_heads / c.heads, dim = c.dim, padded = (c.value_dim + W - 1) / W * W;
    const int64_t vectors = rows * group, first = a.ragged->query_start[s];
    const int64_t seen0 = a.ragged->kv_lens[s] - (a.ragged->query_start[s + 1] - first) + (r0 - first) + 1;
    const int64_t* table = a.ragged->tables + a.ragged->table_start[s];
    TileRows tile_rows;
    for (int64_t m = 0; m < vectors; m++) {
        const float* q = a.q + (r0 + m / group) * a.q_stride + (head * group + m % group) * dim;
        for (int64_t d = 0; d < dim; d++) t.q[m * dim + d] = q[d] * a.scale;
        for (int64_t d = 0; d < padded; d++) t.o[m * padded + d] = 0.0f;
        t.most[m] = -__builtin_inff();
        t.sum[m] = 0.0f;
    }
    for (int64_t base = 0; base < seen0 + rows - 1; base += KEYS) {
        const int64_t n = min64(KEYS, seen0 + rows - 1 - base);
        load_tile(a, table, head, base, n, t, tile_rows);
        int64_t m = 0;
        for (; m + 4 <= vectors; m += 4) attend_vectors<4>(t, tile_rows, m, group, seen0 - base, n, dim, padded);
        for (; m + 2 <= vectors; m += 2) attend_vectors<2>(t, tile_rows, m, group, seen0 - base, n, dim, padded);
        for (; m < vectors; m++) attend_vectors<1>(t, tile_rows, m, group, seen0 - base, n, dim, padded);
    }
    for (int64_t m = 0; m < vectors; m++) {
        float* out = a.out + ((r0 + m / group) * a.q_heads + head * group + m % group) * c.value_dim;
        const float inverse = 1.0f / t.sum[m];
        for (int64_t d = 0; d < c.value_dim; d++) out[d] = t.o[m * padded + d] * inverse;
    }
}

static void attend(Team& team, const Attend& a) {
    const int64_t group = a.q_heads / a.cache->heads;
    const int64_t block = group >= 64 ? 1 : 64 / group;
    AttendScratch scratch = AttendScratch::get(block * group, a.cache->dim, a.cache->value_dim);
    if (!scratch.q) return team.fail(OMNI_NO_MEMORY);
    int64_t task = team.next(INT64_MAX), number = 0;
    for (int64_t s = 0; s < a.ragged->sequences; s++) {
        const int64_t first = a.ragged->query_start[s], rows = a.ragged->query_start[s + 1] - first;
        for (int64_t r = 0; r < rows; r += block)
            for (int64_t head = 0; head < a.cache->heads; head++)
                if (number++ == task) {
                    attend_block(a, s, first + r, min64(block, rows - r), head, scratch);
                    task = team.next(INT64_MAX);
                }
    }
}

static int check_tables(const omni_ragged& r, const omni_cache& c) {
    for (int64_t s = 0; s < r.sequences; s++) {
        const int64_t needed = (r.kv_lens[s] + c.block_size - 1) / c.block_size;
        if (needed > r.table_start[s + 1] - r.table_start[s]) return OMNI_BAD_BLOCK;
        if (r.kv_lens[s] < r.query_start[s + 1] - r.query_start[s]) return OMNI_BAD_ROW;
        for (int64_t i = 0; i < needed; i++) {
            const int64_t id = r.tables[r.table_start[s] + i];
            if (id < 0 || id >= c.blocks) return OMNI_BAD_BLOCK;
        }
    }
    return OMNI_OK;
}

// Puts one row's keys and values (all heads) into its slot.
INLINE void put_row(const omni_cache& c, int64_t slot, const float* k, const float* v) {
    const int64_t bytes = c.dtype == OMNI_BF16 ? 2 : 4;
    for (int64_t h = 0; h < c.heads; h++) {
        const int64_t at = (slot * c.row_stride + h * c.head_stride) * bytes;
        narrow(k + h * c.dim, c.dim, static_cast<char*>(c.keys) + at, c.dtype);
        narrow(v + h * c.value_dim, c.value_dim, static_cast<char*>(c.values) + at, c.dtype);
    }
}
