// Left fold: the block starts from the nearest prefix that it finds and adds the totals after it
// from left to right.
// Why: P(t) = P(t-1) + S(t) is then computed in the same order wherever the walk starts. The same
// bits at every run, for the same bytes.
// Bound: memory. All threads read a predecessor each; one thread adds, some four cycles per tile.
#include "published.cuh"

namespace ladder {
namespace {

struct FoldShared {
  float totals[kTileThreads];  // of the last kTileThreads tiles, the nearest one last
  int nearest;                 // the last of them that knows its prefix; -1: none
  float prefix;                // of that tile
};

// The sum of all elements before `tile`, in thread 0. All threads of the block call.
__device__ float left_fold(const Published& published, int64_t tile, FoldShared& shared) {
  const int t = threadIdx.x;
  const int64_t index = tile - kTileThreads + t;
  for (;;) {
    if (t == 0) shared.nearest = -1;
    __syncthreads();
    float prefix = 0, total = 0;
    const bool has_prefix = index < 0 || read(published.prefixes + index, prefix);
    const bool is_there = has_prefix || read(published.totals + index, total);
    shared.totals[t] = total;
    if (has_prefix) atomicMax(&shared.nearest, t);
    __syncthreads();
    // Every tile after the nearest prefix has to be there.
    const bool fits = is_there || t <= shared.nearest;
    if (has_prefix && t == shared.nearest) shared.prefix = index < 0 ? 0.f : prefix;
    if (__syncthreads_and(fits && shared.nearest >= 0)) break;
  }
  float sum = shared.prefix;
  if (t == 0) {
    for (int i = shared.nearest + 1; i < kTileThreads; ++i) sum += shared.totals[i];
  }
  return sum;
}

__global__ void __launch_bounds__(kTileThreads, 2)
    left_fold_kernel(const float* x, float* y, Published published) {
  __shared__ TileShared shared;
  __shared__ FoldShared fold;
  __shared__ int ticket;
  __shared__ float into_tile;
  const int64_t index = take_tile(published, ticket);
  RegisterTile tile;
  tile.load(x + index * kTile, shared);
  tile.scan(shared);
  if (threadIdx.x == 0) publish(published.totals + index, tile.total);
  const float before = left_fold(published, index, fold);
  if (threadIdx.x == 0) {
    publish(published.prefixes + index, before + tile.total);
    into_tile = before;
  }
  __syncthreads();
  tile.store(y + index * kTile, into_tile, shared);
}

}  // namespace

const Rung kRung = {kTile, kTileThreads, int{sizeof(TileShared) + sizeof(FoldShared)} + 8};

void launch_rung(const Problem& p) {
  warpwright::launch(left_fold_kernel, dim3(static_cast<unsigned>(p.numel / kTile)),
                     dim3(kTileThreads), 0, p.stream, p.x, p.y, published_of(p));
}

}  // namespace ladder
