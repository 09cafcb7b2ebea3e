// Gradients that go past a cast. Under autocast a node may lead to a float32 tensor itself, past
// the node of its cast: the gradient then leaves the node's backward in float32.
#pragma once

#include "torch/autograd.h"
#include "torch/plain.h"
#include "torch/traced.h"

namespace warpwright {

// Whether a node of operands of type `type` may lead to `source`, from which `operand` was cast.
// Undefined tensors pass.
inline bool may_be_direct(const Tensor& source, const Tensor& operand, at::ScalarType type) {
  if (!source.defined()) return true;
  return operand.scalar_type() == type && is_plain_or_traced(source) &&
         (source.scalar_type() == type || source.scalar_type() == at::kFloat);
}

// Whether a cast would widen the gradient of `source`.
inline bool wants_gradient_of_cast(const Tensor& source, const Tensor& operand) {
  return needs_gradient(source) && !source.is_same(operand);
}

}  // namespace warpwright
