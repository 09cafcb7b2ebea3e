// Activations and their gradients, for a few elements in a thread's registers. The activation is a
// value of the launch, so all threads take the same branch, once for all of their elements.
//   relu   max(z, 0)                     1 if z > 0 or z is NaN, else 0
//   gelu   z Phi(z)                      Phi(z) + z phi(z)
//   silu   z s, s = sigmoid(z)           s (1 + z (1 - s))
//   tanh form of gelu: sigmoid_argument() in common/activation.h
#pragma once

#include "common/activation.h"
#include "device/exp.cuh"
#include "device/normal_cdf.cuh"
#include "device/types.cuh"

namespace warpwright {

template <Rounding kRounding, class Acc>
__device__ __forceinline__ Acc exp_within(Acc x) {
  if constexpr (kRounding == Rounding::kFull) {
    return exp(x);
  } else {
    return ex2_approx(x * kLog2E);
  }
}
template <Rounding kRounding, class Acc>
__device__ __forceinline__ Acc divide_within(Acc a, Acc b) {
  if constexpr (kRounding == Rounding::kFull) {
    return a / b;
  } else {
    return a * rcp_approx(b);  // 0 for b beyond 2^126, NaN for inf / inf
  }
}
template <Rounding kRounding, class Acc>
__device__ __forceinline__ Acc reciprocal_within(Acc x) {
  if constexpr (kRounding == Rounding::kFull) {
    return Acc(1) / x;
  } else {
    return rcp_approx(x);
  }
}

template <class Acc>
struct SigmoidPolynomial {
  Acc linear;
  Acc cubic;

  __device__ explicit SigmoidPolynomial(Activation activation) {
    constexpr SigmoidArgument kGelu = sigmoid_argument(Activation::kGeluTanh);
    constexpr SigmoidArgument kSilu = sigmoid_argument(Activation::kSilu);
    const bool silu = activation == Activation::kSilu;
    linear = static_cast<Acc>(silu ? kSilu.linear : kGelu.linear);
    cubic = static_cast<Acc>(silu ? kSilu.cubic : kGelu.cubic);
  }

  // The bound prevents 0 * infinity. The sigmoid is 0 or 1 long before it.
  __device__ __forceinline__ Acc square(Acc z) const { return min(z * z, Acc(1e30)); }
  __device__ __forceinline__ Acc operator()(Acc z) const {
    return z * (linear + cubic * square(z));
  }
  __device__ __forceinline__ Acc derivative(Acc z) const {
    return linear + Acc(3) * cubic * square(z);
  }
};

template <Rounding kRounding, int kCount, class Acc>
__device__ __forceinline__ void activate(Activation activation, Acc* values) {
  if (activation == Activation::kNone) return;
  if (activation == Activation::kRelu) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      // NaN stays; -0.0 becomes +0.0, as in the native CUDA kernel.
      values[i] = values[i] <= Acc(0) ? Acc(0) : values[i];
    }
  } else if (activation == Activation::kGelu) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] *= normal_cdf<kRounding>(values[i]);
  } else if (activation == Activation::kSilu) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const Acc e = exp_within<kRounding>(-values[i]);
      values[i] = divide_within<kRounding>(values[i], Acc(1) + e);
    }
  } else {
    // No bound needed: the constants are not zero, so z^2 = infinity gives a sigmoid of 0 or 1.
    constexpr bool kFull = kRounding == Rounding::kFull;
    constexpr SigmoidArgument kArgument = sigmoid_argument(Activation::kGeluTanh);
    constexpr double kScale = kFull ? -1.0 : -double{kLog2E};
    constexpr Acc kLinear = static_cast<Acc>(kScale * kArgument.linear);
    constexpr Acc kCubic = static_cast<Acc>(kScale * kArgument.cubic);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const Acc z = values[i];
      const Acc exponent = z * (kLinear + kCubic * (z * z));
      Acc e;
      if constexpr (kFull) {
        e = exp(exponent);
      } else {
        e = ex2_approx(exponent);
      }
      values[i] = divide_within<kRounding>(z, Acc(1) + e);
    }
  }
}

// gradients[i] *= derivative of the activation at kept[i]: its argument; for relu its result.
template <Rounding kRounding, int kCount, class Acc>
__device__ __forceinline__ void activate_backward(Activation activation, const Acc* kept,
                                                  Acc* gradients) {
  if (activation == Activation::kRelu) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) gradients[i] = kept[i] <= Acc(0) ? Acc(0) : gradients[i];
  } else if (activation == Activation::kGelu) {
    constexpr Acc kOneOverRootTwoPi = Acc(0.39894228040143267794);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const Acc z = kept[i];
      const Acc pdf = exp_within<kRounding>(Acc(-0.5) * z * z) * kOneOverRootTwoPi;
      gradients[i] *= normal_cdf<kRounding>(z) + z * pdf;
    }
  } else if (activation != Activation::kNone) {
    const SigmoidPolynomial<Acc> argument(activation);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const Acc z = kept[i];
      const Acc e = exp_within<kRounding>(-argument(z));
      const Acc s = reciprocal_within<kRounding>(Acc(1) + e);
      const Acc rest = e <= Acc(1) ? e * s : Acc(1) - s;  // 1 - s, without cancellation
      gradients[i] *= s * (Acc(1) + z * rest * argument.derivative(z));
    }
  }
}

}  // namespace warpwright
