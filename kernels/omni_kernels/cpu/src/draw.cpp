// Draws tokens: the definition is `sample` of reference.py. Compiled for the baseline.
#include "draw.h"

#include <math.h>

#include <algorithm>
#include <new>

#include "omni_cpu.h"
#include "table.h"

namespace {

// Orders tokens by their logits, of equals the first before the others.
struct Larger {
    const float* x;
    bool operator()(int64_t a, int64_t b) const { return x[a] > x[b] || (x[a] == x[b] && a < b); }
};

// The k largest, largest first.
void largest(const float* x, int64_t n, int64_t k, std::vector<int64_t>& order) {
    const Larger larger{x};
    order.resize(size_t(k));
    for (int64_t i = 0; i < k; i++) order[size_t(i)] = i;
    std::make_heap(order.begin(), order.end(), larger);  // the least of them in front
    for (int64_t i = k; i < n; i++) {
        if (!(x[i] > x[order.front()])) continue;
        std::pop_heap(order.begin(), order.end(), larger);
        order.back() = i;
        std::push_heap(order.begin(), order.end(), larger);
    }
    std::sort_heap(order.begin(), order.end(), larger);
}

double weigh(const float* x, int64_t n, double most, double temperature, DrawRoom& room) {
    const size_t blocks = size_t((n + CHANCES - 1) / CHANCES);
    room.p.resize(blocks * CHANCES);
    room.sums.resize(blocks);
    omni_ops().chances(x, n, most, temperature, room.p.data(), room.sums.data());
    double total = 0;
    for (const double sum : room.sums) total += sum;
    return total;
}

// Walks all tokens in their order to `target`: whole blocks first, then inside one.
int64_t walk(int64_t n, double target, const DrawRoom& room) {
    double sum = 0;
    size_t block = 0;
    while (block + 1 < room.sums.size() && sum + room.sums[block] <= target) sum += room.sums[block++];
    const int64_t first = int64_t(block) * CHANCES, stop = std::min(n, first + CHANCES);
    for (int64_t i = first; i < stop; i++) {
        sum += room.p[size_t(i)];
        if (sum > target) return i;
    }
    int64_t last = stop - 1;  // rounding
    while (last > 0 && !(room.p[size_t(last)] > 0)) last--;
    return last;
}

// Walks the first `count` tokens of `order`, whose chances stand in `p` likewise, in the order of their ids.
int64_t walk_some(size_t count, double uniform, DrawRoom& room) {
    room.by_id.resize(count);
    for (size_t i = 0; i < count; i++) room.by_id[i] = {room.order[i], room.p[i]};
    std::sort(room.by_id.begin(), room.by_id.end());
    double total = 0, sum = 0;
    for (const auto& one : room.by_id) total += one.second;
    int64_t last = room.order[0];
    for (const auto& [token, p] : room.by_id) {
        if (p > 0) last = token;
        sum += p;
        if (sum > uniform * total) return token;
    }
    return last;
}

// Tokens that may be among the fewest whose share reaches `top_p`: all others together have less than the rest.
void likely(const float* x, int64_t n, double top_p, double total, DrawRoom& room) {
    const double least = 0.999 * (1 - top_p) * total / double(n);
    room.order.clear();
    for (int64_t i = 0; i < n; i++)
        if (room.p[size_t(i)] > least) room.order.push_back(i);
    std::sort(room.order.begin(), room.order.end(), Larger{x});
}

// How many of the largest, whose chances come first in `p`, reach the share of `mass`; one at least.
size_t reach(double top_p, double mass, const DrawRoom& room) {
    const size_t count = room.order.size();
    double before = 0;
    for (size_t i = 0; i < count; i++) {
        if (top_p < 1 && i > 0 && before >= top_p * mass) return i;
        before += room.p[i];
    }
    return count;
}

}  // namespace

int64_t draw_row(const float* x, int64_t vocab, const Draw& draw, DrawRoom& room) {
    const int64_t best = omni_ops().best(x, vocab);
    const double most = x[best];
    if (!(draw.temperature > 0) || !isfinite(most)) return best;
    const bool few = draw.top_k > 0 && draw.top_k < vocab;
    double mass = 0;
    if (few) {
        largest(x, vocab, draw.top_k, room.order);
    } else {
        mass = weigh(x, vocab, most, draw.temperature, room);
        if (!(draw.top_p < 1)) return walk(vocab, draw.uniform * mass, room);
        likely(x, vocab, draw.top_p, mass, room);
        if (room.order.empty()) return best;
    }
    room.held.clear();
    for (const int64_t i : room.order) room.held.push_back(x[i]);
    const double held = weigh(room.held.data(), int64_t(room.held.size()), most, draw.temperature, room);
    return walk_some(reach(draw.top_p, few ? held : mass, room), draw.uniform, room);
}

extern "C" int32_t omni_sample(const float* logits, int64_t rows, int64_t vocab, const double* temperature,
                               const int64_t* top_k, const double* top_p, const double* uniform, int64_t* tokens) try {
    DrawRoom room;
    for (int64_t r = 0; r < rows; r++)
        tokens[r] = draw_row(logits + r * vocab, vocab, {temperature[r], top_k[r], top_p[r], uniform[r]}, room);
    return OMNI_OK;
} catch (const std::bad_alloc&) {
    return OMNI_NO_MEMORY;
}
