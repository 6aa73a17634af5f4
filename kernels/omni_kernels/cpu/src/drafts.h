// Drafts of the next tokens from what a sequence has said, and how long they should be: the same decisions, to the bit,
// as `speculation.py` of the engine makes, which is their definition. No instruction set here.
#pragma once
#include <stdint.h>

#include "omni_cpu.h"

// Where the last `gram` tokens occurred last before, followed by something: the place after them; -1: nowhere.
// Blocks of places from the end on, each compared as a whole: that becomes vectors.
inline int64_t find_again(const int32_t* text, int64_t length, int64_t gram) {
    constexpr int64_t BLOCK = 64;
    const int32_t* last = text + length - gram;
    for (int64_t stop = length - gram; stop > 0; stop -= BLOCK) {
        const int64_t first = stop > BLOCK ? stop - BLOCK : 0, n = stop - first;
        int32_t same[BLOCK], any = 0;
        for (int64_t i = 0; i < n; i++) same[i] = text[first + i] == last[0] ? -1 : 0;
        for (int64_t j = 1; j < gram; j++)
            for (int64_t i = 0; i < n; i++) same[i] &= text[first + i + j] == last[j] ? -1 : 0;
        for (int64_t i = 0; i < n; i++) any |= same[i];
        for (int64_t i = n - 1; any && i >= 0; i--)
            if (same[i]) return first + i + gram;
    }
    return -1;
}

// As long as the last token's chance to be right, and all before it, is worth its row.
inline int64_t draft_length(const omni_policy& policy, double rate) {
    int64_t length = 1;
    double chance = rate * rate;
    while (length < policy.longest && chance >= policy.share) {
        length++;
        chance *= rate;
    }
    return length;
}

inline double draft_gain(double rate, int64_t length, double share) {
    double total = 0, chance = 1;
    for (int64_t i = 0; i < length; i++) {
        chance *= rate;
        total += chance;
    }
    return total - double(length) * share;
}

// Writes a draft that has `rows` rows at most, and returns its length.
inline int64_t make_draft(const omni_policy& policy, const omni_said& said, int64_t rows, int32_t* draft) {
    int64_t left = policy.longest < rows ? policy.longest : rows;
    if (said.most - 1 < left) left = said.most - 1;
    if (left < 1 || said.length < said.resumes_at || said.length < policy.gram) return 0;
    const int64_t wanted = draft_length(policy, said.rate);
    const int64_t start = find_again(said.text, said.length, policy.gram);
    if (start < 0) return 0;
    const int64_t count = wanted < left ? wanted : left, period = said.length - start;
    for (int64_t at = 0; at < count; at++) draft[at] = said.text[start + at % period];
    return count;
}

// Learns that a draft of so many tokens, made at this length, had its first `right` ones right.
inline void learn_draft(const omni_policy& policy, omni_said& said, int64_t drafted, int64_t right) {
    for (int64_t i = 0; i < right; i++) said.rate += policy.learn * (1.0 - said.rate);
    if (right < drafted) said.rate -= policy.learn * said.rate;
    if (draft_gain(said.rate, draft_length(policy, said.rate), policy.share) > 0) {
        said.pause = 0;
    } else if (right == drafted) {
        said.pause /= 2;
    } else {
        said.pause = 2 * said.pause > policy.first_pause ? 2 * said.pause : policy.first_pause;
        if (said.pause > policy.longest_pause) said.pause = policy.longest_pause;
    }
    said.resumes_at = said.length + said.pause;
}
