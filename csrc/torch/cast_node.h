// The node of a cast: its backward casts back.
#pragma once

#include "torch/autograd.h"

namespace warpwright {

struct CastBackward {
  static constexpr const char* kName = "WarpwrightCastBackward";
  struct Attributes {
    at::ScalarType type;  // of the input
  };
  static variable_list backward(const Attributes& a, const variable_list&,
                                const variable_list& grads, const NeedsGrad&) {
    return {grads[0].to(a.type)};
  }
};

// `run` makes the result in another type, below Autograd. Second derivatives find the input.
template <class Run>
Tensor differentiable_cast(const Tensor& x, Run&& run) {
  auto node = make_node<CastBackward>({x.scalar_type()}, x);
  Tensor result = below_autograd(std::forward<Run>(run));
  if (node) set_history(result, node);
  return result;
}

}  // namespace warpwright
