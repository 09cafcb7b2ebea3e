// The operands of a convolution under autocast.
#pragma once

#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "ops/conv2d/torch/common.h"
#include "torch/direct_gradient.h"
#include "torch/weight_copies.h"

namespace warpwright {

// The operands in autocast's type, as ATen's lower_precision_fp list has them, and autocast off
// while this exists. An optimizer's 16-bit copy of a weight or bias stands in for its cast.
struct ConvOperands {
  ConvOperands(c10::DeviceType device, const Tensor& input_, const Tensor& weight_,
               const Tensor& bias_)
      : no_autocast(at::autocast::get_autocast_dispatch_key_from_device_type(device)) {
    const auto type = at::autocast::get_lower_precision_fp_from_device_type(device);
    input = at::autocast::cached_cast(type, input_, device);
    weight = cast_weight(type, weight_, device);
    bias = cast_weight(type, bias_, device);
    direct = is_16bit(type) &&
             (wants_gradient_of_cast(weight_, weight) || wants_gradient_of_cast(bias_, bias)) &&
             may_be_direct(input, input, type) && may_be_direct(weight_, weight, type) &&
             may_be_direct(bias_, bias, type);
  }

  c10::impl::ExcludeDispatchKeyGuard no_autocast;
  Tensor input, weight, bias;
  // The convolution's node may lead to the float32 weight and bias. Their gradients then leave its
  // backward in float32, and no node casts them. The input keeps its cast.
  bool direct;
};

}  // namespace warpwright
