// The choice of the instruction set.
#include "cpu/capability.h"
#include "ops/group_norm/group_norm.h"

namespace warpwright {

WARPWRIGHT_DECLARE_LOOPS(void group_norm_loops(const GroupNormParams& params);
                         void group_norm_backward_loops(const GroupNormBackwardParams& params);)

void group_norm_cpu(const GroupNormParams& p) { WARPWRIGHT_LOOPS(group_norm_loops)(p); }

void group_norm_backward_cpu(const GroupNormBackwardParams& p) {
  WARPWRIGHT_LOOPS(group_norm_backward_loops)(p);
}

}  // namespace warpwright
