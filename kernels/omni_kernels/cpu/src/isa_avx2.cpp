// AVX2 and FMA (Haswell, Zen and later).
#include <stddef.h>
#include <stdint.h>

#include <atomic>
#include <type_traits>

#include "table.h"
#include "team.h"

#if defined(__x86_64__)
#include <immintrin.h>

#pragma GCC target("avx2,fma,bmi,bmi2")
#define OMNI_LANES 8
namespace omni_avx2 {
#include "ops.h"
}  // namespace omni_avx2
#endif
