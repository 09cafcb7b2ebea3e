// Activations and their gradients on vectors, and the elements of any type as vectors of the type
// that computes.
#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <tuple>

#include "common/activation.h"
#include "cpu/types.h"

namespace warpwright {

template <class T>
using Vector = at::vec::Vectorized<T>;

// f(p, z, sigmoid(p)) needs p(z) and its derivative: common/activation.h.
template <class Acc>
struct SigmoidPolynomial {
  Vector<Acc> linear;
  Vector<Acc> cubic;

  explicit SigmoidPolynomial(Activation activation)
      : linear(static_cast<Acc>(sigmoid_argument(activation).linear)),
        cubic(static_cast<Acc>(sigmoid_argument(activation).cubic)) {}

  // The bound prevents 0 * infinity. The sigmoid is 0 or 1 long before it.
  static Vector<Acc> square(Vector<Acc> z) { return at::vec::minimum(z * z, Vector<Acc>(1e30)); }
  Vector<Acc> exp_of_minus(Vector<Acc> z) const {
    return (z * (linear + cubic * square(z))).neg().exp();
  }
  Vector<Acc> derivative(Vector<Acc> z) const {
    return linear + Vector<Acc>(3) * cubic * square(z);
  }
};

constexpr double kRootHalf = 0.70710678118654752440;
// Phi(z), the standard normal distribution; 1 + erf would cancel where z is negative.
template <class V>
V normal_cdf(V z) {
  using Acc = typename V::value_type;
  return V(Acc(0.5)) * (z * V(static_cast<Acc>(-kRootHalf))).erfc();
}

constexpr double kOneOverRootTwoPi = 0.39894228040143267794;

// Calls f with a function of vectors of Acc: z -> the activation.
template <class Acc, class F>
void for_activation(Activation activation, F&& f) {
  using V = Vector<Acc>;
  const V one(1);
  switch (activation) {
    case Activation::kNone:
      return f([](V z) { return z; });
    case Activation::kRelu:
      // "z < 0" is false for NaN and for -0.0: both stay, as in the native CPU kernel.
      return f([](V z) { return V::blendv(z, V(0), z < V(0)); });
    case Activation::kGelu:
      return f([](V z) { return z * normal_cdf(z); });
    case Activation::kGeluTanh:
    case Activation::kSilu: {
      const SigmoidPolynomial<Acc> argument(activation);
      return f([=](V z) { return z / (one + argument.exp_of_minus(z)); });
    }
  }
}

// The same for (dy, kept) -> dz.
template <class Acc, class F>
void for_activation_gradient(Activation activation, F&& f) {
  using V = Vector<Acc>;
  const V one(1), minus_half(-0.5);
  const V density(static_cast<Acc>(kOneOverRootTwoPi));
  switch (activation) {
    case Activation::kNone:
      return f([](V dy, V) { return dy; });
    case Activation::kRelu:
      return f([](V dy, V y) { return V::blendv(dy, V(0), y <= V(0)); });
    case Activation::kGelu:
      return f([=](V dy, V z) {
        return dy * (normal_cdf(z) + z * density * (minus_half * z * z).exp());
      });
    case Activation::kGeluTanh:
    case Activation::kSilu: {
      const SigmoidPolynomial<Acc> argument(activation);
      return f([=](V dy, V z) {
        const V e = argument.exp_of_minus(z), s = one / (one + e);
        const V rest = V::blendv(one - s, e * s, e <= one);  // 1 - s, without cancellation
        return dy * (s * (one + z * rest * argument.derivative(z)));
      });
    }
  }
}

// Vector<T>::size() elements in their compute type: one vector, or two for 16-bit elements.
template <class T>
struct Elements {
  using Acc = CpuCompute<T>;
  static constexpr int kParts = sizeof(T) == 2 ? 2 : 1;
  static constexpr int64_t kCount = Vector<T>::size();
  Vector<Acc> part[kParts];

  static Elements load(const T* source, int64_t count) {
    Elements result;
    const auto raw = count == kCount ? Vector<T>::loadu(source) : Vector<T>::loadu(source, count);
    if constexpr (kParts == 2) {
      std::tie(result.part[0], result.part[1]) = at::vec::convert_to_float<T>(raw);
    } else {
      result.part[0] = raw;
    }
    return result;
  }
  void store(T* target, int64_t count) const {
    Vector<T> raw;
    if constexpr (kParts == 2) {
      raw = at::vec::convert_from_float<T>(part[0], part[1]);
    } else {
      raw = part[0];
    }
    raw.store(target, static_cast<int>(count));
  }
};

}  // namespace warpwright
