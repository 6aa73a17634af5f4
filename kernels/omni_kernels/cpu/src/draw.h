// How one token is drawn from a row of logits. No instruction set here.
#pragma once
#include <stdint.h>

#include <utility>
#include <vector>

struct Draw {
    double temperature;  // 0: the largest logit
    int64_t top_k;       // 0: all
    double top_p, uniform;
};

// Memory of draws, kept from one to the next.
struct DrawRoom {
    std::vector<double> p, sums;
    std::vector<float> held;
    std::vector<int64_t> order;
    std::vector<std::pair<int64_t, double>> by_id;
};

int64_t draw_row(const float* logits, int64_t vocab, const Draw& draw, DrawRoom& room);
