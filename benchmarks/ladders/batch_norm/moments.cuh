// What rungs 4 and 5 share: count, mean and squared deviation in one pass, and their merge.
#pragma once

#include "rows.cuh"

namespace ladder {

// Of some values: their number, mean and sum (x - mean)^2.
struct Moments {
  float count, mean, m2;
};

// Chan, Golub and LeVeque 1979. No large numbers are subtracted.
struct MergeMoments {
  __device__ __forceinline__ Moments operator()(Moments a, Moments b) const {
    const float count = a.count + b.count;
    if (count == 0) return a;
    const float delta = b.mean - a.mean, share = b.count / count;
    return {count, a.mean + delta * share, a.m2 + b.m2 + delta * delta * a.count * share};
  }
};

// moments: (blocks, kChannels). A thread adds x - pivot and its square, where the pivot is the
// first value that it reads: near the mean, so that little is lost.
__global__ void __launch_bounds__(kThreads, 4) moments_kernel(Problem p, Moments* moments) {
  __shared__ Moments shared[kGroups * kChannels];
  float count = 0, pivot[kVec], sum[kVec] = {}, squares[kVec] = {};
  for_rows<false>(p.x, p.rows, [&](int64_t, Eight x) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      if (count == 0) pivot[i] = x[i];
      const float off = x[i] - pivot[i];
      sum[i] += off;
      squares[i] += off * off;
    }
    count += 1;
  });
  Moments own[kVec];
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    const float mean = count == 0 ? 0 : sum[i] / count;
    own[i] = {count, count == 0 ? 0 : pivot[i] + mean, squares[i] - sum[i] * mean};
  }
  merge_block(own, shared, moments + blockIdx.x * kChannels, MergeMoments{});
}

// One block. mean: (kChannels); factor: weight / sqrt(var + eps).
__global__ void __launch_bounds__(kFinishThreads)
    finish_moments_kernel(Problem p, const Moments* moments, int blocks, float* mean,
                          float* factor) {
  __shared__ Moments shared[kFinishThreads];
  const Moments all = merge_blocks(moments, blocks, shared, MergeMoments{});
  const int c = threadIdx.x;
  if (c >= kChannels) return;
  mean[c] = all.mean;
  factor[c] = p.weight[c] * rsqrtf(all.m2 / all.count + kEps);
}

// Statistics in one pass, then the result.
template <bool kBackwards>
void launch_two_passes_over_x(const Problem& p) {
  float* mean = p.floats();
  float* factor = mean + kChannels;
  auto* moments = reinterpret_cast<Moments*>(factor + kChannels);
  const unsigned blocks = row_blocks();
  warpwright::launch(moments_kernel, dim3(blocks), dim3(kThreads), 0, p.stream, p, moments);
  warpwright::launch(finish_moments_kernel, dim3(1), dim3(kFinishThreads), 0, p.stream, p, moments,
                     static_cast<int>(blocks), mean, factor);
  warpwright::launch(apply_kernel<kBackwards>, dim3(blocks), dim3(kThreads), 0, p.stream, p, mean,
                     factor);
}

constexpr int kMomentsSmem = kGroups * kChannels * int{sizeof(Moments)};

}  // namespace ladder
