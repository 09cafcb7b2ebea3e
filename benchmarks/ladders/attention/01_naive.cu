// Naive: three kernels. All scores to memory, softmax of each row in memory, the product with v.
// Why: it is the formula. A thread computes one score, a block one row's softmax, a thread one
// element of out.
// Bound: L1. Neighbouring lanes read neighbouring keys, 256 bytes apart: 32 lines for one load. And
// the scores take 4 tokens^2 bytes per head, four times through memory.
#include <cmath>

#include "ladder.cuh"

namespace ladder {
namespace {

constexpr int kThreads = 256;

// scores: (heads, tokens, tokens). Grid: a thread per score; tokens is a multiple of kThreads.
__global__ void __launch_bounds__(kThreads) scores_kernel(Problem p, float* scores) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t row = i / p.tokens;  // of all heads
  const int64_t key = row / p.tokens * p.tokens + i % p.tokens;
  const auto* q = reinterpret_cast<const __nv_bfloat162*>(p.q + row * kHead);
  const auto* k = reinterpret_cast<const __nv_bfloat162*>(p.k + key * kHead);
  float sum = 0;
  for (int d = 0; d < kHead / 2; ++d) {
    const float2 x = __bfloat1622float2(q[d]), y = __bfloat1622float2(k[d]);
    sum += x.x * y.x + x.y * y.y;
  }
  scores[i] = sum * kScale;
}

// Grid: a block per row.
__global__ void __launch_bounds__(kThreads) softmax_kernel(Problem p, float* scores) {
  __shared__ float shared[kThreads / warpwright::kWarpSize];
  float* row = scores + int64_t{blockIdx.x} * p.tokens;
  float largest = -INFINITY;
  for (int j = threadIdx.x; j < p.tokens; j += kThreads) largest = fmaxf(largest, row[j]);
  largest = warpwright::block_reduce(largest, warpwright::Max{}, -INFINITY, shared);
  float sum = 0;
  for (int j = threadIdx.x; j < p.tokens; j += kThreads) sum += expf(row[j] - largest);
  sum = warpwright::block_reduce(sum, warpwright::Sum{}, 0.f, shared);
  for (int j = threadIdx.x; j < p.tokens; j += kThreads) row[j] = expf(row[j] - largest) / sum;
}

// Grid: a thread per element of out.
__global__ void __launch_bounds__(kThreads) values_kernel(Problem p, const float* scores) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t row = i / kHead;
  const bf16* v = p.v + row / p.tokens * p.tokens * kHead + i % kHead;
  const float* weights = scores + row * p.tokens;
  float sum = 0;
  for (int j = 0; j < p.tokens; ++j) sum += weights[j] * __bfloat162float(v[int64_t{j} * kHead]);
  p.out[i] = __float2bfloat16_rn(sum);
}

}  // namespace

const Rung kRung = {kThreads, kThreads, kThreads / warpwright::kWarpSize * 4};

void launch_rung(const Problem& p) {
  float* scores = reinterpret_cast<float*>(p.workspace);
  const dim3 block(kThreads);
  auto blocks = [](int64_t threads) { return dim3(static_cast<unsigned>(threads / kThreads)); };
  warpwright::launch(scores_kernel, blocks(p.rows() * p.tokens), block, 0, p.stream, p, scores);
  warpwright::launch(softmax_kernel, dim3(static_cast<unsigned>(p.rows())), block, 0, p.stream, p,
                     scores);
  warpwright::launch(values_kernel, blocks(p.rows() * kHead), block, 0, p.stream, p, scores);
}

}  // namespace ladder
