// Warp-specialised, persistent: one thread only loads, two warpgroups only multiply, and a block
// stays on its SM and walks from tile to tile.
// Why: "full" and "empty" mbarriers replace the block's barrier. Loads run up to four stages ahead,
// across tiles, and a product is always in flight. 128 x 256 tiles ask L2 for 3/4 of the bytes.
// Bound: the tensor cores; but at the end of each tile they wait for the stores.
#include "device/mma_sm80.cuh"
#include "device/sm90/cluster.cuh"
#include "device/sm90/mbarrier.cuh"
#include "device/sm90/tma.cuh"
#include "device/sm90/wgmma.cuh"
#include "host/tensor_map.h"
#include "ladder.cuh"

namespace ladder {
namespace {

using namespace warpwright;  // mbarrier_*, tma_*, wgmma_*

constexpr int kBlkM = 128;
constexpr int kBlkN = 256;
constexpr int kBlkK = 64;
constexpr int kStages = 4;
constexpr int kThreads = 384;  // a producer warpgroup, two consumers
constexpr int kBytesA = kBlkM * 128;
constexpr int kStageBytes = kBytesA + kBlkN * 128;
constexpr int kSmemBytes = 1024 + kStages * (kStageBytes + 16);

// A (m, k), B (n, k), D (m, n), row-major; map_a, map_b: boxes of 64 (k) x 128 or 256 rows.
// Grid: a block an SM, each takes every gridDim-th tile of D. Producer and consumers count the k
// tiles of all their tiles in `i`: stage i % kStages, for the (i / kStages)-th time.
__global__ void __launch_bounds__(kThreads, 1)
    warp_specialised_kernel(const __grid_constant__ CUtensorMap map_a,
                            const __grid_constant__ CUtensorMap map_b, Gemm g) {
  extern __shared__ char smem[];
  const uint32_t ring = (smem_address(smem) + 1023) & ~1023u;
  auto stage = [&](int i) { return ring + i % kStages * kStageBytes; };
  // full(i): the stage's bytes have landed. empty(i): all 8 warps of the consumers have read them.
  auto full = [&](int i) { return ring + kStages * kStageBytes + i % kStages * 16; };
  auto empty = [&](int i) { return full(i) + 8; };
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      mbarrier_init(full(s), 1);
      mbarrier_init(empty(s), 8);
    }
    fence_mbarrier_init();
    fence_proxy_async();
  }
  __syncthreads();

  const int tiles_n = g.n / kBlkN;
  const int tiles = g.m / kBlkM * tiles_n;
  const int k_tiles = g.k / kBlkK;
  // By a shuffle, so that the compiler sees that a warp agrees on it.
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  int i = 0;
  if (warpgroup == 0) {
    setmaxnreg_dec<40>();  // its registers go to the consumers: 128 x 40 + 256 x 232 <= 65536
    if (threadIdx.x != 0) return;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      for (int k = 0; k < k_tiles; ++k, ++i) {
        mbarrier_wait(empty(i), i / kStages % 2 ^ 1);  // on a fresh barrier parity 1 has passed
        mbarrier_arrive_expect_tx(full(i), kStageBytes);
        tma_load_2d(stage(i), &map_a, k * kBlkK, tile / tiles_n * kBlkM, full(i));
        tma_load_2d(stage(i) + kBytesA, &map_b, k * kBlkK, tile % tiles_n * kBlkN, full(i));
      }
    }
    return;
  }

  setmaxnreg_inc<232>();
  const int thread = threadIdx.x % 128;
  const int first_row = (warpgroup - 1) * 64;  // of the tile's rows
  constexpr uint64_t kFields = wgmma_descriptor_fields(/*leading=*/0, /*stride=*/1024);
  float sum[128];  // 64 x 256 of D, over the warpgroup's threads
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    for (int k = 0; k < k_tiles; ++k, ++i) {
      const uint64_t a = wgmma_descriptor(kFields, stage(i) + first_row * 128);
      const uint64_t b = wgmma_descriptor(kFields, stage(i) + kBytesA);
      mbarrier_wait(full(i), i / kStages % 2);
      wgmma_pin(sum);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        wgmma<bf16, 0, 0>(sum, a + step * 2, b + step * 2, k > 0 || step > 0);
      }
      wgmma_commit();
      wgmma_wait<1>();  // this k tile's products run on; those before have read their stage
      wgmma_pin(sum);
      if (k > 0 && thread % 32 == 0) mbarrier_arrive(empty(i - 1));
    }
    wgmma_wait<0>();
    wgmma_pin(sum);
    if (thread % 32 == 0) mbarrier_arrive(empty(i - 1));
    const int row = tile / tiles_n * kBlkM + first_row + thread / 32 * 16 + thread % 32 / 4;
    const int col = tile % tiles_n * kBlkN + thread % 4 * 2;
#pragma unroll
    for (int j = 0; j < 32; ++j) store_fragment(g, &sum[j * 4], row, col + j * 8);
  }
}

}  // namespace

const Rung kRung = {kBlkM, kBlkN, kBlkK, kStages, kThreads, kSmemBytes};

void launch_rung(const Gemm& g) {
  const CUtensorMap a =
      make_tensor_map({DType::kBFloat16, false, g.a, g.k, g.m, g.k, kBlkK, kBlkM});
  const CUtensorMap b =
      make_tensor_map({DType::kBFloat16, false, g.b, g.k, g.n, g.k, kBlkK, kBlkN});
  const unsigned tiles = one_block_a_tile(g).x;
  const unsigned blocks = std::min(tiles, static_cast<unsigned>(current_device_info().num_sms));
  launch(warp_specialised_kernel, dim3(blocks), dim3(kThreads), kSmemBytes, g.stream, a, b, g);
}

}  // namespace ladder
