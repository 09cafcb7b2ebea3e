// Three kernels: each block scans a tile of 1024 elements; one block scans the tiles' sums; all
// blocks add to each tile the sum before it.
// Why: a tile's scan stays in registers and shared memory. The number of passes no longer grows
// with N.
// Bound: memory. x is read, y written, and y read and written once more: 4 times N elements.
#include "sums.cuh"

namespace ladder {
namespace {

constexpr int kThreads = 1024;
constexpr int kTile = kThreads;
constexpr int kSmem = kThreads / warpwright::kWarpSize * int{sizeof(float)};

// Grid: a block per tile. sums: (tiles).
__global__ void __launch_bounds__(kThreads) tiles_kernel(const float* x, float* y, float* sums) {
  __shared__ float shared[kThreads / warpwright::kWarpSize];
  const int64_t i = int64_t{blockIdx.x} * kTile + threadIdx.x;
  const float own = x[i];
  float total;
  y[i] = scan_block<kThreads>(own, shared, total) + own;
  if (threadIdx.x == 0) sums[blockIdx.x] = total;
}

__global__ void __launch_bounds__(kThreads) add_kernel(float* y, const float* sums) {
  y[int64_t{blockIdx.x} * kTile + threadIdx.x] += sums[blockIdx.x];
}

}  // namespace

const Rung kRung = {kTile, kThreads, kSmem};

void launch_rung(const Problem& p) {
  const int64_t tiles = p.numel / kTile;
  const dim3 grid(static_cast<unsigned>(tiles)), block(kThreads);
  warpwright::launch(tiles_kernel, grid, block, 0, p.stream, p.x, p.y, p.floats());
  scan_sums(p.floats(), tiles, p.stream);
  warpwright::launch(add_kernel, grid, block, 0, p.stream, p.y, p.floats());
}

}  // namespace ladder
