// The CPU's kernels for the gradients of gradient.h.
#pragma once

#include "ops/reduction/gradient.h"

namespace warpwright {

void reduction_gradient_cpu(const ReductionGradientParams& params);

// How often each output's maximum occurs, as a float32 or float64. `params.kind` is not read.
void count_maxima_cpu(const ReductionParams& params);

}  // namespace warpwright
