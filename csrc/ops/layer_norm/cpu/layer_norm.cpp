// The choice of the instruction set.
#include "ops/layer_norm/layer_norm.h"
#include "cpu/capability.h"

namespace warpwright {

WARPWRIGHT_DECLARE_LOOPS(void layer_norm_loops(const LayerNormParams& params);
                         void layer_norm_backward_loops(const LayerNormBackwardParams& params);)

void layer_norm_cpu(const LayerNormParams& p) { WARPWRIGHT_LOOPS(layer_norm_loops)(p); }

void layer_norm_backward_cpu(const LayerNormBackwardParams& p) {
  WARPWRIGHT_LOOPS(layer_norm_backward_loops)(p);
}

}  // namespace warpwright
