// The activations that a layer may apply, by name, and the value that each gradient needs.
#pragma once

#include <cstdint>

namespace warpwright {

enum class Activation : int8_t { kNone, kRelu, kGelu, kGeluTanh, kSilu };

// SiLU and the tanh form of GELU are both z * sigmoid(p(z)) with p(z) = z (linear + cubic * z^2):
// (1 + tanh(u)) / 2 is sigmoid(2 u).
struct SigmoidArgument {
  double linear;
  double cubic;
};

constexpr SigmoidArgument sigmoid_argument(Activation activation) {
  constexpr double kTwoRootTwoOverPi = 1.59576912160573071176;
  if (activation == Activation::kSilu) return {1.0, 0.0};
  return {kTwoRootTwoOverPi, kTwoRootTwoOverPi * 0.044715};
}

constexpr const char* activation_name(Activation activation) {
  constexpr const char* kNames[] = {"none", "relu", "gelu", "gelu_tanh", "silu"};
  return kNames[static_cast<int>(activation)];
}

}  // namespace warpwright
