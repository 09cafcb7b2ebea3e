// Fused epilogue: the bias is added to the sums in registers, and TMA stores the tile.
// Why: the pass over y is gone, which read it and wrote it again. stmatrix writes the rounded tile
// to shared memory, from where whole rows of 128 bytes leave.
// Bound: L2 and shared memory, as in rung 5: 24 KB arrive per tap for 256 cycles of math.
#include "device/named_barrier.cuh"
#include "device/sm90/cluster.cuh"
#include "wgmma_tile.cuh"

namespace ladder {
namespace {

using namespace warpwright;  // stmatrix, tma_store_*

// Adds the bias, rounds and packs a thread's sums of 16 filters: d[4 i + {0, 1}] are neighbouring
// filters of pixel lane / 4, d[4 i + {2, 3}] those of the pixel 8 further.
__device__ __forceinline__ void pack(uint32_t (&words)[4], const float* d, const bf16* bias) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat162 b = *reinterpret_cast<const __nv_bfloat162*>(bias + i / 2 * 8);
    const __nv_bfloat162 pair =
        __floats2bfloat162_rn(d[i * 2] + __low2float(b), d[i * 2 + 1] + __high2float(b));
    words[i] = *reinterpret_cast<const uint32_t*>(&pair);
  }
}

// Block: 128 pixels by all filters. output: boxes of 64 pixels by all filters.
__global__ void __launch_bounds__(kTileThreads, 2)
    fused_epilogue_kernel(const __grid_constant__ CUtensorMap windows,
                          const __grid_constant__ CUtensorMap filters,
                          const __grid_constant__ CUtensorMap output, Conv c) {
  extern __shared__ char smem[];
  float sum[32];
  multiply_tile(windows, filters, c, smem, sum);

  // All have read the ring. A warpgroup's 64 rows of 128 bytes take its place, swizzled as TMA
  // expects: the 16-byte piece p of row r is at p ^ r % 8.
  const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32;
  const uint32_t buffer = ((smem_address(smem) + 1023) & ~1023u) + warpgroup * 64 * 128;
  const int row = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
  for (int j = 0; j < 4; ++j) {  // 16 filters: 8x8 matrices of rows 0-7, 8-15, twice
    uint32_t words[4];
    pack(words, &sum[j * 8], c.bias + j * 16 + lane % 4 * 2);
    stmatrix_x4(buffer + row * 128 + ((j * 2 + lane / 16) ^ row % 8) * 16, words);
  }
  fence_proxy_async();
  named_barrier_sync(1 + warpgroup, 128);
  if (threadIdx.x % 128 == 0) {
    tma_store_2d(&output, 0, blockIdx.x * kTilePixels + warpgroup * 64, buffer);
    tma_store_commit();
    tma_store_wait<0>();
  }
}

}  // namespace

const Rung kRung = {kTilePixels, kTileStages, kTileThreads, kTileSmemBytes};

void launch_rung(const Conv& c) {
  const CUtensorMap output = make_tensor_map(
      {DType::kBFloat16, false, c.y, kChannels, c.pixels(), kChannels, kChannels, 64});
  launch(fused_epilogue_kernel, dim3(static_cast<unsigned>(c.pixels() / kTilePixels)),
         dim3(kTileThreads), kTileSmemBytes, c.stream, windows_map(c), filters_map(c), output, c);
}

}  // namespace ladder
