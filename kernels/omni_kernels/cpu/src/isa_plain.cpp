// Four lanes: NEON on Arm, SSE2 on x86; whatever the compiler's baseline is.
#include <stddef.h>
#include <stdint.h>

#include <atomic>
#include <type_traits>

#include "table.h"
#include "team.h"

#define OMNI_LANES 4
namespace omni_plain {
#include "ops.h"
}  // namespace omni_plain
