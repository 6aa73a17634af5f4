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
        row = c.take<float>(W * (dim + W));
        v = c.take<float>(KEYS * (value_dim + W));
        o = c.take<float>(vectors * (value_dim + W));
        most = c.take<float>(vectors);
        sum = c.take<float>(vectors);
    }
};

// Keys [base, base + n) transposed to kt [dim][KEYS]; values to v [n][padded].
INLINE void load_tile(const Attend& a, const int64_t* table, int64_t head, int64_t base, int64_t n, AttendScratch& s) {
    const omni_cache& c = *a.cache;
    const int64_t dim = c.dim, padded = (c.value_dim + W - 1) / W * W, bytes = c.dtype == OMNI_BF16 ? 2 : 4;
    const int64_t wide = (dim + W - 1) / W * W;
    for (int64_t j0 = 0; j0 < KEYS; j0 += W) {
        if (j0 >= n) {
            for (int64_t d = 0; d < wide; d++) store(s.kt + d * KEYS + j0, vf{});
            continue;
        }
        for (int64_t j = 0; j < W; j++) {
            float* row = s.row + j * wide;
            if (j0 + j >= n) {
                for (int64_t d = 0; d < wide; d++) row[d] = 0.0f;
                continue;
            }
            const int64_t key = base + j0 + j;
            const int64_t token = table[key / c.block_size] * c.block_size + key % c.block_size;
            const int64_t at = (token * c.row_stride + head * c.head_stride) * bytes;
            widen(static_cast<const char*>(c.keys) + at, c.dtype, dim, row);
            for (int64_t d = dim; d < wide; d++) row[d] = 0.0f;
            float* value = s.v + (j0 + j) * padded;
            widen(static_cast<const char*>(c.values) + at, c.dtype, c.value_dim, value);
            for (int64_t d = c.value_dim; d < padded; d++) value[d] = 0.0f;
        }
        for (int64_t d = 0; d < wide; d += W) {
            vf square[W];
            for (int j = 0; j < W; j++) square[j] = load(s.row + j * wide + d);
            transpose(square);
            for (int j = 0; j < W; j++) store(s.kt + (d + j) * KEYS + j0, square[j]);
        }
    }
}

// s[m][KEYS] = q[m][dim] . kt, M rows at a time, two vectors of keys at a time.
template <int M>
INLINE void scores(const float* q, const float* kt, int64_t dim, float* s) {
    for (int64_t j = 0; j < KEYS; j += 2 * W) {
        vf acc[M][2] = {};
        for (int64_t d = 0; d < dim; d++) {
            vf k0 = load(kt + d * KEYS + j), k1 = load(kt + d * KEYS + j + W);
            for (int m = 0; m < M; m++) {
                vf x = splat(q[m * dim + d]);
                acc[m][0] = x * k0 + acc[m][0];
                acc[m][1] = x * k1 + acc[m][1];
            }
        }
        for (int m = 0; m < M; m++) store(s + m * KEYS + j, acc[m][0]), store(s + m * KEYS + j + W, acc[m][1]);
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

// o[m][padded] = o * keep[m] + p[m][n] . v[n][padded]
template <int M>
INLINE void gather_values(const float* p, const float* v, const float* keep, int64_t n, int64_t padded, float* o) {
    for (int64_t d = 0; d < padded; d += W) {
        vf acc[M];
        for (int m = 0; m < M; m++) acc[m] = load(o + m * padded + d) * splat(keep[m]);
        for (int64_t j = 0; j < n; j++) {
            vf x = load(v + j * padded + d);
            for (int m = 0; m < M; m++) acc[m] = splat(p[m * KEYS + j]) * x + acc[m];
        }
        for (int m = 0; m < M; m++) store(o + m * padded + d, acc[m]);
    }
}

// Query rows [r0, r0 + rows) of sequence `s` against the keys of one key head.
static void attend_block(const Attend& a, int64_t s, int64_t r0, int64_t rows, int64_t head, AttendScratch& t) {
    const omni_cache& c = *a.cache;
    const int64_t group = a.q_heads / c.heads, dim = c.dim, padded = (c.value_dim + W - 1) / W * W;
    const int64_t vectors = rows * group, first = a.ragged->query_start[s];
    const int64_t seen0 = a.ragged->kv_lens[s] - (a.ragged->query_start[s + 1] - first) + (r0 - first) + 1;
    const int64_t* table = a.ragged->tables + a.ragged->table_start[s];
    for (int64_t m = 0; m < vectors; m++) {
        const float* q = a.q + (r0 + m / group) * a.q_stride + (head * group + m % group) * dim;
        for (int64_t d = 0; d < dim; d++) t.q[m * dim + d] = q[d] * a.scale;
        for (int64_t d = 0; d < padded; d++) t.o[m * padded + d] = 0.0f;
        t.most[m] = -__builtin_inff();
        t.sum[m] = 0.0f;
    }
    for (int64_t base = 0; base < seen0 + rows - 1; base += KEYS) {
        const int64_t n = min64(KEYS, seen0 + rows - 1 - base);
        load_tile(a, table, head, base, n, t);
        for (int64_t m = 0; m < vectors;) {
            const int step = vectors - m >= 4 ? 4 : 1;
            float* sc = t.s + m * KEYS;
            if (step == 4) scores<4>(t.q + m * dim, t.kt, dim, sc);
            else scores<1>(t.q + m * dim, t.kt, dim, sc);
            float keep[4];
            for (int i = 0; i < step; i++) {
                const int64_t seen = seen0 + (m + i) / group - base;
                keep[i] = 1.0f;
                if (seen <= 0)
                    for (int64_t j = 0; j < KEYS; j++) sc[i * KEYS + j] = 0.0f;
                else
                    keep[i] = soften(sc + i * KEYS, min64(seen, KEYS), t.most[m + i], t.sum[m + i]);
            }
            if (step == 4) gather_values<4>(sc, t.v, keep, n, padded, t.o + m * padded);
            else gather_values<1>(sc, t.v, keep, n, padded, t.o + m * padded);
            m += step;
        }
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
