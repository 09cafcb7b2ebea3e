// What becomes of the sums over an image, and of the products of the two layers.
#pragma once

#include "device/activation.cuh"
#include "ops/squeeze_excitation/squeeze_excitation.h"

namespace warpwright {

// A sum of x: the mean.
template <class Acc>
struct MeanOfSum {
  Acc* mean;  // (batch, channels)
  Acc count;

  __device__ __forceinline__ void operator()(int64_t at, Acc sum) const { mean[at] = sum / count; }
};

// A sum of dy * x, the gradient of s: that of g's argument.
template <class Acc>
struct GradientOfSum {
  ScaleActivation scale_activation;
  const Acc* scale;  // (batch, channels)
  Acc* gradient;     // (batch, channels)

  __device__ __forceinline__ void operator()(int64_t at, Acc sum) const {
    const Acc s = scale[at];
    if (scale_activation == ScaleActivation::kSigmoid) {
      gradient[at] = sum * (Acc(1) - s) * s;
    } else {
      gradient[at] = s > Acc(0) && s < Acc(1) ? sum * Acc(1.0 / 6.0) : Acc(0);
    }
  }
};

template <class P>
__device__ __forceinline__ auto bias_or_zero(const P* bias, int64_t i) {
  return bias == nullptr ? Accum<P>(0) : convert<Accum<P>>(bias[i]);
}

// z = W1 m + b1 and f(z).
template <class Acc, class P>
struct FinishHidden {
  static constexpr bool kRowSums = false;
  Activation activation;
  const P* bias;
  int64_t squeezed;
  Acc *hidden, *activated;

  __device__ __forceinline__ void operator()(int64_t n, int64_t s, Acc sum) const {
    Acc value = sum + bias_or_zero(bias, s);
    hidden[n * squeezed + s] = value;
    activate<Rounding::kFull, 1>(activation, &value);
    activated[n * squeezed + s] = value;
  }
};

// s = g(W2 f(z) + b2).
template <class Acc, class P>
struct FinishScale {
  static constexpr bool kRowSums = false;
  ScaleActivation scale_activation;
  const P* bias;
  int64_t channels;
  Acc* scale;

  __device__ __forceinline__ void operator()(int64_t n, int64_t c, Acc sum) const {
    const Acc z = sum + bias_or_zero(bias, c);
    Acc result;
    if (scale_activation == ScaleActivation::kSigmoid) {
      result = Acc(1) / (Acc(1) + exp(-z));
    } else {
      const Acc raised = z + Acc(3);  // NaN stays
      result = (raised < Acc(0) ? Acc(0) : raised > Acc(6) ? Acc(6) : raised) * Acc(1.0 / 6.0);
    }
    scale[n * channels + c] = result;
  }
};

// The gradient of z, from that of f(z); and f(z) again.
template <class Acc>
struct FinishHiddenGradient {
  static constexpr bool kRowSums = false;
  Activation activation;
  int64_t squeezed;
  const Acc* hidden;
  Acc *gradient, *activated;

  __device__ __forceinline__ void operator()(int64_t n, int64_t s, Acc sum) const {
    const int64_t at = n * squeezed + s;
    Acc value = hidden[at];
    activate_backward<Rounding::kFull, 1>(activation, &value, &sum);
    gradient[at] = sum;
    activate<Rounding::kFull, 1>(activation, &value);
    activated[at] = value;
  }
};

}  // namespace warpwright
