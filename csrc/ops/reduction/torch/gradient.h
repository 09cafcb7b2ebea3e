// The gradient by the input of a reduction, in one pass.
#pragma once

#include "ops/reduction/gradient.h"
#include "ops/reduction/torch/common.h"

namespace warpwright {

// The type of the kernel's numbers per output.
inline at::ScalarType accumulator_of(const Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// Whether `input` and `grad` are dense memory that nothing watches, and no derivative of the
// gradient is wanted. Otherwise the caller composes the gradient of ATen's operators.
bool takes_gradient_kernel(const Tensor& input, const DimMask& mask, const Tensor& grad);

// The gradient that `kind` says. `value`, `scale` and `other` have size 1 in the reduced
// dimensions.
Tensor reduction_gradient(ReductionGradient kind, const Tensor& input, const DimMask& mask,
                          const Tensor& value, const Tensor& scale, const Tensor& other = Tensor());

// How often each output's maximum `value` occurs, in `value`'s shape.
Tensor count_maxima(const Tensor& input, const DimMask& mask, const Tensor& value);

}  // namespace warpwright
