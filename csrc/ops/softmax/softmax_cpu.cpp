// The choice of the instruction set.
#include "cpu/capability.h"
#include "ops/softmax/softmax.h"

namespace warpwright {

WARPWRIGHT_DECLARE_LOOPS(void softmax_loops(const SoftmaxParams& params);
                         void softmax_backward_loops(const SoftmaxBackwardParams& params);)

void softmax_cpu(const SoftmaxParams& p) { WARPWRIGHT_LOOPS(softmax_loops)(p); }

void softmax_backward_cpu(const SoftmaxBackwardParams& p) {
  WARPWRIGHT_LOOPS(softmax_backward_loops)(p);
}

}  // namespace warpwright
