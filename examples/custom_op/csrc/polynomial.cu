// One element per thread. warpwright's csrc/ops/relu/relu.cu has the form with 16-byte accesses.
#include "common/ceil_div.h"
#include "device/types.cuh"
#include "host/launch.h"
#include "polynomial.h"

namespace polynomial_op {
namespace {

using warpwright::Accum;
using warpwright::convert;

constexpr int kThreads = 256;

// Layout: dense arrays of `numel` elements, walked in the same order.
// Grid: block b has the elements from b * kThreads on.
template <class T>
__global__ void __launch_bounds__(kThreads) forward_kernel(int64_t numel, const T* x, T* y) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= numel) return;
  const Accum<T> value = convert<Accum<T>>(x[i]);
  y[i] = convert<T>(value * value + value + 1);
}

// Layout and grid as above.
template <class T>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(int64_t numel, const T* dy, const T* x, T* dx) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= numel) return;
  const Accum<T> value = convert<Accum<T>>(x[i]);
  dx[i] = convert<T>(convert<Accum<T>>(dy[i]) * (2 * value + 1));
}

dim3 blocks_of(int64_t numel) {
  return dim3(static_cast<unsigned>(warpwright::ceil_div<int64_t>(numel, kThreads)));
}

}  // namespace

void launch_polynomial(const PolynomialParams& p, cudaStream_t stream) {
  if (p.numel == 0) return;
  warpwright::for_dtype(p.dtype, [&]<class T>() {
    warpwright::launch(forward_kernel<T>, blocks_of(p.numel), dim3(kThreads), 0, stream, p.numel,
                       static_cast<const T*>(p.x), static_cast<T*>(p.y));
  });
}

void launch_polynomial_backward(const PolynomialBackwardParams& p, cudaStream_t stream) {
  if (p.numel == 0) return;
  warpwright::for_dtype(p.dtype, [&]<class T>() {
    warpwright::launch(backward_kernel<T>, blocks_of(p.numel), dim3(kThreads), 0, stream, p.numel,
                       static_cast<const T*>(p.dy), static_cast<const T*>(p.x),
                       static_cast<T*>(p.dx));
  });
}

}  // namespace polynomial_op
