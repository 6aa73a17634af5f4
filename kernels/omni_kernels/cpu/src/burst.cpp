// Several decode steps in one call: each takes the tokens that the one before has drawn, and may check drafts of what
// follows them. Compiled for the baseline.
#include <time.h>

#include <new>
#include <vector>

#include "draw.h"
#include "drafts.h"
#include "omni_cpu.h"
#include "table.h"

namespace {

// What neighbours take from the machine is no cost of a step.
double thread_seconds() {
#if defined(CLOCK_THREAD_CPUTIME_ID)
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
#else
    return double(clock()) / CLOCKS_PER_SEC;
#endif
}

struct Burst {
    const omni_model& model;
    const omni_step_args& first;
    const omni_draws* draws;
    const omni_drafts* drafts;
    const omni_ends* ends;
    omni_told& told;
    const int64_t n;  // sequences
    bool ended = false;  // a sequence has drawn a token that ends it

    std::vector<std::vector<int32_t>> text;
    std::vector<omni_said> said;
    std::vector<int32_t> draft, drafted;  // [n, longest], [n]
    std::vector<int64_t> token, position, slot, logit_row, start, kv_len;  // of the step
    DrawRoom room;

    int64_t most(int64_t i) const { return drafts ? said[size_t(i)].most : told.width - told.counts[i]; }

    void begin() {
        for (int64_t i = 0; i < n; i++) told.counts[i] = 0;
        drafted.assign(size_t(n), 0);
        start.assign(size_t(n) + 1, 0);
        kv_len.assign(size_t(n), 0);
        if (!drafts) return;
        draft.assign(size_t(n * drafts->policy.longest), 0);
        said.assign(drafts->said, drafts->said + n);
        text.resize(size_t(n));
        for (size_t i = 0; i < size_t(n); i++) {
            text[i].reserve(size_t(said[i].length + said[i].most));
            text[i].assign(said[i].text, said[i].text + said[i].length);
            said[i].text = text[i].data();
        }
    }

    bool may_go_on() const {
        for (int64_t i = 0; i < n; i++)
            if (most(i) < 1) return false;
        return !ended;
    }

    bool ends_by(int64_t i, int64_t drawn) const {
        for (int64_t j = ends->start[i]; j < ends->start[i + 1]; j++)
            if (ends->tokens[j] == drawn) return true;
        return false;
    }

    // Rows of one sequence: its last token and a draft of what follows; false where its table ends before them.
    bool add_rows(int64_t i, int64_t count) {
        const int64_t* table = first.ragged.tables + first.ragged.table_start[i];
        const int64_t blocks = first.ragged.table_start[i + 1] - first.ragged.table_start[i];
        const int64_t size = first.cache.block_size, given = told.counts[i];
        for (int64_t j = 0; j < count; j++) {
            const int64_t place = first.ragged.kv_lens[i] - 1 + given + j, block = place / size;
            if (block >= blocks) return false;
            const int64_t before = given ? told.tokens[i * told.width + given - 1] : first.tokens[i];
            token.push_back(j ? draft[size_t(i * drafts->policy.longest + j - 1)] : before);
            position.push_back(first.positions[i] + given + j);
            slot.push_back(given + j ? table[block] * size + place % size : first.slots[i]);
            logit_row.push_back(int64_t(logit_row.size()));
        }
        start[size_t(i) + 1] = int64_t(token.size());
        kv_len[size_t(i)] = first.ragged.kv_lens[i] + given + count - 1;
        return true;
    }

    // All rows of a step, with drafts as far as there are rows for them.
    bool lay_out() {
        for (auto* one : {&token, &position, &slot, &logit_row}) one->clear();
        int64_t rows = drafts ? drafts->rows : 0;
        for (int64_t i = 0; i < n; i++) {
            int64_t count = 0;
            if (drafts) count = make_draft(drafts->policy, said[size_t(i)], rows, &draft[size_t(i * drafts->policy.longest)]);
            drafted[size_t(i)] = int32_t(count);
            rows -= count;
            if (!add_rows(i, 1 + count)) return false;
        }
        return true;
    }

    int32_t compute(std::vector<float>& logits, int32_t threads) {
        omni_step_args args = first;
        args.rows = args.logit_rows = int64_t(token.size());
        if (logits.size() < token.size() * size_t(model.vocab)) logits.resize(token.size() * size_t(model.vocab));
        args.tokens = token.data();
        args.positions = position.data();
        args.slots = slot.data();
        args.logit_row = logit_row.data();
        args.logits = logits.data();
        args.ragged.query_start = start.data();
        args.ragged.kv_lens = kv_len.data();
        return omni_step(&model, &args, threads);
    }

    int64_t draw(int64_t i, int64_t row, int64_t place, const float* logits) {
        const float* x = logits + row * model.vocab;
        if (!draws) return omni_ops().best(x, model.vocab);
        const Draw how{draws->temperature[i], draws->top_k[i], draws->top_p[i], draws->uniform[place * n + i]};
        return draw_row(x, model.vocab, how, room);
    }

    // A draft is right as far as it is what is drawn.
    int64_t take(int64_t i, const float* logits) {
        const int64_t count = drafted[size_t(i)], given = told.counts[i];
        int64_t right = 0, *out = told.tokens + i * told.width + given;
        for (;; right++) {
            out[right] = draw(i, start[size_t(i)] + right, given + right, logits);
            if (right == count || out[right] != draft[size_t(i * drafts->policy.longest + right)]) break;
        }
        told.counts[i] += right + 1;
        if (ends)
            for (int64_t j = 0; j <= right; j++) ended = ended || ends_by(i, out[j]);
        if (!drafts) return 0;
        omni_said& one = said[size_t(i)];
        if (count) learn_draft(drafts->policy, one, count, right);
        for (int64_t j = 0; j <= right; j++) text[size_t(i)].push_back(int32_t(out[j]));
        one.length += right + 1;
        one.most -= right + 1;
        return right;
    }

    int32_t step(std::vector<float>& logits, int32_t threads) {
        const double begun = thread_seconds();
        if (!lay_out()) return OMNI_BAD_BLOCK;
        const int32_t status = compute(logits, threads);
        if (status) return status;
        int32_t* fared = told.fared + told.steps++ * n * 2;
        for (int64_t i = 0; i < n; i++) {
            fared[2 * i] = drafted[size_t(i)];
            fared[2 * i + 1] = int32_t(take(i, logits.data()));
        }
        const bool plain = int64_t(token.size()) == n;
        (plain ? told.plain_s : told.drafted_s) += thread_seconds() - begun;
        told.plain_steps += plain;
        return OMNI_OK;
    }
};

thread_local std::vector<float> kept_logits;

}  // namespace

extern "C" {

int64_t omni_draft(const omni_policy* policy, const omni_said* said, int64_t rows, int32_t* draft) {
    return make_draft(*policy, *said, rows, draft);
}
void omni_drafted(const omni_policy* policy, omni_said* said, int64_t drafted, int64_t right) {
    learn_draft(*policy, *said, drafted, right);
}

int32_t omni_burst(const omni_model* model, const omni_step_args* first, const omni_draws* draws,
                   const omni_drafts* drafts, const omni_ends* ends, int64_t steps, omni_told* told,
                   int32_t threads) try {
    const int64_t n = first->rows;
    if (first->ragged.sequences != n) return OMNI_BAD_ROW;
    Burst burst{*model, *first, draws, drafts, ends, *told, n, false, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}};
    burst.begin();
    told->steps = told->plain_steps = 0;
    told->plain_s = told->drafted_s = 0;
    double longest = 0;
    while (told->steps < steps && burst.may_go_on()) {
        const double spent = told->plain_s + told->drafted_s;
        if (told->steps && drafts && spent + longest > drafts->limit_s) break;
        const int32_t status = burst.step(kept_logits, threads);
        if (status) return status;
        const double took = told->plain_s + told->drafted_s - spent;
        longest = took > longest ? took : longest;
    }
    for (int64_t i = 0; drafts && i < n; i++) {
        const int32_t* text = drafts->said[i].text;
        drafts->said[i] = burst.said[size_t(i)];
        drafts->said[i].text = text;
    }
    return OMNI_OK;
} catch (const std::bad_alloc&) {
    return OMNI_NO_MEMORY;
}

}  // extern "C"
