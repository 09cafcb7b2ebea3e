// The depthwise input gradient of any stride and multiplier. Each input gathers the outputs whose
// windows cover it. With stride 1 and multiplier 1 it is a forward instead (is_flipped_fprop).
#include "ops/conv2d/cuda/depthwise/depthwise.h"
#include "ops/conv2d/cuda/direct/direct.cuh"

namespace warpwright {
namespace {

// Layout: dy (N, P, Q, K) or (N, K, P, Q), w (K, R * S), dx (N, H, W, C) or (N, C, H, W).
// Grid: one element of dx per thread, in dx's order; sums over (m, r, s) in that order.
template <class T>
__global__ void __launch_bounds__(kDirectThreads, 4)
    conv2d_depthwise_dgrad_kernel(const T* dy, const T* w, T* dx, DirectShape g, int64_t numel) {
  using A = Accum<T>;
  const int64_t index = int64_t{blockIdx.x} * kDirectThreads + threadIdx.x;
  if (index >= numel) return;
  const int64_t image = index / g.x_image;
  const int64_t inside = index % g.x_image;
  const int c = static_cast<int>(inside / g.x_chan % g.c);
  const int h = static_cast<int>(inside / g.x_row % g.h);
  const int col = static_cast<int>(inside / g.x_col % g.w);
  A sum = 0;
  for (int m = 0; m < g.multiplier; ++m) {
    const int k = c * g.multiplier + m;
    const T* weights = w + int64_t{k} * g.r * g.s;
    const T* plane = dy + image * g.y_image + k * g.y_chan;
    for (int r = 0; r < g.r; ++r) {
      const int down = h + g.pad_h - r * g.dilation_h;
      if (down < 0 || down % g.stride_h != 0 || down / g.stride_h >= g.p) continue;
      const T* row = plane + down / g.stride_h * g.y_row;
      for (int s = 0; s < g.s; ++s) {
        const int right = col + g.pad_w - s * g.dilation_w;
        if (right < 0 || right % g.stride_w != 0 || right / g.stride_w >= g.q) continue;
        sum += convert<A>(row[right / g.stride_w * g.y_col]) * convert<A>(weights[r * g.s + s]);
      }
    }
  }
  dx[index] = convert<T>(sum);
}

}  // namespace

void launch_depthwise_dgrad(const Conv2dBackwardParams& p, cudaStream_t stream) {
  const Conv2dShape& s = p.shape;
  const int64_t numel = s.n * s.c * s.h * s.w;
  if (numel == 0) return;
  for_dtype(s.dtype, [&]<class T>() {
    launch(conv2d_depthwise_dgrad_kernel<T>,
           dim3(static_cast<unsigned>(ceil_div<int64_t>(numel, kDirectThreads))),
           dim3(kDirectThreads), 0, stream, static_cast<const T*>(p.grad_output),
           static_cast<const T*>(p.weight), static_cast<T*>(p.grad_input), DirectShape(s, kRunQ),
           numel);
  });
}

}  // namespace warpwright
