// Registers: a thread holds 16 neighbouring elements and adds them alone. Shuffles see one number
// per thread.
// Why: rung 4 spends five shuffles on each element; here 16 elements share them. Tiles are eight
// times as large, so the middle kernel has an eighth of the work.
// Bound: memory: still two reads and one write.
#include "register_tile.cuh"
#include "sums.cuh"

namespace ladder {
namespace {

// Grid: a block per tile. sums: (tiles).
__global__ void __launch_bounds__(kTileThreads) reduce_kernel(const float* x, float* sums) {
  __shared__ float shared[kTileWarps];
  const float* tile = x + int64_t{blockIdx.x} * kTile;
  float own = 0;
#pragma unroll
  for (int r = 0; r < kItems / kVec; ++r) {
    const auto loaded = warpwright::load_vec<kVec>(tile + (r * kTileThreads + threadIdx.x) * kVec);
    own += (loaded[0] + loaded[1]) + (loaded[2] + loaded[3]);
  }
  const float total = warpwright::block_reduce(own, warpwright::Sum{}, 0.f, shared);
  if (threadIdx.x == 0) sums[blockIdx.x] = total;
}

__global__ void __launch_bounds__(kTileThreads, 2)
    scan_kernel(const float* x, float* y, const float* before) {
  __shared__ TileShared shared;
  RegisterTile tile;
  tile.load(x + int64_t{blockIdx.x} * kTile, shared);
  tile.scan(shared);
  tile.store(y + int64_t{blockIdx.x} * kTile, before[blockIdx.x], shared);
}

}  // namespace

const Rung kRung = {kTile, kTileThreads, int{sizeof(TileShared)}};

void launch_rung(const Problem& p) {
  const int64_t tiles = p.numel / kTile;
  const dim3 grid(static_cast<unsigned>(tiles)), block(kTileThreads);
  warpwright::launch(reduce_kernel, grid, block, 0, p.stream, p.x, p.floats());
  scan_sums(p.floats(), tiles, p.stream);
  warpwright::launch(scan_kernel, grid, block, 0, p.stream, p.x, p.y, p.floats());
}

}  // namespace ladder
