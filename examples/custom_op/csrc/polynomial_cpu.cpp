// Plain loops that the compiler vectorises. 16-bit types compute in float and round once.
#include "cpu/types.h"
#include "polynomial.h"

namespace polynomial_op {

using warpwright::CpuCompute;
using warpwright::kCpuGrain;

void polynomial_cpu(const PolynomialParams& p) {
  warpwright::for_cpu_dtype(p.dtype, [&]<class T>() {
    const T* x = static_cast<const T*>(p.x);
    T* y = static_cast<T*>(p.y);
    at::parallel_for(0, p.numel, kCpuGrain, [=](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const CpuCompute<T> value = x[i];
        y[i] = static_cast<T>(value * value + value + 1);
      }
    });
  });
}

void polynomial_backward_cpu(const PolynomialBackwardParams& p) {
  warpwright::for_cpu_dtype(p.dtype, [&]<class T>() {
    const T* dy = static_cast<const T*>(p.dy);
    const T* x = static_cast<const T*>(p.x);
    T* dx = static_cast<T*>(p.dx);
    at::parallel_for(0, p.numel, kCpuGrain, [=](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const CpuCompute<T> value = x[i];
        const CpuCompute<T> gradient = dy[i];
        dx[i] = static_cast<T>(gradient * (2 * value + 1));
      }
    });
  });
}

}  // namespace polynomial_op
