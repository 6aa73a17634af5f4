// AVX-512 F, BW, DQ and VL (Skylake-SP, Zen 4 and later), and products of bfloat16 pairs, VNNI and AMX where the machine has those as well.
#include <stddef.h>
#include <stdint.h>

#include <atomic>
#include <type_traits>

#include "table.h"
#include "team.h"

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__) || __GNUC__ >= 11
#define OMNI_AMX 1
#define OMNI_PAIRS 1
#pragma GCC target( \
    "avx2,fma,bmi,bmi2,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,avx512vnni,prefer-vector-width=512,amx-tile,amx-bf16,amx-int8")
#else
#pragma GCC target("avx2,fma,bmi,bmi2,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#endif
#define OMNI_LANES 16
namespace omni_avx512 {
#include "ops.h"
}  // namespace omni_avx512
#endif
