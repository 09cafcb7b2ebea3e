// Implicit matrix product: the copies to shared memory read the windows from x itself.
// Why: the matrix of windows is never written. Its rows overlap, so L2 answers eight of the
// nine reads of an element. A tap moves every address by the same distance.
// Bound: the instructions that find addresses and copy; and mma.sync, as in rung 3.
#include "tensor_tile.cuh"

namespace ladder {
namespace {

// Block: 128 pixels. A thread copies a piece of 8 of them.
__global__ void __launch_bounds__(kTileThreads, 2) implicit_gemm_kernel(Conv c) {
  extern __shared__ __align__(16) char smem[];
  Place places[kTilePixels / 16];
#pragma unroll
  for (int i = 0; i < kTilePixels / 16; ++i) {
    places[i] = place_of(c, blockIdx.x * kTilePixels + threadIdx.x / 8 + i * 16);
  }
  multiply_tile(c, smem, [&](uint32_t shared, int i, int piece, int tap) {
    const bf16* x = under_tap(c, places[i], tap);
    // 0 bytes: the padding is filled with zeros, and the address is not read.
    warpwright::cp_async<16>(shared, x ? x + piece * 8 : c.x, x ? 16 : 0);
  });
}

}  // namespace

const Rung kRung = {kTilePixels, kTileStages, kTileThreads, kTileSmemBytes};

void launch_rung(const Conv& c) {
  warpwright::launch(implicit_gemm_kernel, dim3(static_cast<unsigned>(c.pixels() / kTilePixels)),
                     dim3(kTileThreads), kTileSmemBytes, c.stream, c);
  add_bias(c);
}

}  // namespace ladder
