// Vectorised loops. Bound by memory in large tensors, by the exponential in the caches.
#include "cpu/activation.h"
#include "ops/activation/activation.h"

namespace warpwright {
namespace {

using enum PointwiseActivation;

Activation smooth_activation(PointwiseActivation f) {
  return f == kGelu ? Activation::kGelu : f == kSilu ? Activation::kSilu : Activation::kGeluTanh;
}

inline Vector<double> tanh_of(Vector<double> x) { return x.tanh(); }

// With a = |x|:
//   a < 0.625  a + a^3 Q(a^2); Q is the minimax fit of tanh's relative error, 4.4e-9
//   else       1 - 2 / (exp(2 a) + 1)
inline Vector<float> tanh_of(Vector<float> x) {
  using V = Vector<float>;
  constexpr float kQ[] = {-0.3333328f, 0.13331442f, -0.053739715f, 0.020639088f, -0.0057049873f};
  const V one(1), two(2), sign = x & V(-0.0f), a = x ^ sign, square = a * a;
  const V near = at::vec::fmadd(a * square, polynomial(square, kQ), a);
  const V far = one - two / (exp_of(a + a) + one);
  return V::blendv(far, near, a < V(0.625)) | sign;
}

// Calls f with a function of vectors of Acc: x -> the activation.
template <class Acc, class F>
void for_pointwise(PointwiseActivation activation, F&& f) {
  using V = Vector<Acc>;
  if (activation == kTanh) {
    return f([](V x) __attribute__((always_inline)) { return tanh_of(x); });
  }
  if (activation == kSigmoid) {
    return f([](V x) __attribute__((always_inline)) { return V(1) / (V(1) + exp_of(x.neg())); });
  }
  for_activation<Acc>(smooth_activation(activation), f);
}

// The same with (dy, kept) -> dx.
template <class Acc, class F>
void for_pointwise_gradient(PointwiseActivation activation, F&& f) {
  using V = Vector<Acc>;
  if (activation == kTanh) return f([](V dy, V y) { return dy * (V(1) - y * y); });
  if (activation == kSigmoid) return f([](V dy, V y) { return dy * (V(1) - y) * y; });
  for_activation_gradient<Acc>(smooth_activation(activation), f);
}

// Calls step(i, count) for all elements, a vector at a time.
template <class T, class Step>
void for_vectors(int64_t numel, const Step& step) {
  at::parallel_for(0, numel, kCpuGrain, [&](int64_t begin, int64_t end) {
    const Step own = step;  // in registers: the compiler cannot tell that no store writes `step`
    int64_t i = begin;
    for (; i + Elements<T>::kCount <= end; i += Elements<T>::kCount) own(i, Elements<T>::kCount);
    if (i < end) own(i, end - i);
  });
}

}  // namespace

namespace CPU_CAPABILITY {

void activation_loops(const ActivationParams& p) {
  for_cpu_dtype(p.dtype, [&]<class T>() {
    const T* input = static_cast<const T*>(p.input);
    T* output = static_cast<T*>(p.output);
    for_pointwise<CpuCompute<T>>(p.activation, [&](auto&& activation) {
      for_vectors<T>(
          p.numel, [=](int64_t i, int64_t count) __attribute__((always_inline)) {
            auto x = Elements<T>::load(input + i, count);
            for (auto& part : x.part) part = activation(part);
            x.store(output + i, count);
          });
    });
  });
}

void activation_backward_loops(const ActivationBackwardParams& p) {
  for_cpu_dtype(p.dtype, [&]<class T>() {
    using E = Elements<T>;
    const T* grad_output = static_cast<const T*>(p.grad_output);
    const T* kept = static_cast<const T*>(p.kept);
    T* grad_input = static_cast<T*>(p.grad_input);
    for_pointwise_gradient<CpuCompute<T>>(p.activation, [&](auto&& gradient) {
      for_vectors<T>(
          p.numel, [=](int64_t i, int64_t count) __attribute__((always_inline)) {
            E dy = E::load(grad_output + i, count);
            const E k = E::load(kept + i, count);
            for (int part = 0; part < E::kParts; ++part) {
              dy.part[part] = gradient(dy.part[part], k.part[part]);
            }
            dy.store(grad_input + i, count);
          });
    });
  });
}

}  // namespace CPU_CAPABILITY
}  // namespace warpwright
