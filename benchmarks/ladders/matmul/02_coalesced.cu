// Coalesced: a warp computes one element of D; its lanes walk along k, side by side.
// Why: 32 lanes that read 32 neighbouring pairs read one line of 128 bytes, in one access.
// Bound: L2. Nothing is kept, so every element of D asks for its whole row of B again.
#include "device/reduce.cuh"
#include "ladder.cuh"

namespace ladder {
namespace {

constexpr int kBlkN = 8;  // warps of a block
constexpr int kThreads = kBlkN * 32;
constexpr int kBlkK = 64;  // two elements a lane

// A (m, k), B (n, k), D (m, n), row-major.
// Block: 8 neighbours in a row of D, one a warp; the warps find each other's row of A in L1.
__global__ void __launch_bounds__(kThreads) coalesced_kernel(Gemm g) {
  const int tiles_n = g.n / kBlkN;
  const int lane = threadIdx.x % 32;
  const int row = blockIdx.x / tiles_n;
  const int col = blockIdx.x % tiles_n * kBlkN + threadIdx.x / 32;
  const auto* a = reinterpret_cast<const __nv_bfloat162*>(g.a + int64_t{row} * g.k) + lane;
  const auto* b = reinterpret_cast<const __nv_bfloat162*>(g.b + int64_t{col} * g.k) + lane;
  float sum = 0;
#pragma unroll 4
  for (int k = 0; k < g.k / 2; k += 32) {
    const float2 x = __bfloat1622float2(a[k]);
    const float2 y = __bfloat1622float2(b[k]);
    sum += x.x * y.x;
    sum += x.y * y.y;
  }
  sum = warpwright::warp_reduce(sum, warpwright::Sum());
  if (lane == 0) g.d[int64_t{row} * g.n + col] = __float2bfloat16_rn(sum);
}

}  // namespace

const Rung kRung = {1, kBlkN, kBlkK, 0, kThreads, 0};

void launch_rung(const Gemm& g) {
  warpwright::launch(coalesced_kernel, one_block_a_tile(g), dim3(kThreads), 0, g.stream, g);
}

}  // namespace ladder
