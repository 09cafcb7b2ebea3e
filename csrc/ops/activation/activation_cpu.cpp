// The choice of the instruction set.
#include "cpu/capability.h"
#include "ops/activation/activation_loops.h"

namespace warpwright {

WARPWRIGHT_DECLARE_LOOPS(void activation_loops(const ActivationParams& params);
                         void activation_backward_loops(const ActivationBackwardParams& params);)

void activation_cpu(const ActivationParams& p) { WARPWRIGHT_LOOPS(activation_loops)(p); }

void activation_backward_cpu(const ActivationBackwardParams& p) {
  WARPWRIGHT_LOOPS(activation_backward_loops)(p);
}

}  // namespace warpwright
