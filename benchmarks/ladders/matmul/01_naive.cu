// Naive: a thread computes one element of D, straight from the definition.
// Why: the place to start from. Each operand of each multiplication comes by a load of its own.
// Bound: L1. The lanes of a warp are 32 rows of A, so a load asks 32 lines for 2 bytes each.
#include "ladder.cuh"

namespace ladder {
namespace {

constexpr int kBlkM = 32;
constexpr int kBlkN = 8;
constexpr int kThreads = kBlkM * kBlkN;

// A (m, k), B (n, k), D (m, n), row-major.
// Block: a 32 x 8 tile of D; a warp is one column of it, its lanes are the rows.
__global__ void __launch_bounds__(kThreads) naive_kernel(Gemm g) {
  const int tiles_n = g.n / kBlkN;
  const int row = blockIdx.x / tiles_n * kBlkM + threadIdx.x % kBlkM;
  const int col = blockIdx.x % tiles_n * kBlkN + threadIdx.x / kBlkM;
  const bf16* a = g.a + int64_t{row} * g.k;
  const bf16* b = g.b + int64_t{col} * g.k;
  float sum = 0;
  for (int k = 0; k < g.k; ++k) sum += __bfloat162float(a[k]) * __bfloat162float(b[k]);
  g.d[int64_t{row} * g.n + col] = __float2bfloat16_rn(sum);
}

}  // namespace

const Rung kRung = {kBlkM, kBlkN, 1, 0, kThreads, 0};

void launch_rung(const Gemm& g) {
  warpwright::launch(naive_kernel, one_block_a_tile(g), dim3(kThreads), 0, g.stream, g);
}

}  // namespace ladder
