// Depthwise, NCHW, windows of 3 x 3 without dilation. A thread has a tile of one plane, so it loads
// each input row once for all outputs that the row contributes to. The direct kernels take other
// shapes.
#include "common/switch.h"
#include "device/reduce.cuh"
#include "ops/conv2d/cuda/depthwise/depthwise.h"
#include "ops/conv2d/cuda/direct/direct.cuh"
#include "ops/conv2d/cuda/direct/wgrad.h"

namespace warpwright {
namespace {

constexpr int kTileRows = kDepthwiseTileRows;
constexpr int kWgradThreads = 128;
constexpr int kValues = 10;  // nine taps and the bias

// Columns q0 * kStride - pad + [0, kWindow) of an input row. kIsVec: stride 1, pad 1 and rows of
// whole vectors, so that all columns except the first and the last are one aligned access.
template <int kWindow, bool kIsVec, class T, class A>
__device__ __forceinline__ void load_window(const T* row, const T* safe, bool exists, int w0,
                                            int width, A (&to)[kWindow]) {
  if constexpr (kIsVec) {
    A middle[kRunQ];
    load_run<kRunQ, true>(row + w0 + 1, safe, exists ? width - (w0 + 1) : 0, middle);
#pragma unroll
    for (int i = 0; i < kRunQ; ++i) to[i + 1] = middle[i];
    to[0] = exists && w0 >= 0 ? convert<A>(row[w0]) : A(0);
    to[kWindow - 1] = exists && w0 + kWindow - 1 < width ? convert<A>(row[w0 + kWindow - 1]) : A(0);
  } else {
#pragma unroll
    for (int i = 0; i < kWindow; ++i) {
      to[i] = exists && is_inside(w0 + i, width) ? convert<A>(row[w0 + i]) : A(0);
    }
  }
}

// Layout: x (N, C, H, W), w (K, 9), bias (K) or null, y (N, K, P, Q).
// Grid: one tile of kTileRows x kRunQ outputs per thread, along rows first, then strips, then
// planes.
template <class T, int kStride, bool kIsVec>
__global__ void __launch_bounds__(kDirectThreads)
    conv2d_depthwise_nchw_fprop_kernel(const T* x, const T* w, const T* bias, T* y, DirectShape g,
                                       FastDivmod strips, FastDivmod channels, int items, bool flip,
                                       bool vec_y) {
  using A = Accum<T>;
  constexpr int kWindow = (kRunQ - 1) * kStride + 3;
  const int item = blockIdx.x * kDirectThreads + threadIdx.x;
  if (item >= items) return;
  int rest, q0, p0, image, k;
  g.columns.divmod(item, rest, q0);
  strips.divmod(rest, rest, p0);
  channels.divmod(rest, image, k);
  q0 *= kRunQ;
  p0 *= kTileRows;
  A weights[9];
#pragma unroll
  for (int t = 0; t < 9; ++t) weights[t] = convert<A>(w[int64_t{k} * 9 + (flip ? 8 - t : t)]);
  const A b = bias != nullptr ? convert<A>(bias[k]) : A(0);
  A acc[kTileRows][kRunQ];
#pragma unroll
  for (int p = 0; p < kTileRows; ++p) {
#pragma unroll
    for (int j = 0; j < kRunQ; ++j) acc[p][j] = b;
  }
  const T* plane = x + image * g.x_image + k / g.multiplier * g.x_chan;
  const int h0 = p0 * kStride - g.pad_h, w0 = q0 * kStride - g.pad_w;
#pragma unroll
  for (int i = 0; i < (kTileRows - 1) * kStride + 3; ++i) {
    A rX[kWindow];
    load_window<kWindow, kIsVec>(plane + (h0 + i) * g.x_row, x, is_inside(h0 + i, g.h), w0, g.w,
                                 rX);
#pragma unroll
    for (int r = 0; r < 3; ++r) {
      const int p = (i - r) / kStride;
      if (i < r || (i - r) % kStride != 0 || p >= kTileRows) continue;
#pragma unroll
      for (int j = 0; j < kRunQ; ++j) {
#pragma unroll
        for (int s = 0; s < 3; ++s) acc[p][j] += rX[j * kStride + s] * weights[r * 3 + s];
      }
    }
  }
  T* out = y + image * g.y_image + k * g.y_chan + p0 * g.y_row + q0;
#pragma unroll
  for (int p = 0; p < kTileRows; ++p) {
    if (p0 + p < g.p) store_run<kRunQ>(out + p * g.y_row, g.q - q0, vec_y, acc[p]);
  }
}

// Layout: x (N, C, H, W), dy (N, K, P, Q), partials (parts, 10, K).
// Grid: CTA b has channel b % K of images b / K * part_images + [0, part_images); its threads take
// runs of kRunQ outputs in turn.
template <class T, int kStride, bool kIsVec>
__global__ void __launch_bounds__(kWgradThreads)
    conv2d_depthwise_nchw_wgrad_kernel(const T* x, const T* dy, Accum<T>* partials, DirectShape g,
                                       int images, int part_images) {
  using A = Accum<T>;
  constexpr int kWindow = (kRunQ - 1) * kStride + 3;
  __shared__ A shared[kWgradThreads / kWarpSize][kValues];
  const int k = blockIdx.x % g.k, part = blockIdx.x / g.k;
  const int first = part * part_images;
  const int units = max(0, min(part_images, images - first)) * g.p * g.units_per_row();
  const T* planes = x + first * g.x_image + k / g.multiplier * g.x_chan;
  const T* grads = dy + first * g.y_image + k * g.y_chan;
  A sums[kValues] = {};
  for (int index = threadIdx.x; index < units; index += kWgradThreads) {
    const DirectUnit unit = direct_unit(g, index, kRunQ);
    const int run = g.q - unit.q;
    A rDy[kRunQ];
    load_run<kRunQ, kIsVec>(grads + unit.image * g.y_image + unit.p * g.y_row + unit.q, dy, run,
                            rDy);
    const T* plane = planes + unit.image * g.x_image;
    const int h0 = unit.p * kStride - g.pad_h, w0 = unit.q * kStride - g.pad_w;
    A rX[3][kWindow];
#pragma unroll
    for (int r = 0; r < 3; ++r) {
      load_window<kWindow, kIsVec && kStride == 1>(plane + (h0 + r) * g.x_row, x,
                                                   is_inside(h0 + r, g.h), w0, g.w, rX[r]);
    }
#pragma unroll
    for (int j = 0; j < kRunQ; ++j) {
      if (j >= run) break;  // zero times an infinite x would be NaN
#pragma unroll
      for (int t = 0; t < 9; ++t) sums[t] += rDy[j] * rX[t / 3][j * kStride + t % 3];
      sums[9] += rDy[j];
    }
  }
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const A sum = warp_reduce(sums[i], Sum{});
    if (threadIdx.x % kWarpSize == 0) shared[threadIdx.x / kWarpSize][i] = sum;
  }
  __syncthreads();
  if (threadIdx.x >= kValues) return;
  A sum = 0;
#pragma unroll
  for (int i = 0; i < kWgradThreads / kWarpSize; ++i) sum += shared[i][threadIdx.x];
  partials[(int64_t{part} * kValues + threadIdx.x) * g.k + k] = sum;
}

template <class F>
void for_stride(int64_t stride, bool is_vec, F&& f) {
  if (stride == 2) return f.template operator()<2, false>();
  for_bool(is_vec, [&]<bool kIsVec>() { f.template operator()<1, kIsVec>(); });
}

}  // namespace

void launch_depthwise_nchw_fprop(const Conv2dParams& p, const DepthwiseNchwFpropConfig& config,
                                 cudaStream_t stream) {
  if (config.tiles == 0) return;
  const Conv2dShape& s = p.shape;
  for_dtype(s.dtype, [&]<class T>() {
    for_stride(s.stride_w, config.vectorized_x, [&]<int kStride, bool kIsVec>() {
      launch(conv2d_depthwise_nchw_fprop_kernel<T, kStride, kIsVec>,
             dim3(static_cast<unsigned>(ceil_div<int64_t>(config.tiles, kDirectThreads))),
             dim3(kDirectThreads), 0, stream, static_cast<const T*>(p.input),
             static_cast<const T*>(p.weight), static_cast<const T*>(p.bias),
             static_cast<T*>(p.output), DirectShape(s, kRunQ),
             FastDivmod(ceil_div<int64_t>(s.p, kTileRows)), FastDivmod(s.k),
             static_cast<int>(config.tiles), config.flip, config.vectorized_y);
    });
  });
}

void launch_depthwise_nchw_wgrad(const Conv2dBackwardParams& p,
                                 const DepthwiseNchwWgradConfig& config, void* workspace,
                                 cudaStream_t stream) {
  const Conv2dShape& s = p.shape;
  const int images = static_cast<int>(s.n);
  for_dtype(s.dtype, [&]<class T>() {
    for_stride(s.stride_w, config.vectorized, [&]<int kStride, bool kIsVec>() {
      launch(conv2d_depthwise_nchw_wgrad_kernel<T, kStride, kIsVec>,
             dim3(static_cast<unsigned>(s.k * config.parts)), dim3(kWgradThreads), 0, stream,
             static_cast<const T*>(p.input), static_cast<const T*>(p.grad_output),
             static_cast<Accum<T>*>(workspace), DirectShape(s, kRunQ), images,
             ceil_div(images, config.parts));
    });
  });
  launch_direct_wgrad_sum(p, config.parts, static_cast<int>(s.k), workspace, stream);
}

}  // namespace warpwright
