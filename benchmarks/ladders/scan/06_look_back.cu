// Look-back: one kernel. A block publishes its tile's total, then adds the totals of the tiles
// before it, from right to left, until it meets a tile that knows its prefix (Merrill and Garland
// 2016).
// Why: x is read once. A block waits for its neighbours, not for a kernel's end.
// Bound: memory: one read and one write, the least there is. Where a block meets a prefix depends
// on timing, and so do the last bits.
#include "published.cuh"

namespace ladder {
namespace {

// The sum of all elements before `tile`, in every lane of the warp that calls.
__device__ float look_back(const Published& published, int64_t tile) {
  const int lane = threadIdx.x % warpwright::kWarpSize;
  float sum = 0;
  for (int64_t window = tile;; window -= warpwright::kWarpSize) {
    const int64_t index = window - 1 - lane;  // lane 0 has the nearest tile
    float value = 0;
    unsigned prefixes;
    bool has_prefix, is_there;
    do {
      has_prefix = index < 0 || read(published.prefixes + index, value);
      is_there = has_prefix || read(published.totals + index, value);
      prefixes = __ballot_sync(warpwright::kFullMask, has_prefix);
    } while (!__all_sync(warpwright::kFullMask, is_there));
    if (index < 0) value = 0;
    const int nearest = prefixes == 0 ? warpwright::kWarpSize - 1 : __ffs(prefixes) - 1;
    sum += warpwright::warp_reduce(lane <= nearest ? value : 0.f, warpwright::Sum{});
    if (prefixes != 0) return sum;
  }
}

__global__ void __launch_bounds__(kTileThreads, 2)
    look_back_kernel(const float* x, float* y, Published published) {
  __shared__ TileShared shared;
  __shared__ int ticket;
  __shared__ float into_tile;
  const int64_t index = take_tile(published, ticket);
  RegisterTile tile;
  tile.load(x + index * kTile, shared);
  tile.scan(shared);
  if (threadIdx.x < warpwright::kWarpSize) {
    if (threadIdx.x == 0) publish(published.totals + index, tile.total);
    const float before = look_back(published, index);
    if (threadIdx.x == 0) {
      publish(published.prefixes + index, before + tile.total);
      into_tile = before;
    }
  }
  __syncthreads();
  tile.store(y + index * kTile, into_tile, shared);
}

}  // namespace

const Rung kRung = {kTile, kTileThreads, int{sizeof(TileShared)} + 8};

void launch_rung(const Problem& p) {
  warpwright::launch(look_back_kernel, dim3(static_cast<unsigned>(p.numel / kTile)),
                     dim3(kTileThreads), 0, p.stream, p.x, p.y, published_of(p));
}

}  // namespace ladder
