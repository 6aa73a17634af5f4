// One step of a whole decoder: every layer in one call, by one team. Included inside namespace OMNI_NS, last.
struct Step {
    const omni_model* model;
    const omni_step_args* args;
    float *x, *normed, *qkv, *seen, *logits, *weights;
    int64_t* ids;
    Moe moe;
};

static int64_t widest_gate(const omni_model& m) {
    int64_t e = 1;
    for (int64_t i = 0; i < m.layers; i++) e = m.layer[i].gate.data && m.layer[i].gate.n > e ? m.layer[i].gate.n : e;
    return e;
}

static Moe moe_of(const Step& s, const omni_layer& layer) {
    Moe m{};
    m.experts = &layer.mlp;
    m.rows = s.args->rows;
    m.top_k = layer.gate.data ? layer.routing.top_k : 1;
    m.ids = layer.gate.data ? s.ids : nullptr;
    m.weights = s.weights;
    m.x = s.normed;
    m.out = s.x;
    const omni_layer* last = s.model->layer + s.model->layers - 1;
    m.next = &layer == last ? s.model->head.data : (&layer + 1)->qkv.data;
    return m;
}

static void carve(Step& s, Carver& c) {
    const omni_model& m = *s.model;
    const int64_t rows = s.args->rows;
    s.x = c.take<float>(rows * m.hidden);
    s.normed = c.take<float>(rows * m.hidden);
    s.qkv = c.take<float>(rows * (m.heads + 2 * m.kv_heads) * m.dim);
    s.seen = c.take<float>(rows * m.heads * m.dim);
    const int64_t e = widest_gate(m);
    s.logits = c.take<float>(rows * e);
    s.ids = c.take<int64_t>(rows * e);
    s.weights = c.take<float>(rows * e);
    const int64_t base = c.used;
    int64_t most = base;
    for (int64_t i = 0; i < m.layers; i++) {  // the layers take turns in the same place
        c.used = base;
        Moe moe = moe_of(s, m.layer[i]);
        carve(moe, c);
        most = c.used > most ? c.used : most;
    }
    c.used = most;
    s.moe.start = reinterpret_cast<int64_t*>(c.base ? c.base + base : nullptr);
}

static int check_step(const Step& s) {
    const omni_step_args& a = *s.args;
    const int64_t slots = a.cache.blocks * a.cache.block_size;
    for (int64_t i = 0; i < a.rows; i++) {
        if (a.tokens[i] < 0 || a.tokens[i] >= s.model->vocab) return OMNI_BAD_TOKEN;
        if (a.positions[i] < 0 || a.positions[i] >= s.model->table_len) return OMNI_BAD_ROW;
        if (a.slots[i] >= slots) return OMNI_BAD_SLOT;
    }
    for (int64_t i = 0; i < a.logit_rows; i++)
        if (a.logit_row[i] < 0 || a.logit_row[i] >= a.rows) return OMNI_BAD_ROW;
    if (a.ragged.query_start[a.ragged.sequences] != a.rows) return OMNI_BAD_ROW;
    return check_tables(a.ragged, a.cache);
}

static void norm_rows(Team& team, const Step& s, const float* weight) {
    for (int64_t row; (row = team.next(s.args->rows)) >= 0;)
        norm_row(s.x + row * s.model->hidden, weight, s.model->hidden, s.model->eps, s.normed + row * s.model->hidden);
}

// Bias of the projections and the norms that take a whole row; then the cut.
static void prepare_row(const Step& s, const omni_layer& layer, float* qkv) {
    const omni_model& m = *s.model;
    const int64_t queries = m.heads * m.dim, keys = m.kv_heads * m.dim, n = queries + 2 * keys;
    if (layer.qkv_bias)
        for (int64_t i = 0; i < n; i++) qkv[i] += layer.qkv_bias[i];
    if (layer.qk_norm && m.norm_rows) {
        norm_row(qkv, layer.qk_norm, queries, m.eps, qkv);
        norm_row(qkv + queries, layer.qk_norm + queries, keys, m.eps, qkv + queries);
    }
    if (m.clip > 0.0f)
        for (int64_t i = 0; i < n; i++) qkv[i] = qkv[i] > m.clip ? m.clip : qkv[i] < -m.clip ? -m.clip : qkv[i];
}

// Norm and rotation of the heads, keys and values into the cache; rotated queries replace the old ones.
static void rotate_rows(Team& team, const Step& s, const omni_layer& layer, const omni_cache& cache) {
    const omni_model& m = *s.model;
    const int64_t dim = m.dim, stride = (m.heads + 2 * m.kv_heads) * dim;
    float* head = static_cast<float*>(member_memory(dim * 4));
    if (!head) return team.fail(OMNI_NO_MEMORY);
    for (int64_t row; (row = team.next(s.args->rows)) >= 0;) {
        float* qkv = s.qkv + row * stride;
        const int64_t at = s.args->positions[row] * dim, slot = s.args->slots[row];
        prepare_row(s, layer, qkv);
        for (int64_t h = 0; h < m.heads + m.kv_heads; h++) {
            if (layer.qk_norm && !m.norm_rows) norm_row(qkv + h * dim, layer.qk_norm + h * dim, dim, m.eps, head);
            else __builtin_memcpy(head, qkv + h * dim, size_t(dim) * 4);
            rope_row(head, m.cos + at, m.sin + at, dim, qkv + h * dim);
        }
        if (slot >= 0) put_row(cache, slot, qkv + m.heads * dim, qkv + (m.heads + m.kv_heads) * dim);
    }
}

// done() of `linear`: store or add a tile of results, with a bias if there is one.
template <bool ADD>
struct Put {
    float* out;
    int64_t stride;
    const float* bias = nullptr;
    void operator()(int64_t r0, int64_t rows, int64_t first, int64_t n, const float* c) const {
        for (int64_t r = 0; r < rows; r++) {
            float* y = out + (r0 + r) * stride + first;
            for (int64_t j = 0; j < n; j++) y[j] = ADD ? y[j] + c[r * LDC + j] : c[r * LDC + j];
            if (bias)
                for (int64_t j = 0; j < n; j++) y[j] += bias[first + j];
        }
    }
};

template <class A>
static bool attention_layer(Team& team, Step& s, int64_t index) {
    const omni_model& m = *s.model;
    const omni_layer& layer = m.layer[index];
    const int64_t stride = (m.heads + 2 * m.kv_heads) * m.dim;
    omni_cache cache = s.args->cache;
    cache.keys = static_cast<char*>(cache.keys) + index * s.args->layer_stride;
    cache.values = static_cast<char*>(cache.values) + index * s.args->layer_stride;
    norm_rows(team, s, layer.attention_norm);
    if (!team.sync()) return false;
    linear<A>(team, s.normed, s.args->rows, layer.qkv, layer.out.data, Put<false>{s.qkv, stride});
    if (!team.sync()) return false;
    rotate_rows(team, s, layer, cache);
    if (!team.sync()) return false;
    if (team.rank == 0) tell_progress(s.args, index + 1);
    const float scale = 1.0f / __builtin_sqrtf(float(m.dim));
    const bool pairs = K_EACH<A> != 1 && pairs_ready();
    attend(team, Attend{s.qkv, stride, m.heads, &s.args->ragged, &cache, scale, s.seen, pairs, TILED<A>});
    if (!team.sync()) return false;
    const void* next = layer.gate.data ? layer.gate.data : layer.mlp.w13.data;
    linear<A>(team, s.seen, s.args->rows, layer.out, next, Put<true>{s.x, m.hidden, layer.out_bias});
    return team.sync();
}

template <class A>
static bool mlp_layer(Team& team, Step& s, int64_t index) {
    const omni_layer& layer = s.model->layer[index];
    norm_rows(team, s, layer.mlp_norm);
    if (!team.sync()) return false;
    if (layer.gate.data) {
        // A router decides: it sees what was not rounded.
        linear<float>(team, s.normed, s.args->rows, layer.gate, layer.gate.data, Put<false>{s.logits, layer.gate.n});
        if (!team.sync()) return false;
        route_rows(team, layer.routing, s.logits, layer.gate.n, s.args->rows, s.ids, s.weights);
        if (!team.sync()) return false;
    }
    if (team.rank == 0) {
        Carver carver{reinterpret_cast<char*>(s.moe.start)};
        Moe moe = moe_of(s, layer);
        carve(moe, carver);
        int64_t* seen = layer.gate.data && s.args->expert_tokens ? s.args->expert_tokens + index * layer.mlp.experts : nullptr;
        const int status = plan(moe, seen);
        if (status) team.fail(status);
        *static_cast<Moe*>(team.shared->note) = moe;
    }
    if (!team.sync()) return false;
    const Moe& moe = *static_cast<Moe*>(team.shared->note);
    moe_up<A, float>(team, moe);
    if (!team.sync()) return false;
    moe_down<A>(team, moe);
    return team.sync();
}

template <class A>
static void head_rows(Team& team, Step& s) {
    const omni_model& m = *s.model;
    if (s.args->hidden) {
        for (int64_t row; (row = team.next(s.args->rows)) >= 0;)
            norm_row(s.x + row * m.hidden, m.norm, m.hidden, m.eps, s.args->hidden + row * m.hidden);
        if (!s.args->logit_rows || !team.sync()) return;
    }
    for (int64_t i; (i = team.next(s.args->logit_rows)) >= 0;)
        norm_row(s.x + s.args->logit_row[i] * m.hidden, m.norm, m.hidden, m.eps, s.normed + i * m.hidden);
    if (!team.sync()) return;
    linear<A>(team, s.normed, s.args->logit_rows, m.head, m.layer[0].qkv.data, Put<false>{s.args->logits, m.vocab});
}

template <class A>
static void step_body(Team& team, void* context) {
    Step s = *static_cast<Step*>(context);
    [[maybe_unused]] const TilesInUse<A> tiles;
    const omni_model& m = *s.model;
    const int64_t bytes = m.embedding_dtype == OMNI_BF16 ? 2 : 4;
    for (int64_t row; (row = team.next(s.args->rows)) >= 0;)
        widen(static_cast<const char*>(m.embedding) + s.args->tokens[row] * m.hidden * bytes, m.embedding_dtype,
              m.hidden, s.x + row * m.hidden);
    if (!team.sync()) return;
    for (int64_t i = 0; i < m.layers; i++)
        if (!attention_layer<A>(team, s, i) || !mlp_layer<A>(team, s, i)) return;
    if (s.args->logit_rows || s.args->hidden) head_rows<A>(team, s);
}

constexpr Bodies STEP_BODIES OMNI_BODIES(step_body);

// In a model of bfloat16 rows are rounded to it where the CPU multiplies that, whatever the number of rows.
static TeamBody body_of(const omni_model& m) {
    const auto fits = [](const omni_matrix& w) { return !w.data || w.dtype == OMNI_BF16; };
    bool halves = m.embedding_dtype == OMNI_BF16 && fits(m.head);
    for (int64_t i = 0; i < m.layers; i++) {
        const omni_layer& x = m.layer[i];
        const omni_experts& e = x.mlp;
        halves = halves && fits(x.qkv) && fits(x.out) && fits(e.w13) && fits(e.w2) && fits(e.shared13) && fits(e.shared2);
    }
    const TeamBody rounded = halves ? rounded_body(STEP_BODIES) : nullptr;
    return rounded ? rounded : exact_body(STEP_BODIES, m.head.dtype);
}

static int32_t step(const omni_model* model, const omni_step_args* args, int32_t threads) {
    if (!args->rows) return OMNI_OK;
    Step s{};
    s.model = model;
    s.args = args;
    const int status = check_step(s);
    if (status) return status;
    Carver count{nullptr};
    carve(s, count);
    Carver carver{static_cast<char*>(call_memory(count.used))};
    if (!carver.base) return OMNI_NO_MEMORY;
    carve(s, carver);
    Moe shared{};
    return run_team(threads, body_of(*model), &s, &shared);
}
