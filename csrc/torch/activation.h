// Activations that an op takes by name, and their second derivatives.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <string>
#include <string_view>

#include "common/activation.h"

namespace warpwright {

// The activation of this name among those that `op` takes.
inline Activation find_activation(std::string_view name, const char* op,
                                  std::initializer_list<Activation> known) {
  std::string names;
  size_t left = known.size();
  for (const Activation activation : known) {
    if (name == activation_name(activation)) return activation;
    --left;
    names += activation_name(activation);
    names += left > 1 ? ", " : left == 1 ? " or " : "";
  }
  TORCH_CHECK(false, op, ": activation: expected ", names, ", got ", name);
}

// f''(z), except for relu, whose is 0. 16-bit values are taken in float.
inline at::Tensor second_derivative(const at::Tensor& value, Activation activation) {
  const bool is_short = value.element_size() == 2;
  const at::Tensor z = is_short ? value.to(at::kFloat) : value;
  at::Tensor result;
  if (activation == Activation::kGelu) {
    // phi(z) (2 - z^2)
    constexpr double kOneOverRootTwoPi = 0.39894228040143267794;
    result = (z * z * -0.5).exp() * kOneOverRootTwoPi * (2 - z * z);
  } else {
    // z s(p): 2 s' p' + z (s'' p'^2 + s' p''), with s' = s (1 - s) and s'' = s' (1 - 2 s)
    const SigmoidArgument argument = sigmoid_argument(activation);
    const at::Tensor p = z * (z * z * argument.cubic + argument.linear);
    const at::Tensor s = p.sigmoid();
    const at::Tensor s1 = s * (-p).sigmoid();  // 1 - s would cancel
    const at::Tensor p1 = z * z * (3 * argument.cubic) + argument.linear;
    result = s1 * (p1 * 2 + z * (p1 * p1 * (1 - s * 2) + z * (6 * argument.cubic)));
  }
  return is_short ? result.to(value.scalar_type()) : result;
}

}  // namespace warpwright
