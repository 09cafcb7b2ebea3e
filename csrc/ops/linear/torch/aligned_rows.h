// Gradients whose rows the fast loads do not take.
#pragma once

#include "ops/linear/torch/common.h"

namespace warpwright {

// Neither TMA nor vector loads take 16-bit rows whose stride is no multiple of 16 bytes, such as
// those of 50257 logits. A large gradient that both products read is copied once to padded rows;
// any other is returned as it is.
Tensor with_aligned_rows(const Tensor& grad_output, const OptionalTensor& input,
                         std::array<bool, 3> output_mask);

}  // namespace warpwright
