// Sums of v and v v^T over all windows v, per block. Sums are in double. A product of two floats is
// exact there, so the covariance does not cancel where the mean is large.
#include "ops/conv2d_batch_norm_relu_max_pool2d/cuda/moments.cuh"

namespace warpwright {
namespace {

// A thread holds at most 54 sums. If there are more, the warps of a block hold a part each.
template <class W>
struct SumParts {
  static constexpr bool kIsOne = W::kSums <= 54;
  static constexpr int kWarps = kIsOne ? 12 : 8;
  static constexpr int kParts = kIsOne ? 1 : kWarps;
  static constexpr int kPerPart = ceil_div(W::kSums, kParts);
  static constexpr int kPadded = 64;             // for scatter_sums
  static constexpr int kAhead = kIsOne ? 4 : 2;  // rows that are under way
  static_assert(kPerPart <= kPadded);
};

// Adds kCount values over the lanes of a warp by halves: a lane keeps half of its values and sends
// the other half, so that lane l ends with the sums l * kCount / 32 .. in values[0] ...
template <int kCount, int kOffset = kWarpSize / 2, int kSize>
__device__ __forceinline__ void scatter_sums(double (&values)[kSize]) {
  constexpr int kHalf = kCount / 2;
  const bool is_upper = (threadIdx.x & kOffset) != 0;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const double sent = is_upper ? values[i] : values[i + kHalf];
    const double kept = is_upper ? values[i + kHalf] : values[i];
    values[i] = kept + __shfl_xor_sync(kFullMask, sent, kOffset);
  }
  if constexpr (kOffset > 1) scatter_sums<kHalf, kOffset / 2>(values);
}

template <class W>
using Elements = double[W::kC][W::kR][W::kS];

// Adds the sums kPart * kPerPart .. of a window.
template <class W, int kPart>
__device__ __forceinline__ void add_part(const Elements<W>& v,
                                         double (&sums)[SumParts<W>::kPadded]) {
  constexpr int kT = W::kElements, kArea = W::kR * W::kS;
  constexpr int kFirst = kPart * SumParts<W>::kPerPart;
  constexpr int kEnd = kFirst + SumParts<W>::kPerPart;
#pragma unroll
  for (int i = 0; i < kT; ++i) {
    const double first = v[i / kArea][i / W::kS % W::kR][i % W::kS];
    if (i >= kFirst && i < kEnd) sums[i - kFirst] += first;
#pragma unroll
    for (int j = i; j < kT; ++j) {
      const int sum = pair_place<W>(i, j);
      if (sum < kFirst || sum >= kEnd) continue;
      sums[sum - kFirst] += first * v[j / kArea][j / W::kS % W::kR][j % W::kS];
    }
  }
}

// The same for a part that is known at run time, and is the same for all lanes of a warp.
template <class W, int kPart = 0>
__device__ __forceinline__ void add_window(int part, const Elements<W>& v,
                                           double (&sums)[SumParts<W>::kPadded]) {
  if constexpr (kPart + 1 == SumParts<W>::kParts) {
    add_part<W, kPart>(v, sums);
  } else {
    if (part == kPart) return add_part<W, kPart>(v, sums);
    add_window<W, kPart + 1>(part, v, sums);
  }
}

// A lane's windows: one column of outputs in some rows of an image. It walks down, and loads of
// each row of the image what the row's windows add.
template <class W>
struct WindowColumn {
  const float* image;
  int row_step, column_step, channel_step;
  int first_row, first_column;  // of the first window in the image
  int height, width;            // width 0: no column of the lane

  __device__ __forceinline__ void load(int row, float (&to)[W::kC][W::kS]) const {
    const int from_row = first_row + row;
    const bool row_exists = from_row >= 0 && from_row < height;
    const float* from = image + int64_t{from_row} * row_step;
#pragma unroll
    for (int s = 0; s < W::kS; ++s) {
      const int column = first_column + s;
      const bool exists = row_exists && column >= 0 && column < width;
#pragma unroll
      for (int c = 0; c < W::kC; ++c) {
        to[c][s] = exists ? from[column * column_step + int64_t{c} * channel_step] : 0.0f;
      }
    }
  }
};

template <class W>
__device__ __forceinline__ void add_column(const WindowColumn<W>& column, int rows, int part,
                                           double (&sums)[SumParts<W>::kPadded]) {
  constexpr int kAhead = SumParts<W>::kAhead;
  Elements<W> v;
  // Row r of v is the one before its first use: each window begins by moving all rows up.
#pragma unroll
  for (int r = 1; r < W::kR; ++r) {
    float loaded[W::kC][W::kS];
    column.load(r - 1, loaded);
#pragma unroll
    for (int i = 0; i < W::kC * W::kS; ++i) {
      v[i / W::kS][r][i % W::kS] = loaded[i / W::kS][i % W::kS];
    }
  }
  float ahead[kAhead][W::kC][W::kS];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) column.load(W::kR - 1 + i, ahead[i]);
  for (int first = 0; first < rows; first += kAhead) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
#pragma unroll
      for (int c = 0; c < W::kC; ++c) {
#pragma unroll
        for (int s = 0; s < W::kS; ++s) {
#pragma unroll
          for (int r = 0; r + 1 < W::kR; ++r) v[c][r][s] = v[c][r + 1][s];
          v[c][W::kR - 1][s] = ahead[i][c][s];
        }
      }
      column.load(first + i + kAhead + W::kR - 1, ahead[i]);
      if (first + i < rows) add_window<W>(part, v, sums);
    }
  }
}

constexpr int kStripRows = 16;

// Layout: x (N, H, W, C) or (N, C, H, W), partials (sums, blocks). Grid: block b has the strips b,
// b + blocks, ... of 16 rows of outputs by 32 columns, a lane each. A warp has strips of its own,
// or a part of the sums of the block's strip.
template <class W>
__global__ void __launch_bounds__(SumParts<W>::kWarps* kWarpSize, 1)
    window_moments_kernel(const float* x, double* partials, TileWalk walk, FastDivmod per_image,
                          FastDivmod across, int strips) {
  using Parts = SumParts<W>;
  __shared__ double shared[Parts::kWarps][Parts::kPadded];
  let_next_kernel_start();
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int part = warp % Parts::kParts;
  constexpr int kAtOnce = Parts::kWarps / Parts::kParts;
  double sums[Parts::kPadded] = {};
  for (int strip = blockIdx.x * kAtOnce + warp / Parts::kParts; strip < strips;
       strip += gridDim.x * kAtOnce) {
    int image, rest, strip_row, strip_column;
    per_image.divmod(strip, image, rest);
    across.divmod(rest, strip_row, strip_column);
    const int p = strip_row * kStripRows, q = strip_column * kWarpSize + lane;
    const int64_t plane = int64_t{walk.h} * walk.w;
    add_column(WindowColumn<W>{.image = x + image * plane * W::kC,
                               .row_step = walk.channels_last ? walk.w * W::kC : walk.w,
                               .column_step = walk.channels_last ? W::kC : 1,
                               .channel_step = walk.channels_last ? 1 : static_cast<int>(plane),
                               .first_row = p - walk.pad_h,
                               .first_column = q - walk.pad_w,
                               .height = walk.h,
                               .width = q < walk.q ? walk.w : 0},
               min(kStripRows, walk.p - p), part, sums);
  }
  scatter_sums<Parts::kPadded>(sums);
#pragma unroll
  for (int i = 0; i < Parts::kPadded / kWarpSize; ++i) {
    shared[warp][lane * (Parts::kPadded / kWarpSize) + i] = sums[i];
  }
  __syncthreads();
  for (int sum = threadIdx.x; sum < W::kSums; sum += blockDim.x) {
    double total = 0;
    for (int w = sum / Parts::kPerPart; w < Parts::kWarps; w += Parts::kParts) {
      total += shared[w][sum % Parts::kPerPart];
    }
    partials[int64_t{sum} * gridDim.x + blockIdx.x] = total;
  }
}

}  // namespace

void launch_window_moments(const float* x, const ConvNormPoolShape& shape,
                           const ConvNormPoolPlan& plan, double* partials, cudaStream_t stream) {
  const int64_t across = ceil_div<int64_t>(shape.conv.q, kWarpSize);
  const int64_t per_image = across * ceil_div<int64_t>(shape.conv.p, kStripRows);
  for_window(plan.window, [&]<class W>() {
    launch(window_moments_kernel<W>, dim3(static_cast<unsigned>(plan.moments_blocks)),
           dim3(SumParts<W>::kWarps * kWarpSize), 0, stream, x, partials, TileWalk(shape, plan),
           FastDivmod(per_image), FastDivmod(across), static_cast<int>(shape.conv.n * per_image));
  });
}

}  // namespace warpwright
