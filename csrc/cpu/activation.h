// Activations and their gradients on vectors, and the elements of any type as vectors of the type
// that computes.
#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <tuple>

#include "common/activation.h"
#include "cpu/exp.h"
#include "cpu/types.h"

namespace warpwright {
inline namespace CPU_CAPABILITY {  // cpu/capability.h

template <class T>
using Vector = at::vec::Vectorized<T>;

// min(x, bound), where NaN stays: one instruction, at::vec::minimum has four.
template <class Acc>
__attribute__((always_inline)) inline Vector<Acc> at_most(Vector<Acc> x, double bound) {
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (std::is_same_v<Acc, float>) {
    return _mm512_min_ps(Vector<float>(static_cast<float>(bound)), x);
  }
#elif defined(__AVX2__)
  if constexpr (std::is_same_v<Acc, float>) {
    return _mm256_min_ps(Vector<float>(static_cast<float>(bound)), x);
  }
#endif
  return at::vec::minimum(x, Vector<Acc>(static_cast<Acc>(bound)));
}

// f(p, z, sigmoid(p)) needs p(z) and its derivative: common/activation.h.
template <class Acc>
struct SigmoidPolynomial {
  Vector<Acc> linear;
  Vector<Acc> cubic;

  explicit SigmoidPolynomial(Activation activation)
      : linear(static_cast<Acc>(sigmoid_argument(activation).linear)),
        cubic(static_cast<Acc>(sigmoid_argument(activation).cubic)) {}

  // The bound prevents 0 * infinity. The sigmoid is 0 or 1 long before it.
  static Vector<Acc> square(Vector<Acc> z) { return at_most(z * z, 1e30); }
  Vector<Acc> exp_of_minus(Vector<Acc> z) const {
    return exp_of((z * (linear + cubic * square(z))).neg());
  }
  Vector<Acc> derivative(Vector<Acc> z) const {
    return linear + Vector<Acc>(3) * cubic * square(z);
  }
};

// c[0] + c[1] x + c[2] x^2 + ...: even and odd powers apart, because the latency of one chain would
// be the bound.
template <size_t kTerms>
Vector<float> polynomial(Vector<float> x, const float (&c)[kTerms]) {
  const Vector<float> square = x * x;
  Vector<float> last(c[kTerms - 1]), other(c[kTerms - 2]);
  for (size_t i = kTerms - 2; i-- > 0;) {
    const Vector<float> next = at::vec::fmadd(last, square, Vector<float>(c[i]));
    last = other;
    other = next;
  }
  return at::vec::fmadd(last, x, other);
}

// Phi(z), the standard normal distribution, and exp(-z^2 / 2), which its density contains.
template <class Acc>
struct Normal {
  Vector<Acc> cdf, exponential;
};

inline Normal<double> normal(Vector<double> z) {
  using V = Vector<double>;
  constexpr double kRootHalf = 0.70710678118654752440;
  // 1 + erf would cancel where z is negative.
  return {V(0.5) * (z * V(-kRootHalf)).erfc(), (V(-0.5) * z * z).exp()};
}

// The minimax fits of device/normal_cdf.cuh, which has their errors. With a = |z|:
//   a < 1.25   1/2 + z S(z^2)
//   else       Phi(-a) = exp(-a^2 / 2) u U(u), u = 1 / (a + 3)
__attribute__((always_inline)) inline Normal<float> normal(Vector<float> z) {
  using V = Vector<float>;
  // The first coefficient, 1 / sqrt(2 pi), in two parts: its rounding would be half of the error.
  constexpr float kFirst = 0.398942292f;
  constexpr float kCenter[] = {-1.13351e-08f,   -0.0664903745f,   0.00997350365f, -0.00118711882f,
                               0.000115043367f, -9.06477635e-06f, 4.77419178e-07f};
  constexpr float kTail[] = {0.398923844f, 1.19826865f, 3.14365864f,  8.06261444f,
                             2.15522838f,  74.0456009f, -300.559418f, 295.159363f};
  const V one(1), half(0.5);
  const V a = at_most(z.abs(), 15);  // exp(-a^2 / 2) is 0 there already
  const V square = a * a, rounded_off = at::vec::fmsub(a, a, square);
  const V exponential = exp_of</*kBounded=*/true>(square * V(-0.5)) * (one - half * rounded_off);
  const V center = at::vec::fmadd(z, polynomial(square, kCenter) + V(kFirst), half);
  const V u = one / (a + V(3));
  const V tail = exponential * (u * polynomial(u, kTail));
  const V far = V::blendv(one - tail, tail, z < V(0));
  return {V::blendv(far, center, a < V(1.25)), exponential};
}

constexpr double kOneOverRootTwoPi = 0.39894228040143267794;

// A smooth activation and its derivative: one exponential serves both.
template <class Acc>
struct ValueAndSlope {
  Vector<Acc> value, slope;
};

// Calls f with a function of vectors of Acc: z -> ValueAndSlope. It is inlined, so that nothing
// computes the one that the caller does not use.
template <class Acc, class F>
void for_smooth_activation(Activation activation, F&& f) {
  using V = Vector<Acc>;
  const V one(1);
  if (activation == Activation::kGelu) {
    const V density(static_cast<Acc>(kOneOverRootTwoPi));
    return f([=](V z) __attribute__((always_inline))->ValueAndSlope<Acc> {
      const Normal<Acc> n = normal(z);
      return {z * n.cdf, n.cdf + z * density * n.exponential};
    });
  }
  // Of e = exp(-p(z)) and p'(z).
  const auto from = [=](V z, V e, V slope) __attribute__((always_inline)) {
    const V s = one / (one + e);
    const V rest = V::blendv(one - s, e * s, e <= one);  // 1 - s, without cancellation
    return ValueAndSlope<Acc>{z / (one + e), s * (one + z * rest * slope)};
  };
  if (activation == Activation::kSilu) {
    return f([=](V z) __attribute__((always_inline)) { return from(z, exp_of(z.neg()), one); });
  }
  const SigmoidPolynomial<Acc> argument(activation);
  f([=](V z) __attribute__((always_inline)) {
    return from(z, argument.exp_of_minus(z), argument.derivative(z));
  });
}

// The same with a function z -> the activation.
template <class Acc, class F>
void for_activation(Activation activation, F&& f) {
  using V = Vector<Acc>;
  if (activation == Activation::kNone) return f([](V z) { return z; });
  if (activation == Activation::kRelu) {
    // "z < 0" is false for NaN and for -0.0: both stay, as in the native CPU kernel.
    return f([](V z) { return V::blendv(z, V(0), z < V(0)); });
  }
  for_smooth_activation<Acc>(activation, [&](auto&& smooth) {
    f([=](V z) __attribute__((always_inline)) { return smooth(z).value; });
  });
}

// The same with (dy, kept) -> dz.
template <class Acc, class F>
void for_activation_gradient(Activation activation, F&& f) {
  using V = Vector<Acc>;
  if (activation == Activation::kNone) return f([](V dy, V) { return dy; });
  if (activation == Activation::kRelu) {
    return f([](V dy, V y) { return V::blendv(dy, V(0), y <= V(0)); });
  }
  for_smooth_activation<Acc>(activation, [&](auto&& smooth) {
    f([=](V dy, V z) __attribute__((always_inline)) { return dy * smooth(z).slope; });
  });
}

// Vector<T>::size() elements in their compute type: one vector, or two for 16-bit elements.
template <class T>
struct Elements {
  using Acc = CpuCompute<T>;
  static constexpr int kParts = sizeof(T) == 2 ? 2 : 1;
  static constexpr int64_t kCount = Vector<T>::size();
  Vector<Acc> part[kParts];

  __attribute__((always_inline)) static Elements load(const T* source, int64_t count) {
    Elements result;
    const auto raw = count == kCount ? Vector<T>::loadu(source) : Vector<T>::loadu(source, count);
    if constexpr (kParts == 2) {
      std::tie(result.part[0], result.part[1]) = at::vec::convert_to_float<T>(raw);
    } else {
      result.part[0] = raw;
    }
    return result;
  }
  __attribute__((always_inline)) void store(T* target, int64_t count) const {
    Vector<T> raw;
    if constexpr (kParts == 2) {
      raw = at::vec::convert_from_float<T>(part[0], part[1]);
    } else {
      raw = part[0];
    }
    raw.store(target, static_cast<int>(count));
  }
};

}  // namespace CPU_CAPABILITY
}  // namespace warpwright
