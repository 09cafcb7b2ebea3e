// Reduce first: the first kernel only adds up each tile. The last one reads x again, scans, and
// starts each tile from the sum before it.
// Why: a kernel that only reads leaves nothing to correct. One write of N elements less.
// Bound: memory: two reads and one write.
#include "sums.cuh"

namespace ladder {
namespace {

constexpr int kThreads = 1024;
constexpr int kTile = kThreads;
constexpr int kWarps = kThreads / warpwright::kWarpSize;

// Grid: a block per tile. sums: (tiles).
__global__ void __launch_bounds__(kThreads) reduce_kernel(const float* x, float* sums) {
  __shared__ float shared[kWarps];
  const float own = x[int64_t{blockIdx.x} * kTile + threadIdx.x];
  const float total = warpwright::block_reduce(own, warpwright::Sum{}, 0.f, shared);
  if (threadIdx.x == 0) sums[blockIdx.x] = total;
}

// before: (tiles), the sum before each tile.
__global__ void __launch_bounds__(kThreads)
    scan_kernel(const float* x, float* y, const float* before) {
  __shared__ float shared[kWarps];
  const int64_t i = int64_t{blockIdx.x} * kTile + threadIdx.x;
  const float own = x[i];
  float total;
  const float in_tile = scan_block<kThreads>(own, shared, total) + own;
  y[i] = before[blockIdx.x] + in_tile;
}

}  // namespace

const Rung kRung = {kTile, kThreads, kWarps* int{sizeof(float)}};

void launch_rung(const Problem& p) {
  const int64_t tiles = p.numel / kTile;
  const dim3 grid(static_cast<unsigned>(tiles)), block(kThreads);
  warpwright::launch(reduce_kernel, grid, block, 0, p.stream, p.x, p.floats());
  scan_sums(p.floats(), tiles, p.stream);
  warpwright::launch(scan_kernel, grid, block, 0, p.stream, p.x, p.y, p.floats());
}

}  // namespace ladder
