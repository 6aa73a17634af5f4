// Row-wise ops: norm, rotary embedding, gate, router. Included inside namespace OMNI_NS, after gemm.h.
// Rows are a page or two long, and hardware fetches ahead within a page only: the loops fetch the next row's lines.
INLINE void norm_row(const float* x, const float* weight, int64_t n, float eps, float* out) {
    vf sum{};
    int64_t i = 0;
    for (; i + W <= n; i += W) {
        __builtin_prefetch(x + i + n);
        sum = load(x + i) * load(x + i) + sum;
    }
    float total = hsum(sum);
    for (; i < n; i++) total += x[i] * x[i];
    const float inverse = 1.0f / __builtin_sqrtf(total / float(n) + eps);
    for (i = 0; i + W <= n; i += W) store(out + i, load(x + i) * splat(inverse) * load(weight + i));
    for (; i < n; i++) out[i] = x[i] * inverse * weight[i];
}

// Half-split rotation by a row of the table, whose first half of sines is negated. `out` may not be `x`.
INLINE void rope_row(const float* x, const float* cos, const float* sin, int64_t dim, float* out) {
    const int64_t half = dim / 2;
    int64_t i = 0;
    for (; i + W <= half; i += W) {
        const vf a = load(x + i), b = load(x + i + half);
        store(out + i, a * load(cos + i) + b * load(sin + i));
        store(out + i + half, b * load(cos + i + half) + a * load(sin + i + half));
    }
    for (; i < half; i++) {
        out[i] = x[i] * cos[i] + x[i + half] * sin[i];
        out[i + half] = x[i + half] * cos[i + half] + x[i] * sin[i + half];
    }
}

INLINE void silu_row(const float* gate, const float* up, int64_t n, float* out) {
    int64_t i = 0;
    for (; i + W <= n; i += W) {
        __builtin_prefetch(gate + i + 2 * n);
        __builtin_prefetch(up + i + 2 * n);
        store(out + i, silu(load(gate + i)) * load(up + i));
    }
    if (i < n) {
        float lane[3][W] = {};
        for (int64_t j = i; j < n; j++) lane[0][j - i] = gate[j], lane[1][j - i] = up[j];
        store(lane[2], silu(load(lane[0])) * load(lane[1]));
        for (int64_t j = i; j < n; j++) out[j] = lane[2][j - i];
    }
}

// A NaN counts as the largest value, as in torch.topk; of equals the first wins.
INLINE bool better(float a, float b) { return a > b || (a != a && b == b); }

static int64_t best(const float* x, int64_t n) {
    int64_t i = 0, at = 0;
    if (n >= W) {  // each lane keeps its best; NaNs are left to the plain loop
        vf most = load(x);
        vi odd = most != most, where{}, now{};
        for (i = W; i + W <= n; i += W) {
            const vf v = load(x + i);
            now += W;
            odd |= v != v;
            where = v > most ? now : where;
            most = v > most ? v : most;
        }
        bool plain = true;
        for (int lane = 0; lane < W; lane++) {
            const int64_t here = where[lane] + lane;
            plain = plain && !odd[lane];
            if (most[lane] > x[at] || (most[lane] == x[at] && here < at)) at = here;
        }
        if (!plain) i = at = 0;
    }
    for (; i < n; i++)
        if (better(x[i], x[at])) at = i;
    return at;
}

// The k best of those not `taken`, best first: one pass that keeps them in order.
INLINE void top(const float* value, int64_t n, int64_t k, const bool* taken, int64_t* best) {
    int64_t held = 0;
    for (int64_t i = 0; i < n; i++) {
        if (taken[i] || (held == k && !better(value[i], value[best[k - 1]]))) continue;
        int64_t at = held < k ? held++ : k - 1;
        for (; at > 0 && better(value[i], value[best[at - 1]]); at--) best[at] = best[at - 1];
        best[at] = i;
    }
}

// Scores of one row: softmax or sigmoid, float32.
INLINE void score_row(const float* logits, int64_t e, bool sigmoid, float* score) {
    float most = logits[0];
    for (int64_t i = 1; i < e; i++) most = logits[i] > most ? logits[i] : most;
    if (sigmoid) most = 0.0f;
    float sum = 0.0f;
    for (int64_t i = 0; i < e; i += W) {
        float lane[W];
        const int64_t n = min64(W, e - i);
        for (int64_t j = 0; j < n; j++) lane[j] = sigmoid ? -logits[i + j] : logits[i + j] - most;
        for (int64_t j = n; j < W; j++) lane[j] = 0.0f;
        vf exped = vexp(load(lane));
        store(lane, sigmoid ? splat(1.0f) / (splat(1.0f) + exped) : exped);
        for (int64_t j = 0; j < n; j++) sum += score[i + j] = lane[j];
    }
    if (!sigmoid)
        for (int64_t i = 0; i < e; i++) score[i] /= sum;
}

struct RouteScratch {
    float *score, *choice, *group;
    bool* taken;
    static int64_t floats(int64_t e) { return 3 * (e + 16) + e / 4 + 16; }
    RouteScratch(float* at, int64_t e)
        : score(at), choice(at + e + 16), group(at + 2 * (e + 16)), taken(reinterpret_cast<bool*>(at + 3 * (e + 16))) {}
};

// The group's best choice, or its two best added up (one, if it has one).
INLINE float group_score(const float* choice, int64_t n, int32_t best) {
    float first = choice[0], second = -__builtin_inff();
    for (int64_t i = 1; i < n; i++) {
        if (better(choice[i], first)) second = first, first = choice[i];
        else if (better(choice[i], second)) second = choice[i];
    }
    return n == 1 || best == 1 ? first : first + second;
}

INLINE void choose_row(const omni_routing& r, RouteScratch& s, int64_t* ids) {
    const int64_t e = r.experts, width = e / r.groups;
    for (int64_t i = 0; i < e; i++) s.taken[i] = false;
    if (r.per_group) {
        const int64_t each = r.top_k / r.groups;
        for (int64_t g = 0; g < r.groups; g++) {
            top(s.choice + g * width, width, each, s.taken + g * width, ids + g * each);
            for (int64_t i = 0; i < each; i++) ids[g * each + i] += g * width;
        }
        return;
    }
    if (r.top_groups < r.groups) {
        for (int64_t g = 0; g < r.groups; g++) s.group[g] = group_score(s.choice + g * width, width, r.group_best);
        for (int64_t i = 0; i < e; i++) s.taken[i] = true;
        int64_t kept[256];
        const bool used[256] = {};
        top(s.group, r.groups, r.top_groups, used, kept);
        for (int64_t g = 0; g < r.top_groups; g++)
            for (int64_t i = 0; i < width; i++) s.taken[kept[g] * width + i] = false;
    }
    top(s.choice, e, r.top_k, s.taken, ids);
}

INLINE void route_row(const omni_routing& r, const float* logits, float* scratch, int64_t* ids, float* weights) {
    RouteScratch s(scratch, r.experts);
    score_row(logits, r.experts, r.sigmoid, s.score);
    for (int64_t i = 0; i < r.experts; i++) s.choice[i] = r.bias ? s.score[i] + r.bias[i] : s.score[i];
    choose_row(r, s, ids);
    float sum = 0.0f;
    for (int64_t k = 0; k < r.top_k; k++) sum += weights[k] = s.score[ids[k]];
    const float factor = r.renormalise ? r.scale / (sum + 1e-20f) : r.scale;
    for (int64_t k = 0; k < r.top_k; k++) weights[k] *= factor;
}

static void route_rows(Team& team, const omni_routing& r, const float* logits, int64_t stride, int64_t rows,
                       int64_t* ids, float* weights) {
    float* scratch = static_cast<float*>(member_memory(RouteScratch::floats(r.experts) * 4));
    if (!scratch) return team.fail(OMNI_NO_MEMORY);
    for (int64_t row; (row = team.next(rows)) >= 0;)
        route_row(r, logits + row * stride, scratch, ids + row * r.top_k, weights + row * r.top_k);
}
