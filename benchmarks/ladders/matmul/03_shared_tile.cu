// Shared tile: a block copies 32 rows of A and of B to shared memory, for 32 x 32 elements of D.
// Why: each loaded element now serves 32 threads; L2 is asked for an 18th of the bytes.
// Bound: shared memory. Two 4-byte reads for two multiplications, at 128 bytes a cycle and SM.
#include "ladder.cuh"

namespace ladder {
namespace {

constexpr int kBlk = 32;  // of m, n and k
constexpr int kThreads = kBlk * kBlk;
// Rows of 17 words: 17 is odd, so that 32 lanes reading down a column meet 32 different banks.
constexpr int kPitch = kBlk + 2;
using Operand = bf16[kBlk][kPitch];

// A (m, k), B (n, k), D (m, n), row-major.
// Block: a 32 x 32 tile of D, one thread an element; a warp is a row of it.
__global__ void __launch_bounds__(kThreads, 2) shared_tile_kernel(Gemm g) {
  __shared__ __align__(4) Operand sA;
  __shared__ __align__(4) Operand sB;
  const int tiles_n = g.n / kBlk;
  const int first_row = blockIdx.x / tiles_n * kBlk;
  const int first_col = blockIdx.x % tiles_n * kBlk;
  const int x = threadIdx.x % kBlk;
  const int y = threadIdx.x / kBlk;
  const bf16* a = g.a + int64_t{first_row + y} * g.k + x;
  const bf16* b = g.b + int64_t{first_col + y} * g.k + x;

  float sum = 0;
  for (int first_k = 0; first_k < g.k; first_k += kBlk) {
    sA[y][x] = a[first_k];
    sB[y][x] = b[first_k];
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kBlk; k += 2) {
      const float2 u = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&sA[y][k]));
      const float2 v = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&sB[x][k]));
      sum += u.x * v.x;
      sum += u.y * v.y;
    }
    __syncthreads();  // nobody reads the tile any more
  }
  g.d[int64_t{first_row + y} * g.n + first_col + x] = __float2bfloat16_rn(sum);
}

}  // namespace

const Rung kRung = {kBlk, kBlk, kBlk, 1, kThreads, 2 * int{sizeof(Operand)}};

void launch_rung(const Gemm& g) {
  warpwright::launch(shared_tile_kernel, one_block_a_tile(g), dim3(kThreads), 0, g.stream, g);
}

}  // namespace ladder
