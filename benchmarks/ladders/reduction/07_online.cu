// Online: maximum m and sum s in one walk. A larger maximum m' scales the sum so far by exp(m -
// m').
// Why: one read of the row less. The pair (m, s) merges as a sum does, across threads and warps
// too.
// Bound: memory: two reads and one write, as far as L2 does not keep the row.
#include "row.cuh"

namespace ladder {
namespace {

// The softmax of some numbers so far: their maximum, and sum exp(x - max).
struct State {
  float max, sum;
};

struct Merge {
  __device__ __forceinline__ State operator()(State a, State b) const {
    const float max = fmaxf(a.max, b.max);
    if (max == -INFINITY) return {max, 0.f};  // both are empty: -inf - -inf is NaN
    return {max, a.sum * expf(a.max - max) + b.sum * expf(b.max - max)};
  }
};

// The state of all threads of the block, in each of them.
__device__ __forceinline__ State merge_block(State own, State* shared) {
  const int lane = threadIdx.x % warpwright::kWarpSize;
  const int warp = threadIdx.x / warpwright::kWarpSize;
  auto merge_warp = [](State s) {
#pragma unroll
    for (int offset = warpwright::kWarpSize / 2; offset > 0; offset /= 2) {
      const State other = {__shfl_xor_sync(warpwright::kFullMask, s.max, offset),
                           __shfl_xor_sync(warpwright::kFullMask, s.sum, offset)};
      s = Merge{}(s, other);
    }
    return s;
  };
  own = merge_warp(own);
  if (lane == 0) shared[warp] = own;
  __syncthreads();
  return merge_warp(shared[lane]);  // as many warps as lanes
}

// x, y: (rows, cols). Grid: one block per row.
__global__ void __launch_bounds__(kRowThreads, 2)
    online_kernel(const float* x, float* y, int cols) {
  static_assert(kRowWarps == warpwright::kWarpSize);
  __shared__ State shared[kRowWarps];
  const float* row = x + int64_t{blockIdx.x} * cols;
  float* out = y + int64_t{blockIdx.x} * cols;
  State own = {-INFINITY, 0.f};
  for_vectors(row, cols, [&](int, Vec4 z) {
    const float max = max_of(z);
    if (max > own.max) own = {max, own.sum * expf(own.max - max)};
    if (own.max != -INFINITY) own.sum += sum_of(exps(z, own.max));
  });
  const State all = merge_block(own, shared);
  const float scale = 1 / all.sum;
  for_vectors(row, cols, [&](int v, Vec4 z) {
    warpwright::store_vec(out + int64_t{v} * kVec, times(exps(z, all.max), scale));
  });
}

}  // namespace

const Rung kRung = {Function::kSoftmax, kVec, kAnyCols, kRowThreads, kRowWarps* int{sizeof(State)}};

void launch_rung(const Problem& p) {
  warpwright::launch(online_kernel, dim3(static_cast<unsigned>(p.rows)), dim3(kRowThreads), 0,
                     p.stream, p.x, p.result, static_cast<int>(p.cols));
}

}  // namespace ladder
