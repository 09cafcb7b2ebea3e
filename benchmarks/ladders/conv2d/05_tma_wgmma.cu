// TMA im2col and wgmma: one thread orders the windows of 128 pixels, two warpgroups multiply them.
// Why: TMA's im2col mode walks the pixels of an image, adds a tap's offset and fills the padding
// with zeros. No thread computes an address. wgmma reads both operands from shared memory.
// Bound: L2 and shared memory, which every element of x passes nine times; and the hand-over, since
// the math drains at every tap.
#include "device/sm90/wgmma.cuh"
#include "wgmma_tile.cuh"

namespace ladder {
namespace {

// Block: 128 pixels by all filters. Two blocks share an SM: one multiplies while the other waits.
__global__ void __launch_bounds__(kTileThreads, 2)
    tma_wgmma_kernel(const __grid_constant__ CUtensorMap windows,
                     const __grid_constant__ CUtensorMap filters, Conv c) {
  extern __shared__ char smem[];
  float sum[32];
  multiply_tile(windows, filters, c, smem, sum);
  const int pixel = blockIdx.x * kTilePixels + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
  for (int i = 0; i < 8; ++i) store_fragment(c, &sum[i * 4], pixel, i * 8 + threadIdx.x % 4 * 2);
}

}  // namespace

const Rung kRung = {kTilePixels, kTileStages, kTileThreads, kTileSmemBytes};

void launch_rung(const Conv& c) {
  warpwright::launch(tma_wgmma_kernel, dim3(static_cast<unsigned>(c.pixels() / kTilePixels)),
                     dim3(kTileThreads), kTileSmemBytes, c.stream, windows_map(c), filters_map(c),
                     c);
  add_bias(c);
}

}  // namespace ladder
