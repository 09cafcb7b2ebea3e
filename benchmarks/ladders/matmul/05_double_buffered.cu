// Double-buffered: 16-byte loads fetch the next tile into registers while this one is multiplied.
// Why: a load takes some 600 cycles, which pass under the math now; one barrier a tile is enough,
// and one load brings eight elements.
// Bound: the FMA units: 128 a cycle and SM, a sixteenth of what the tensor cores do.
#include "thread_tile.cuh"

namespace ladder {
namespace {

constexpr int kBlk = 128;  // of m and n
constexpr int kBlkK = 16;
using Buffer = float[kBlkK][kBlk];

// A thread's eight elements of a (128, 16) tile: row threadIdx % 128, the first or second half of
// k. The 32 lanes of a warp are 32 rows, so that they write 32 different banks.
__device__ __forceinline__ void store_eight(Buffer& shared, const uint4& eight) {
  const int row = threadIdx.x % kBlk;
  const int k = threadIdx.x / kBlk * 8;
  const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(&eight);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = __bfloat1622float2(pairs[i]);
    shared[k + 2 * i][row] = pair.x;
    shared[k + 2 * i + 1][row] = pair.y;
  }
}

// A (m, k), B (n, k), D (m, n), row-major.
// Block: a 128 x 128 tile of D; 16 x 16 threads, whose elements ThreadTile names.
__global__ void __launch_bounds__(kTileThreads, 2) double_buffered_kernel(Gemm g) {
  __shared__ __align__(16) Buffer sA[2];
  __shared__ __align__(16) Buffer sB[2];
  const int tiles_n = g.n / kBlk;
  const int first_row = blockIdx.x / tiles_n * kBlk;
  const int first_col = blockIdx.x % tiles_n * kBlk;
  const int row = threadIdx.x % kBlk;
  const int k = threadIdx.x / kBlk * 8;
  const bf16* a = g.a + int64_t{first_row + row} * g.k + k;
  const bf16* b = g.b + int64_t{first_col + row} * g.k + k;
  auto load_eight = [](const bf16* p) { return *reinterpret_cast<const uint4*>(p); };

  store_eight(sA[0], load_eight(a));
  store_eight(sB[0], load_eight(b));
  __syncthreads();
  ThreadTile tile;
  const int k_tiles = g.k / kBlkK;
  for (int t = 0; t < k_tiles; ++t) {
    const bool more = t + 1 < k_tiles;
    uint4 next_a = {};
    uint4 next_b = {};
    if (more) {
      next_a = load_eight(a + (t + 1) * kBlkK);
      next_b = load_eight(b + (t + 1) * kBlkK);
    }
    const int now = t % 2;
#pragma unroll
    for (int i = 0; i < kBlkK; ++i) tile.multiply(sA[now][i], sB[now][i]);
    if (more) {  // into the buffer that everybody left at the last barrier
      store_eight(sA[1 - now], next_a);
      store_eight(sB[1 - now], next_b);
    }
    __syncthreads();
  }
  tile.store(g, first_row, first_col);
}

}  // namespace

const Rung kRung = {kBlk, kBlk, kBlkK, 2, kTileThreads, 2 * 2 * int{sizeof(Buffer)}};

void launch_rung(const Gemm& g) {
  warpwright::launch(double_buffered_kernel, one_block_a_tile(g), dim3(kTileThreads), 0, g.stream,
                     g);
}

}  // namespace ladder
