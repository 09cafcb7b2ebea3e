// TMA and wgmma: one thread orders whole tiles, two warpgroups multiply them from shared memory.
// Why: wgmma finds 64 x 16 and 128 x 16 operands by a descriptor, without ldmatrix and fragments,
// and is the only way to the tensor cores' full rate. TMA works out its addresses itself.
// Bound: the hand-over. The math drains at every k tile, and a barrier of the block comes after it.
#include "device/mma_sm80.cuh"
#include "device/sm90/mbarrier.cuh"
#include "device/sm90/tma.cuh"
#include "device/sm90/wgmma.cuh"
#include "host/tensor_map.h"
#include "ladder.cuh"

namespace ladder {
namespace {

using namespace warpwright;  // mbarrier_*, tma_*, wgmma_*

constexpr int kBlk = 128;  // of m and n
constexpr int kBlkK = 64;  // 128 bytes: a row of the swizzle pattern
constexpr int kStages = 3;
constexpr int kThreads = 256;  // two warpgroups, 64 rows of D each
constexpr int kOperandBytes = kBlk * 128;
constexpr int kStageBytes = 2 * kOperandBytes;
constexpr int kSmemBytes = 1024 + kStages * (kStageBytes + 8);  // 1024: see `ring`

// A (m, k), B (n, k), D (m, n), row-major; map_a, map_b: boxes of 64 (k) x 128 rows.
// Block: a 128 x 128 tile of D. Two blocks share an SM: one multiplies while the other waits.
__global__ void __launch_bounds__(kThreads, 2)
    tma_wgmma_kernel(const __grid_constant__ CUtensorMap map_a,
                     const __grid_constant__ CUtensorMap map_b, Gemm g) {
  extern __shared__ char smem[];
  // The swizzle repeats every 1024 bytes, so that is where the ring starts. Behind it the
  // mbarriers: full(t) says that the bytes of k tile t have landed in its stage.
  const uint32_t ring = (smem_address(smem) + 1023) & ~1023u;
  auto stage = [&](int t) { return ring + t % kStages * kStageBytes; };
  auto full = [&](int t) { return ring + kStages * kStageBytes + t % kStages * 8; };
  const int tiles_n = g.n / kBlk;
  const int first_row = blockIdx.x / tiles_n * kBlk;
  const int first_col = blockIdx.x % tiles_n * kBlk;
  const int k_tiles = g.k / kBlkK;
  auto load = [&](int t) {
    mbarrier_arrive_expect_tx(full(t), kStageBytes);
    tma_load_2d(stage(t), &map_a, t * kBlkK, first_row, full(t));
    tma_load_2d(stage(t) + kOperandBytes, &map_b, t * kBlkK, first_col, full(t));
  };

  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) mbarrier_init(full(s), 1);
    fence_mbarrier_init();
    fence_proxy_async();
    for (int t = 0; t < min(kStages, k_tiles); ++t) load(t);
  }
  __syncthreads();

  const int warpgroup = threadIdx.x / 128;
  constexpr uint64_t kFields = wgmma_descriptor_fields(/*leading=*/0, /*stride=*/1024);
  float sum[64];  // 64 x 128 of D, over the warpgroup's 128 threads
  for (int t = 0; t < k_tiles; ++t) {
    const uint64_t a = wgmma_descriptor(kFields, stage(t) + warpgroup * 64 * 128);
    const uint64_t b = wgmma_descriptor(kFields, stage(t) + kOperandBytes);
    mbarrier_wait(full(t), t / kStages % 2);
    wgmma_pin(sum);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {  // 16 elements, 32 bytes, 2 in the descriptor's unit
      wgmma<bf16, 0, 0>(sum, a + k * 2, b + k * 2, t > 0 || k > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(sum);
    __syncthreads();  // both warpgroups have read the stage
    if (threadIdx.x == 0 && t + kStages < k_tiles) load(t + kStages);
  }
  const int row = first_row + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  const int col = first_col + threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < 16; ++i) store_fragment(g, &sum[i * 4], row, col + i * 8);
}

}  // namespace

const Rung kRung = {kBlk, kBlk, kBlkK, kStages, kThreads, kSmemBytes};

void launch_rung(const Gemm& g) {
  const CUtensorMap a = make_tensor_map({DType::kBFloat16, false, g.a, g.k, g.m, g.k, kBlkK, kBlk});
  const CUtensorMap b = make_tensor_map({DType::kBFloat16, false, g.b, g.k, g.n, g.k, kBlkK, kBlk});
  launch(tma_wgmma_kernel, one_block_a_tile(g), dim3(kThreads), kSmemBytes, g.stream, a, b, g);
}

}  // namespace ladder
