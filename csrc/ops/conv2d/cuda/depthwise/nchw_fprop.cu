// The forward of NCHW images (nchw.cuh), and the input gradient of stride 1.
#include "ops/conv2d/cuda/depthwise/nchw.cuh"

namespace warpwright {
namespace {

constexpr int kTileRows = kDepthwiseTileRows;

// Layout: x (N, C, H, W), w (K, kTaps * kTaps), bias (K) or null, y (N, K, P, Q).
// Grid: one tile of kTileRows x kRunQ outputs per thread, along rows first, then strips, then
// planes.
template <class T, int kTaps, int kStride, bool kIsVec>
__global__ void __launch_bounds__(kDirectThreads)
    conv2d_depthwise_nchw_fprop_kernel(const T* x, const T* w, const T* bias, T* y, DirectShape g,
                                       FastDivmod strips, FastDivmod channels, int items, bool flip,
                                       bool vec_y) {
  using A = Accum<T>;
  constexpr int kWindow = (kRunQ - 1) * kStride + kTaps;
  constexpr int kWeights = kTaps * kTaps;
  const int item = blockIdx.x * kDirectThreads + threadIdx.x;
  if (item >= items) return;
  int rest, q0, p0, image, k;
  g.columns.divmod(item, rest, q0);
  strips.divmod(rest, rest, p0);
  channels.divmod(rest, image, k);
  q0 *= kRunQ;
  p0 *= kTileRows;
  A weights[kWeights];
#pragma unroll
  for (int t = 0; t < kWeights; ++t) {
    weights[t] = convert<A>(w[int64_t{k} * kWeights + (flip ? kWeights - 1 - t : t)]);
  }
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
  for (int i = 0; i < (kTileRows - 1) * kStride + kTaps; ++i) {
    A rX[kWindow];
    load_window<kWindow, kIsVec>(plane + (h0 + i) * g.x_row, x, is_inside(h0 + i, g.h), w0, g.w,
                                 rX);
#pragma unroll
    for (int r = 0; r < kTaps; ++r) {
      const int p = (i - r) / kStride;
      if (i < r || (i - r) % kStride != 0 || p >= kTileRows) continue;
#pragma unroll
      for (int j = 0; j < kRunQ; ++j) {
#pragma unroll
        for (int s = 0; s < kTaps; ++s) acc[p][j] += rX[j * kStride + s] * weights[r * kTaps + s];
      }
    }
  }
  T* out = y + image * g.y_image + k * g.y_chan + p0 * g.y_row + q0;
#pragma unroll
  for (int p = 0; p < kTileRows; ++p) {
    if (p0 + p < g.p) store_run<kRunQ>(out + p * g.y_row, g.q - q0, vec_y, acc[p]);
  }
}

}  // namespace

void launch_depthwise_nchw_fprop(const Conv2dParams& p, const DepthwiseNchwFpropConfig& config,
                                 cudaStream_t stream) {
  if (config.tiles == 0) return;
  const Conv2dShape& s = p.shape;
  for_nchw_window(s, [&]<class T, int kTaps>() {
    for_nchw_stride(s.stride_w, config.vectorized_x, [&]<int kStride, bool kIsVec>() {
      launch(conv2d_depthwise_nchw_fprop_kernel<T, kTaps, kStride, kIsVec>,
             grid_of_tiles(config.tiles), dim3(kDirectThreads), 0, stream,
             static_cast<const T*>(p.input), static_cast<const T*>(p.weight),
             static_cast<const T*>(p.bias), static_cast<T*>(p.output), DirectShape(s, kRunQ),
             FastDivmod(ceil_div<int64_t>(s.p, kTileRows)), FastDivmod(s.k),
             static_cast<int>(config.tiles), config.flip, config.vectorized_y);
    });
  });
}

}  // namespace warpwright
