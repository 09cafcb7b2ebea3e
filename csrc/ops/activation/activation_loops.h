// The CPU's loops of the activations.
#pragma once

#include "ops/activation/activation.h"

namespace warpwright {

void activation_cpu(const ActivationParams& params);
void activation_backward_cpu(const ActivationBackwardParams& params);

}  // namespace warpwright
