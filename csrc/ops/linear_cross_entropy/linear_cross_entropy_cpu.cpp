// The gradients' factor on the CPU; the chunks themselves are calls of linear and cross_entropy.
#include <type_traits>

#include "ops/linear_cross_entropy/linear_cross_entropy.h"
#include "torch/cpu.h"

namespace warpwright {
namespace {

template <class From, class To>
void scale(const GradientScaleParams& p) {
  using Compute = CpuCompute<From>;
  const From* input = static_cast<const From*>(p.input);
  To* output = static_cast<To*>(p.output);
  const Compute factor = *static_cast<const Compute*>(p.factor);
  if (p.input == p.output && factor == 1) return;
  at::parallel_for(0, p.count, kCpuGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      output[i] = static_cast<To>(static_cast<Compute>(input[i]) * factor);
    }
  });
}

}  // namespace

void scale_gradient_cpu(const GradientScaleParams& p) {
  if (p.input_dtype != p.output_dtype) return scale<float, c10::Half>(p);
  for_cpu_dtype(p.input_dtype, [&]<class T>() { scale<T, T>(p); });
}

}  // namespace warpwright
