// Plain loops that the compiler vectorises. Memory traffic is the bound.
#include "cpu/types.h"
#include "ops/relu/relu.h"

namespace warpwright {

void relu_cpu(const ReluParams& p) {
  for_any_cpu_dtype(p.dtype, [&]<class T>() {
    const T* input = static_cast<const T*>(p.input);
    T* output = static_cast<T*>(p.output);
    at::parallel_for(0, p.numel, kCpuGrain, [=](int64_t begin, int64_t end) {
      using Compute = CpuCompute<T>;
      for (int64_t i = begin; i < end; ++i) {
        const Compute x = input[i];
        // "x < 0" is false for NaN and for -0.0: both remain, as in the native CPU kernel.
        output[i] = static_cast<T>(x < Compute(0) ? Compute(0) : x);
      }
    });
  });
}

void relu_backward_cpu(const ReluBackwardParams& p) {
  for_any_cpu_dtype(p.dtype, [&]<class T>() {
    const T* grad_output = static_cast<const T*>(p.grad_output);
    const T* output = static_cast<const T*>(p.output);
    T* grad_input = static_cast<T*>(p.grad_input);
    at::parallel_for(0, p.numel, kCpuGrain, [=](int64_t begin, int64_t end) {
      using Compute = CpuCompute<T>;
      for (int64_t i = begin; i < end; ++i) {
        const Compute y = output[i];
        const Compute dy = grad_output[i];
        grad_input[i] = static_cast<T>(y <= Compute(0) ? Compute(0) : dy);
      }
    });
  });
}

}  // namespace warpwright
