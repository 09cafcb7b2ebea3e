// Register tile: a thread makes 8 x 8 elements of D, a block 128 x 128.
// Why: 16 values read from shared memory feed 64 multiplications in place of 8, and L2 is asked for
// a quarter of the bytes. The copy turns the tile, k by k, and makes floats of its elements once.
// Bound: the FMA units and shared memory, both just full; but nothing hides the copies.
#include "thread_tile.cuh"

namespace ladder {
namespace {

constexpr int kBlk = 128;  // of m and n
constexpr int kBlkK = 16;
constexpr int kPitch = kBlk + 4;  // floats; a multiple of 16 bytes
using Operand = float[kBlkK][kPitch];

// rows: (128, kBlkK) elements of an operand, `pitch` apart. 16 neighbouring lanes read one row.
__device__ __forceinline__ void copy_tile(Operand& shared, const bf16* rows, int pitch) {
#pragma unroll
  for (int i = threadIdx.x; i < kBlk * kBlkK; i += kTileThreads) {
    const int row = i / kBlkK;
    const int k = i % kBlkK;
    shared[k][row] = __bfloat162float(rows[int64_t{row} * pitch + k]);
  }
}

// A (m, k), B (n, k), D (m, n), row-major.
// Block: a 128 x 128 tile of D; 16 x 16 threads, whose elements ThreadTile names.
__global__ void __launch_bounds__(kTileThreads, 2) register_tile_kernel(Gemm g) {
  __shared__ __align__(16) Operand sA;
  __shared__ __align__(16) Operand sB;
  const int tiles_n = g.n / kBlk;
  const int first_row = blockIdx.x / tiles_n * kBlk;
  const int first_col = blockIdx.x % tiles_n * kBlk;
  const bf16* a = g.a + int64_t{first_row} * g.k;
  const bf16* b = g.b + int64_t{first_col} * g.k;

  ThreadTile tile;
  for (int first_k = 0; first_k < g.k; first_k += kBlkK) {
    copy_tile(sA, a + first_k, g.k);
    copy_tile(sB, b + first_k, g.k);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kBlkK; ++k) tile.multiply(sA[k], sB[k]);
    __syncthreads();  // nobody reads the tile any more
  }
  tile.store(g, first_row, first_col);
}

}  // namespace

const Rung kRung = {kBlk, kBlk, kBlkK, 1, kTileThreads, 2 * int{sizeof(Operand)}};

void launch_rung(const Gemm& g) {
  warpwright::launch(register_tile_kernel, one_block_a_tile(g), dim3(kTileThreads), 0, g.stream, g);
}

}  // namespace ladder
