// Depthwise: forward and weight gradient are the direct kernels with one input channel an output.
// The input gradient with stride 1 and multiplier 1 is a forward with the window turned round;
// any other gathers, for each input, the outputs whose window covers it.
#include "ops/conv2d/cuda/depthwise/nchw.cuh"

namespace warpwright {
namespace {

// Layout: dy (N, P, Q, K) or (N, K, P, Q), w (K, R * S), dx (N, H, W, C) or (N, C, H, W).
// Grid: one element of dx a thread, in dx's order; sums over (m, r, s) in that order.
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

void launch_fprop(const Conv2dShape& s, bool flip, const void* x, const void* w, const void* bias,
                  void* y, cudaStream_t stream) {
  if (conv2d_depthwise_nchw_fprop_supported(s)) {
    return launch_conv2d_depthwise_nchw_fprop(s, flip, x, w, bias, y, stream);
  }
  launch_conv2d_direct_fprop(s.dtype, DirectShape(s, kRunQ), true, flip, x, w, bias, y, stream);
}

}  // namespace

int64_t conv2d_depthwise_wgrad_workspace_bytes(const Conv2dShape& shape, const DeviceInfo& device) {
  return conv2d_direct_wgrad_workspace_bytes(shape, true, device);
}

void launch_conv2d_depthwise_fwd(const Conv2dParams& p, cudaStream_t stream) {
  launch_fprop(p.shape, false, p.input, p.weight, p.bias, p.output, stream);
}

void launch_conv2d_depthwise_dgrad(const Conv2dBackwardParams& p, cudaStream_t stream) {
  const Conv2dShape& s = p.shape;
  if (s.stride_h == 1 && s.stride_w == 1 && s.k == s.c) {
    Conv2dShape turned = s;
    std::swap(turned.h, turned.p);
    std::swap(turned.w, turned.q);
    turned.pad_h = (s.r - 1) * s.dilation_h - s.pad_h;
    turned.pad_w = (s.s - 1) * s.dilation_w - s.pad_w;
    return launch_fprop(turned, true, p.grad_output, p.weight, nullptr, p.grad_input, stream);
  }
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

void launch_conv2d_depthwise_wgrad(const Conv2dBackwardParams& p, void* workspace,
                                   cudaStream_t stream) {
  launch_conv2d_direct_wgrad(p, true, workspace, stream);
}

}  // namespace warpwright
