// Halo tile: an image's rows come to shared memory once, and a tap is a shift of the operand.
// Why: an operand's descriptor may start at any row of 128 bytes, and a row is a pixel. The nine
// taps of 256 pixels read one stage, in place of nine. The filters stay in shared memory. They are
// wgmma's 64 rows and the pixels its 256 columns, so a product reads 10 KB for 128 cycles of math.
// Bound: the tensor cores. Some columns are the padding between two rows and are not stored.
#include "device/mma_sm80.cuh"
#include "device/sm90/cluster.cuh"
#include "device/sm90/mbarrier.cuh"
#include "device/sm90/tma.cuh"
#include "device/sm90/wgmma.cuh"
#include "halo.cuh"

namespace ladder {
namespace {

using namespace warpwright;  // mbarrier_*, tma_*, wgmma_*

// y^T of a tile, from its stage: `first` is the place of the first window's first pixel there.
__device__ __forceinline__ void multiply(float (&sum)[128], uint32_t filters, uint32_t stage,
                                         int first, int pitch) {
  constexpr uint64_t kFields = wgmma_descriptor_fields(/*leading=*/0, /*stride=*/1024);
  wgmma_pin(sum);
  wgmma_fence();
#pragma unroll
  for (int tap = 0; tap < kTaps; ++tap) {
    const uint32_t pixels = stage + (first + tap / 3 * pitch + tap % 3) * 128;
    const uint64_t a = wgmma_descriptor(kFields, filters + tap * kChannels * 128);
    const uint64_t b = wgmma_descriptor(kFields, pixels);
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma<bf16, 0, 0>(sum, a + k * 2, b + k * 2, tap > 0 || k > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_pin(sum);
}

// rows: boxes of one row of x with its padding; filters: of one tap.
// Grid: a block an SM takes every gridDim-th pair of tiles, one per consumer. While one of them
// stores, the other multiplies.
__global__ void __launch_bounds__(kThreads, 1)
    halo_tile_kernel(const __grid_constant__ CUtensorMap rows,
                     const __grid_constant__ CUtensorMap filters, Conv c) {
  extern __shared__ char smem[];
  const HaloMemory memory((smem_address(smem) + 1023) & ~1023u, c.side);
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(memory.full(i), 1);
      mbarrier_init(memory.empty(i), 4);
    }
    mbarrier_init(memory.filters_full(), 1);
    fence_mbarrier_init();
    fence_proxy_async();
  }
  __syncthreads();

  const int tiles = HaloTile::count(c);
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup == 2) {
    setmaxnreg_dec<40>();
    if (threadIdx.x % 128 != 0) return;
    mbarrier_arrive_expect_tx(memory.filters_full(), kFilterBytes);
    for (int tap = 0; tap < kTaps; ++tap) {
      tma_load_4d(memory.filters() + tap * kChannels * 128, &filters, 0, 0, tap, 0,
                  memory.filters_full());
    }
    int turn = 0;  // of both stages
    for (int pair = blockIdx.x; pair * 2 < tiles; pair += gridDim.x, ++turn) {
      for (int i = 0; i < 2 && pair * 2 + i < tiles; ++i) {
        const HaloTile tile(c, pair * 2 + i);
        mbarrier_wait(memory.empty(i), turn % 2 ^ 1);
        const int row_bytes = (c.side + 2) * 128;
        mbarrier_arrive_expect_tx(memory.full(i), tile.rows * row_bytes);
        for (int row = 0; row < tile.rows; ++row) {
          tma_load_4d(memory.stage(i) + row * row_bytes, &rows, 0, -1, tile.first_row - 1 + row,
                      tile.image, memory.full(i));
        }
      }
    }
    return;
  }
  setmaxnreg_inc<232>();
  mbarrier_wait(memory.filters_full(), 0);
  float sum[128];  // 64 filters by 256 pixels, over the warpgroup's threads
  int turn = 0;
  for (int t = blockIdx.x * 2 + warpgroup; t < tiles; t += gridDim.x * 2, ++turn) {
    const HaloTile tile(c, t);
    mbarrier_wait(memory.full(warpgroup), turn % 2);
    multiply(sum, memory.filters(), memory.stage(warpgroup), tile.in_stage, c.side + 2);
    if (threadIdx.x % 32 == 0) mbarrier_arrive(memory.empty(warpgroup));
    store_tile(c, sum, memory.buffer(warpgroup), tile, 1 + warpgroup);
  }
}

}  // namespace

const Rung kRung = {kTile, 2, kThreads, kMaxSmemBytes};

void launch_rung(const Conv& c) {
  const int pairs = ceil_div(HaloTile::count(c), 2);
  const auto blocks = static_cast<unsigned>(std::min(pairs, current_device_info().num_sms));
  launch(halo_tile_kernel, dim3(blocks), dim3(kThreads), HaloMemory(0, c.side).bytes(), c.stream,
         rows_map(c), filters_map(c), c);
}

}  // namespace ladder
