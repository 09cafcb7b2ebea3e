// The operands of a product under autocast.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "ops/linear/torch/common.h"

namespace warpwright {

// The operands in autocast's type, and autocast off while this exists. Casts are autocast's own,
// with three changes:
//  - float32 inputs are cast by our kernel, once for all products that read them. The products keep
//    the result for their backward. While one of them does, the next one finds it.
//  - `direct`: the product's node may lead to the float32 tensors themselves. Their gradients then
//    leave the backward's products in float32, and no node casts them.
//  - an optimizer's 16-bit copy of a weight or bias (torch/weight_copies.h) stands in for its cast.
struct AutocastOperands {
  AutocastOperands(c10::DeviceType device, const Tensor& input, const Tensor& weight,
                   const OptionalTensor& bias);

  c10::impl::ExcludeDispatchKeyGuard no_autocast;
  Tensor input, weight;
  OptionalTensor bias;
  bool direct;
  // The input that such a node leads to. In a trace it is the cast one: Inductor fuses the input's
  // cast with its neighbours, which then read a gradient of 16 bits.
  Tensor source;
};

}  // namespace warpwright
