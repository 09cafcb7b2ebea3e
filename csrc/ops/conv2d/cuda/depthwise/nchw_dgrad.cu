// The input gradient of stride 2 of NCHW images (nchw.cuh).
#include "ops/conv2d/cuda/depthwise/nchw.cuh"

namespace warpwright {
namespace {

constexpr int kTileRows = kDepthwiseTileRows;

// dgrad of stride 2. In the padded dx, dy (p, q) reaches rows 2p .. 2p + kTaps - 1. A thread has
// kTileRows x kRunQ elements of dx, from an even row and column of the padded one on.
// Layout: dy (N, C, P, Q), w (C, kTaps * kTaps), dx (N, C, H, W). Grid: as fprop.
template <class T, int kTaps>
__global__ void __launch_bounds__(kDirectThreads)
    conv2d_depthwise_nchw_dgrad_kernel(const T* dy, const T* w, T* dx, DirectShape g,
                                       FastDivmod runs, FastDivmod strips, FastDivmod channels,
                                       int items) {
  using A = Accum<T>;
  constexpr int kLive = (kTaps + 1) / 2;  // rows of dy that reach a pair of rows
  constexpr int kPairRows = kTileRows / 2, kPairCols = kRunQ / 2;
  constexpr int kWindow = kPairCols + kLive - 1;
  const int item = blockIdx.x * kDirectThreads + threadIdx.x;
  if (item >= items) return;
  int rest, run, strip, image, c;
  runs.divmod(item, rest, run);
  strips.divmod(rest, rest, strip);
  channels.divmod(rest, image, c);
  A weights[kTaps * kTaps];
#pragma unroll
  for (int t = 0; t < kTaps * kTaps; ++t) {
    weights[t] = convert<A>(w[int64_t{c} * kTaps * kTaps + t]);
  }
  // The first pair of rows and columns that the image has, then the tile's.
  const int pair_row = g.pad_h / 2 + strip * kPairRows, pair_col = g.pad_w / 2 + run * kPairCols;
  const T* plane = dy + image * g.y_image + c * g.y_chan;
  A acc[kTileRows][kRunQ] = {};
#pragma unroll
  for (int i = 0; i < kPairRows + kLive - 1; ++i) {
    const int p = pair_row - (kLive - 1) + i;
    A rDy[kWindow];
    load_window<kWindow, false>(plane + p * g.y_row, dy, is_inside(p, g.p), pair_col - (kLive - 1),
                                g.q, rDy);
#pragma unroll
    for (int r = 0; r < kTaps; ++r) {
      const int row = i - (kLive - 1) + r / 2;
      if (row < 0 || row >= kPairRows) continue;
#pragma unroll
      for (int j = 0; j < kWindow; ++j) {
#pragma unroll
        for (int s = 0; s < kTaps; ++s) {
          const int col = j - (kLive - 1) + s / 2;
          if (col < 0 || col >= kPairCols) continue;
          acc[2 * row + r % 2][2 * col + s % 2] += rDy[j] * weights[r * kTaps + s];
        }
      }
    }
  }
  const int h0 = 2 * pair_row - g.pad_h, w0 = 2 * pair_col - g.pad_w;
  T* out = dx + image * g.x_image + c * g.x_chan;
#pragma unroll
  for (int a = 0; a < kTileRows; ++a) {
    if (!is_inside(h0 + a, g.h)) continue;
#pragma unroll
    for (int b = 0; b < kRunQ; ++b) {
      if (is_inside(w0 + b, g.w)) out[(h0 + a) * g.x_row + w0 + b] = convert<T>(acc[a][b]);
    }
  }
}

}  // namespace

void launch_depthwise_nchw_dgrad(const Conv2dBackwardParams& p,
                                 const DepthwiseNchwDgradConfig& config, cudaStream_t stream) {
  const Conv2dShape& s = p.shape;
  for_nchw_window(s, [&]<class T, int kTaps>() {
    launch(conv2d_depthwise_nchw_dgrad_kernel<T, kTaps>, grid_of_tiles(config.tiles),
           dim3(kDirectThreads), 0, stream, static_cast<const T*>(p.grad_output),
           static_cast<const T*>(p.weight), static_cast<T*>(p.grad_input), DirectShape(s, kRunQ),
           FastDivmod(config.runs), FastDivmod(config.strips), FastDivmod(s.c),
           static_cast<int>(config.tiles));
  });
}

}  // namespace warpwright
