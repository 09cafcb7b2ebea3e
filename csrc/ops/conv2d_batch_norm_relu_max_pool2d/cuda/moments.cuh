// Mean and covariance of a convolution's windows: the merge of the sums that moments.cu leaves, and
// what follows from them for an output channel.
#pragma once

#include "ops/conv2d_batch_norm_relu_max_pool2d/cuda/tile.cuh"

namespace warpwright {

// The sums' order: v, then v_i v_j for i <= j, row by row.
template <class W>
constexpr int pair_place(int i, int j) {
  return W::kElements + i * W::kElements - i * (i - 1) / 2 + (j - i);
}

// partials (sums, plan.moments_blocks).
void launch_window_moments(const float* x, const ConvNormPoolShape& shape,
                           const ConvNormPoolPlan& plan, double* partials, cudaStream_t stream);

// The sum of `count` values over groups of kLanes lanes, in a fixed order; each lane gets its
// group's. A round of loads is under way before the first is added. All lanes of a warp must call.
template <int kLanes, class T>
__device__ __forceinline__ double group_total(const T* values, int count) {
  constexpr int kRound = 8;
  double total = 0;
  for (int first = threadIdx.x % kLanes; first < count; first += kRound * kLanes) {
    T loaded[kRound];
#pragma unroll
    for (int i = 0; i < kRound; ++i) {
      const int place = first + i * kLanes;
      loaded[i] = place < count ? values[place] : T(0);
    }
#pragma unroll
    for (int i = 0; i < kRound; ++i) total += loaded[i];
  }
  return warp_reduce<kLanes>(total, Sum{});
}

constexpr int kMergeMomentsThreads = 1024;

// In shared memory. `sums` are means over the windows.
template <class W>
struct WindowMoments {
  double mean[W::kElements];
  double covariance[W::kElements][W::kElements];
  double sums[W::kSums];

  // Merges the partial sums of `blocks` blocks. All threads of the block must call, and there are
  // kMergeMomentsThreads.
  __device__ __forceinline__ void merge(const double* partials, int blocks, double windows) {
    constexpr int kLanes = 16, kGroups = kMergeMomentsThreads / kLanes;
    for (int first = 0; first < W::kSums; first += kGroups) {
      const int sum = first + threadIdx.x / kLanes;
      const bool exists = sum < W::kSums;
      const double total =
          group_total<kLanes>(partials + int64_t{exists ? sum : 0} * blocks, exists ? blocks : 0);
      if (exists && threadIdx.x % kLanes == 0) sums[sum] = total / windows;
    }
    __syncthreads();
    expand();
  }

  // Sums that were merged and kept. All threads of the block must call.
  __device__ __forceinline__ void load(const double* kept) {
    for (int sum = threadIdx.x; sum < W::kSums; sum += blockDim.x) sums[sum] = kept[sum];
    __syncthreads();
    expand();
  }

  __device__ __forceinline__ void keep(double* to) const {
    for (int sum = threadIdx.x; sum < W::kSums; sum += blockDim.x) to[sum] = sums[sum];
  }

  // Lane i < T gets row i of V w. `w`: the lane's weight, 0 beyond T.
  __device__ __forceinline__ double times(double w) const {
    const int lane = min(threadIdx.x % kWarpSize, W::kElements - 1);
    double product = 0;
#pragma unroll
    for (int j = 0; j < W::kElements; ++j) {
      product += covariance[lane][j] * __shfl_sync(kFullMask, w, j);
    }
    return product;
  }

 private:
  __device__ __forceinline__ void expand() {
    for (int e = threadIdx.x; e < W::kElements * W::kElements; e += blockDim.x) {
      const int i = e / W::kElements, j = e % W::kElements;
      covariance[i][j] = sums[pair_place<W>(min(i, j), max(i, j))] - sums[i] * sums[j];
      if (j == 0) mean[i] = sums[i];
    }
    __syncthreads();
  }
};

// Where element t of a filter lies in the weight.
template <class W>
__device__ __forceinline__ int64_t weight_place(int64_t k, int t, bool channels_last) {
  constexpr int kArea = W::kR * W::kS;
  const int place = channels_last ? t % kArea * W::kC + t / kArea : t;
  return k * W::kElements + place;
}

}  // namespace warpwright
