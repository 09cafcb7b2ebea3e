// Gradients in one pass over the input, in the order of memory.
#include "cpu/row_sums.h"
#include "ops/reduction/cpu/operators.h"
#include "ops/reduction/cpu/runs.h"
#include "ops/reduction/cpu_gradient.h"

namespace warpwright {
namespace {

// The numbers of an output, or of neighbouring outputs.
template <class V>
struct Numbers {
  V value, scale, other;
};

// The exponential of one element is that of a lane, so a bit does not depend on where a thread's
// part of the elements ends.
template <class T, class V>
V power_of(V x) {
  if constexpr (std::is_same_v<V, Values<T>>) {
    return CpuLogSumExp<T>::power(x);
  } else {
    return CpuLogSumExp<T>::power(Values<T>{} + x)[0];
  }
}

template <class T, ReductionGradient kKind, class V>
V gradient_of(V x, const Numbers<V>& numbers) {
  const auto& [value, scale, other] = numbers;
  if constexpr (kKind == ReductionGradient::kMaximum) return x == value ? scale : other;
  if constexpr (kKind == ReductionGradient::kExponential) return scale * power_of<T>(x - value);
  return scale * (x - value);
}

// `number` in every lane. The difference keeps the sign of 0.
template <class V, class C>
V lanes_of(C number) {
  return number - V{};
}

template <class T, ReductionGradient kKind>
class GradientRun {
 public:
  using C = CpuCompute<T>;
  static constexpr bool kHasOther = kKind == ReductionGradient::kMaximum;

  // The numbers from place `output` on.
  GradientRun(const ReductionGradientParams& p, int64_t output)
      : value_(static_cast<const C*>(p.value) + output),
        scale_(static_cast<const C*>(p.scale) + output),
        other_(kHasOther ? static_cast<const C*>(p.other) + output : nullptr) {}

  // The elements share one output.
  void write_reduced(const T* x, T* gradient, int64_t count) const {
    const Numbers<C> numbers = at(0);
    for_accesses<T>(count, [&]<class Access>(int64_t i) {
      using V = typename Access::V;
      const Numbers<V> lanes{lanes_of<V>(numbers.value), lanes_of<V>(numbers.scale),
                             lanes_of<V>(numbers.other)};
      Access::store(gradient + i, gradient_of<T, kKind>(Access::load(x + i), lanes));
    });
  }
  // Neighbouring elements have neighbouring outputs.
  void write_kept(const T* x, T* gradient, int64_t count) const {
    for_accesses<T>(count, [&]<class Access>(int64_t i) {
      Numbers<typename Access::V> lanes{
          Access::load_compute(value_ + i), Access::load_compute(scale_ + i), {}};
      if constexpr (kHasOther) lanes.other = Access::load_compute(other_ + i);
      Access::store(gradient + i, gradient_of<T, kKind>(Access::load(x + i), lanes));
    });
  }
  void write_apart(const T* x, T* gradient, int64_t count, int64_t pitch) const {
    for (int64_t i = 0; i < count; ++i) {
      gradient[i] = static_cast<T>(gradient_of<T, kKind>(static_cast<C>(x[i]), at(i * pitch)));
    }
  }

 private:
  Numbers<C> at(int64_t i) const { return {value_[i], scale_[i], kHasOther ? other_[i] : C(0)}; }

  const C *value_, *scale_, *other_;
};

template <class T, ReductionGradient kKind>
void write_gradient(const ReductionGradientParams& p) {
  const ReductionAxis& inner = p.layout.inner;
  at::parallel_for(0, p.numel, kCpuGrain, [&](int64_t begin, int64_t end) {
    for_pieces(inner.size, begin, end, [&](int64_t run, int64_t first, int64_t count) {
      const int64_t element = run * inner.size + first, pitch = inner.output_stride;
      const T* x = static_cast<const T*>(p.input) + element;
      T* gradient = static_cast<T*>(p.gradient) + element;
      const GradientRun<T, kKind> numbers(p, locate(p.layout.outer, run).output + first * pitch);
      if (inner.is_reduced) return numbers.write_reduced(x, gradient, count);
      if (pitch == 1) return numbers.write_kept(x, gradient, count);
      numbers.write_apart(x, gradient, count, pitch);
    });
  });
}

}  // namespace

void reduction_gradient_cpu(const ReductionGradientParams& p) {
  for_cpu_dtype(p.dtype, [&]<class T>() {
    switch (p.kind) {
      case ReductionGradient::kMaximum:
        return write_gradient<T, ReductionGradient::kMaximum>(p);
      case ReductionGradient::kExponential:
        return write_gradient<T, ReductionGradient::kExponential>(p);
      case ReductionGradient::kDeviation:
        return write_gradient<T, ReductionGradient::kDeviation>(p);
    }
  });
}

}  // namespace warpwright
