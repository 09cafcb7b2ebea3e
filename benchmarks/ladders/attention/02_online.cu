// Online: one kernel. A warp owns a query and walks over the keys. It keeps the maximum so far, the
// sum of exponentials so far, and out so far. A larger maximum scales both.
// Why: no score is ever stored. Memory sees q, k, v and out, and the lanes read whole lines.
// Bound: instructions. A score costs five shuffles and an exponential in all 32 lanes.
#include <cmath>

#include "ladder.cuh"

namespace ladder {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / warpwright::kWarpSize;
constexpr int kPerLane = kHead / warpwright::kWarpSize;
using Lane = warpwright::Vec<bf16, kPerLane>;

// Lane l has elements 4 l to 4 l + 3 of each row.
__device__ __forceinline__ warpwright::Vec<float, kPerLane> load_lane(const bf16* row) {
  return warpwright::widen(
      warpwright::load_vec<kPerLane>(row + threadIdx.x % warpwright::kWarpSize * kPerLane));
}

// Grid: a warp per query; the warps of a block share a head.
__global__ void __launch_bounds__(kThreads) online_kernel(Problem p) {
  const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / warpwright::kWarpSize;
  const int64_t head = row / p.tokens * p.tokens * kHead;
  const auto q = load_lane(p.q + row * kHead);
  float max = -INFINITY, sum = 0, out[kPerLane] = {};
#pragma unroll 4
  for (int j = 0; j < p.tokens; ++j) {
    const auto k = load_lane(p.k + head + int64_t{j} * kHead);
    const auto v = load_lane(p.v + head + int64_t{j} * kHead);
    float score = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) score += q[i] * k[i];
    score = warpwright::warp_reduce(score, warpwright::Sum{}) * kScaleLog2;
    const float new_max = fmaxf(max, score);
    const float scale = exp2f(max - new_max), weight = exp2f(score - new_max);
    max = new_max;
    sum = sum * scale + weight;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) out[i] = out[i] * scale + weight * v[i];
  }
  Lane result;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) result[i] = __float2bfloat16_rn(out[i] / sum);
  warpwright::store_vec(p.out + row * kHead + threadIdx.x % warpwright::kWarpSize * kPerLane,
                        result);
}

}  // namespace

const Rung kRung = {kWarps, kThreads, 0};

void launch_rung(const Problem& p) {
  warpwright::launch(online_kernel, dim3(static_cast<unsigned>(p.rows() / kWarps)), dim3(kThreads),
                     0, p.stream, p);
}

}  // namespace ladder
