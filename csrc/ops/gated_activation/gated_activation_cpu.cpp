// The choice of the instruction set.
#include "cpu/capability.h"
#include "ops/gated_activation/gated_activation.h"

namespace warpwright {

WARPWRIGHT_DECLARE_LOOPS(
    void gated_activation_loops(const GatedActivationParams& params);
    void gated_activation_backward_loops(const GatedActivationBackwardParams& params);)

void gated_activation_cpu(const GatedActivationParams& p) {
  WARPWRIGHT_LOOPS(gated_activation_loops)(p);
}

void gated_activation_backward_cpu(const GatedActivationBackwardParams& p) {
  WARPWRIGHT_LOOPS(gated_activation_backward_loops)(p);
}

}  // namespace warpwright
