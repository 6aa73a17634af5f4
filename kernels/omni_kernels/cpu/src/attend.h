// Attention of a whole batch: its blocks dealt to a team. Included inside namespace OMNI_NS, after tile_attention.h.
constexpr int64_t VECTORS = 64;  // query vectors of a block, at least one row's of one head

// Heads that a block of few rows takes together: as many as its vectors allow and keep the team busy.
INLINE int64_t heads_a_block(const Attend& a, int64_t rows, int64_t group, int team) {
    const int64_t most = VECTORS / (rows * group), heads = a.cache->heads;
    const int64_t shared = team == 1 ? heads : (a.ragged->sequences * heads + 2 * team - 1) / (2 * team);
    const int64_t wanted = min64(min64(most, heads), shared);
    return wanted > 1 ? wanted : 1;
}

template <class Run>
INLINE void deal_blocks(Team& team, const Attend& a, const Run& run) {
    const int64_t heads = a.cache->heads, group = a.q_heads / heads;
    const int64_t block = group >= VECTORS ? 1 : VECTORS / group;
    int64_t task = team.next(INT64_MAX), number = 0;
    for (int64_t s = 0; s < a.ragged->sequences; s++) {
        const int64_t first = a.ragged->query_start[s], rows = a.ragged->query_start[s + 1] - first;
        for (int64_t r = 0; r < rows; r += block) {
            const int64_t n = min64(block, rows - r), together = heads_a_block(a, n, group, team.size());
            const bool last = team.size() == 1 && r + n == rows && s + 1 < a.ragged->sequences;
            const int64_t after = last && together >= heads ? s + 1 : -1;
            for (int64_t head = 0; head < heads; head += together)
                if (number++ == task) {
                    run(Block{s, first + r, n, head, min64(together, heads - head), after});
                    task = team.next(INT64_MAX);
                }
        }
    }
}

static void attend(Team& team, const Attend& a) {
    const int64_t group = a.q_heads / a.cache->heads, vectors = VECTORS > group ? VECTORS : group;
#if defined(OMNI_AMX)
    if (a.tiles && fits_tiles(*a.cache)) {
        TileAttention scratch = TileAttention::get(vectors, group, *a.cache);
        if (!scratch.q) return team.fail(OMNI_NO_MEMORY);
        return deal_blocks(team, a, [&](const Block& b) { attend_tiles(a, b, scratch); });
    }
#endif
    AttendScratch scratch = AttendScratch::get(vectors, a.cache->dim, a.cache->value_dim);
    if (!scratch.q) return team.fail(OMNI_NO_MEMORY);
    deal_blocks(team, a, [&](const Block& b) { attend_block(a, b, scratch); });
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
