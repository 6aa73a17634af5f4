// What each instruction set provides; `omni_cpu.cpp` picks one table.
#pragma once
#include "omni_cpu.h"

constexpr int64_t CHANCES = 64;  // tokens whose chances are summed up together

struct Ops {
    decltype(&omni_linear) linear;
    decltype(&omni_route) route;
    decltype(&omni_fused_moe) fused_moe;
    decltype(&omni_rms_norm) rms_norm;
    decltype(&omni_rope) rope;
    decltype(&omni_silu_and_mul) silu_and_mul;
    decltype(&omni_attention) attention;
    decltype(&omni_step) step;
    int64_t (*best)(const float* x, int64_t n);  // the first of the largest values; a NaN is larger than all others
    void (*chances)(const float* x, int64_t n, double most, double temperature, double* p, double* sums);  // sample.h
    decltype(&omni_bench_read) bench_read;
    decltype(&omni_bench_fma) bench_fma;
    decltype(&omni_bench_pairs) bench_pairs;
    decltype(&omni_bench_quads) bench_quads;
};

namespace omni_plain { extern const Ops OPS; }
namespace omni_avx2 { extern const Ops OPS; }
namespace omni_avx512 { extern const Ops OPS; }

const Ops& omni_ops();  // of the instruction set that is chosen
