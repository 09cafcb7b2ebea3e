// Pipelined: cp.async copies the next keys and values while these are used, past the registers.
// Eight warps with 128 queries share each tile.
// Why: the loads' latency hides behind two products and a softmax, and L2 is asked for half of the
// bytes.
// Bound: shared memory and mma.sync. Each warp reads all keys and values for its 16 queries.
#include "fragments.cuh"

namespace ladder {
namespace {

using warpwright::cp_async;
using warpwright::cp_async_commit;
using warpwright::cp_async_wait;

constexpr int kThreads = 256;
constexpr int kRows = kThreads / 32 * 16;    // queries of a block
constexpr int kStageBytes = 2 * kTileBytes;  // keys and values
constexpr int kStages = 2;
constexpr int kSmemBytes = kStages * kStageBytes;

template <int kTileRows>
__device__ __forceinline__ void copy_rows(const bf16* rows, uint32_t tile) {
#pragma unroll
  for (int i = 0; i < kTileRows * 16 / kThreads; ++i) {
    const int row = (threadIdx.x + i * kThreads) / 16, piece = threadIdx.x % 16;
    cp_async<16>(tile + row * kPitch + piece * 16, rows + row * kHead + piece * 8);
  }
}

// Grid: a block per 128 queries of a head.
__global__ void __launch_bounds__(kThreads, 1) pipelined_kernel(Problem p) {
  extern __shared__ __align__(16) char smem[];
  const uint32_t ring = warpwright::smem_address(smem);
  const int warp = threadIdx.x / 32;
  const int64_t first = int64_t{blockIdx.x} * kRows * kHead;
  const int64_t head = int64_t{blockIdx.x} * kRows / p.tokens * p.tokens * kHead;
  const int tiles = p.tokens / kKeys;
  auto copy = [&](int t) {
    if (t < tiles) {
      const uint32_t stage = ring + t % kStages * kStageBytes;
      copy_rows<kKeys>(p.k + head + int64_t{t} * kKeys * kHead, stage);
      copy_rows<kKeys>(p.v + head + int64_t{t} * kKeys * kHead, stage + kTileBytes);
    }
    cp_async_commit();  // an empty group keeps the count of groups that of the tiles
  };
  WarpAttention own;
  copy_rows<kRows>(p.q + first, ring + kStageBytes);  // the second stage is free at first
  cp_async_commit();
  copy(0);
  cp_async_wait<1>();
  __syncthreads();
  own.load_queries(ring + kStageBytes + warp * 16 * kPitch);
  for (int t = 0; t < tiles; ++t) {
    cp_async_wait<0>();  // this thread's part of tile t is there
    __syncthreads();     // everybody's is, and everybody left the stage ...
    copy(t + 1);         // ... that takes the next one
    const uint32_t stage = ring + t % kStages * kStageBytes;
    own.attend(stage, stage + kTileBytes);
  }
  own.store(p.out + first + warp * 16 * kHead);
}

}  // namespace

const Rung kRung = {kRows, kThreads, kSmemBytes};

void launch_rung(const Problem& p) {
  warpwright::launch(pipelined_kernel, dim3(static_cast<unsigned>(p.rows() / kRows)),
                     dim3(kThreads), kSmemBytes, p.stream, p);
}

}  // namespace ladder
