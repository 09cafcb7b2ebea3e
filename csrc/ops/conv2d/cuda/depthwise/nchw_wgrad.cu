// The weight gradient of NCHW images (nchw.cuh).
#include "device/reduce.cuh"
#include "ops/conv2d/cuda/depthwise/nchw.cuh"
#include "ops/conv2d/cuda/direct/wgrad.h"

namespace warpwright {
namespace {

constexpr int kTileRows = kDepthwiseTileRows;
constexpr int kWgradThreads = 128;

// Layout: x (N, C, H, W), dy (N, K, P, Q), partials (parts, taps + 1, K).
// Grid: CTA b has channel b % K of images b / K * part_images + [0, part_images); its threads take
// tiles of kTileRows x kRunQ outputs in turn.
template <class T, int kTaps, int kStride, bool kIsVec>
__global__ void __launch_bounds__(kWgradThreads, 4)
    conv2d_depthwise_nchw_wgrad_kernel(const T* x, const T* dy, Accum<T>* partials, DirectShape g,
                                       FastDivmod strips, int images, int part_images) {
  using A = Accum<T>;
  constexpr int kWindow = (kRunQ - 1) * kStride + kTaps;
  constexpr int kValues = kTaps * kTaps + 1;  // and the bias
  __shared__ A shared[kWgradThreads / kWarpSize][kValues];
  const int k = blockIdx.x % g.k, part = blockIdx.x / g.k;
  const int first = part * part_images;
  const int tiles = max(0, min(part_images, images - first)) * static_cast<int>(strips.divisor) *
                    g.units_per_row();
  const T* planes = x + first * g.x_image + k / g.multiplier * g.x_chan;
  const T* grads = dy + first * g.y_image + k * g.y_chan;
  A sums[kValues] = {};
  for (int index = threadIdx.x; index < tiles; index += kWgradThreads) {
    int rest, q0, p0, image;
    g.columns.divmod(index, rest, q0);
    strips.divmod(rest, image, p0);
    q0 *= kRunQ, p0 *= kTileRows;
    const int run = g.q - q0;
    A rDy[kTileRows][kRunQ];
#pragma unroll
    for (int p = 0; p < kTileRows; ++p) {
      load_run<kRunQ, kIsVec>(grads + image * g.y_image + (p0 + p) * g.y_row + q0, dy,
                              p0 + p < g.p ? run : 0, rDy[p]);
#pragma unroll
      for (int j = 0; j < kRunQ; ++j) sums[kValues - 1] += rDy[p][j];
    }
    const T* plane = planes + image * g.x_image;
    const int h0 = p0 * kStride - g.pad_h, w0 = q0 * kStride - g.pad_w;
    // Of a tile at the edge only the outputs that exist: zero times an infinite x would be NaN.
    auto multiply = [&]<bool kWhole>() {
#pragma unroll
      for (int i = 0; i < (kTileRows - 1) * kStride + kTaps; ++i) {
        A rX[kWindow];
        load_window<kWindow, kIsVec && kStride == 1>(plane + (h0 + i) * g.x_row, x,
                                                     is_inside(h0 + i, g.h), w0, g.w, rX);
#pragma unroll
        for (int r = 0; r < kTaps; ++r) {
          const int p = (i - r) / kStride;
          if (i < r || (i - r) % kStride != 0 || p >= kTileRows) continue;
          if (!kWhole && p0 + p >= g.p) continue;
#pragma unroll
          for (int j = 0; j < kRunQ; ++j) {
            if (!kWhole && j >= run) break;
#pragma unroll
            for (int s = 0; s < kTaps; ++s) sums[r * kTaps + s] += rDy[p][j] * rX[j * kStride + s];
          }
        }
      }
    };
    // A second copy of the loops, if registers are left for it.
    constexpr bool kTwoCopies = kIsVec && kTaps <= 5;
    if (kTwoCopies && p0 + kTileRows <= g.p && run >= kRunQ) {
      multiply.template operator()<kTwoCopies>();
    } else {
      multiply.template operator()<false>();
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

}  // namespace

void launch_depthwise_nchw_wgrad(const Conv2dBackwardParams& p,
                                 const DepthwiseNchwWgradConfig& config, void* workspace,
                                 cudaStream_t stream) {
  const Conv2dShape& s = p.shape;
  const int images = static_cast<int>(s.n);
  for_nchw_window(s, [&]<class T, int kTaps>() {
    for_nchw_stride(s.stride_w, config.vectorized, [&]<int kStride, bool kIsVec>() {
      launch(conv2d_depthwise_nchw_wgrad_kernel<T, kTaps, kStride, kIsVec>,
             dim3(static_cast<unsigned>(s.k * config.parts)), dim3(kWgradThreads), 0, stream,
             static_cast<const T*>(p.input), static_cast<const T*>(p.grad_output),
             static_cast<Accum<T>*>(workspace), DirectShape(s, kRunQ),
             FastDivmod(std::max<int64_t>(1, ceil_div<int64_t>(s.p, kTileRows))), images,
             ceil_div(images, config.parts));
    });
  });
  launch_direct_wgrad_sum(p, config.parts, static_cast<int>(s.k), workspace, stream);
}

}  // namespace warpwright
