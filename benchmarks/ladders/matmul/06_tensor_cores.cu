// Tensor cores: a warp multiplies 64 x 64 elements of D by mma.sync, 16 x 8 x 16 at a time.
// Why: one instruction does 2048 multiplications. It takes bf16 as it lies in memory, so cp.async
// can fill a ring of three stages past the registers, two tiles ahead of the math.
// Bound: mma.sync, which takes its operands from registers and on Hopper reaches some 60 % of the
// tensor cores' rate; and the issue slots that ldmatrix and the copies take.
#include "device/mma_sm80.cuh"
#include "ladder.cuh"

namespace ladder {
namespace {

using namespace warpwright;  // cp_async, ldmatrix_x4, mma_m16n8k16

constexpr int kBlk = 128;  // of m and n
constexpr int kBlkK = 64;
constexpr int kStages = 3;
constexpr int kThreads = 128;  // 2 x 2 warps of 64 x 64
// A row is 128 bytes and 16 of padding: the 8 rows that ldmatrix reads at once then start 4 banks
// apart and meet in none.
constexpr int kPitch = kBlkK * 2 + 16;
constexpr int kOperandBytes = kBlk * kPitch;
constexpr int kStageBytes = 2 * kOperandBytes;
constexpr int kSmemBytes = kStages * kStageBytes;

// rows: (128, 64) elements of an operand, `pitch` apart. 8 lanes copy one row, 16 bytes each.
__device__ __forceinline__ void copy_tile(uint32_t shared, const bf16* rows, int pitch) {
#pragma unroll
  for (int i = 0; i < kBlk * 8 / kThreads; ++i) {
    const int row = (threadIdx.x + i * kThreads) / 8;
    const int piece = threadIdx.x % 8;
    cp_async<16>(shared + row * kPitch + piece * 16, rows + int64_t{row} * pitch + piece * 8);
  }
}

// A (m, k), B (n, k), D (m, n), row-major.
// Block: a 128 x 128 tile of D; warp (w / 2, w % 2) owns a quarter of it.
__global__ void __launch_bounds__(kThreads, 2) tensor_cores_kernel(Gemm g) {
  extern __shared__ __align__(16) char smem[];
  const uint32_t ring = smem_address(smem);
  const int tiles_n = g.n / kBlk;
  const int first_row = blockIdx.x / tiles_n * kBlk;
  const int first_col = blockIdx.x % tiles_n * kBlk;
  const bf16* a = g.a + int64_t{first_row} * g.k;
  const bf16* b = g.b + int64_t{first_col} * g.k;
  const int k_tiles = g.k / kBlkK;
  auto copy = [&](int t) {
    if (t < k_tiles) {
      const uint32_t stage = ring + t % kStages * kStageBytes;
      copy_tile(stage, a + t * kBlkK, g.k);
      copy_tile(stage + kOperandBytes, b + t * kBlkK, g.k);
    }
    cp_async_commit();  // an empty group keeps the count of groups that of the tiles
  };

  const int lane = threadIdx.x % 32;
  const int warp_row = threadIdx.x / 64 * 64;
  const int warp_col = threadIdx.x / 32 % 2 * 64;
  // The row whose address this lane hands to ldmatrix, of four 8 x 8 matrices. A: rows 0-7 and
  // 8-15, then the same of the next 8 k. B: 8 columns of D, the same of the next 8 k, then 8
  // columns more.
  const int lane_a = (warp_row + lane % 16) * kPitch + lane / 16 * 16;
  const int lane_b = (warp_col + lane / 16 * 8 + lane % 8) * kPitch + lane / 8 % 2 * 16;

  float sum[4][8][4] = {};  // 16 x 8 blocks of D
  for (int t = 0; t < kStages - 1; ++t) copy(t);
  for (int t = 0; t < k_tiles; ++t) {
    cp_async_wait<kStages - 2>();  // this thread's part of tile t is there
    __syncthreads();               // everybody's is, and everybody left tile t - 1, whose stage ...
    copy(t + kStages - 1);         // ... takes this one
    const uint32_t sA = ring + t % kStages * kStageBytes + lane_a;
    const uint32_t sB = ring + t % kStages * kStageBytes + kOperandBytes + lane_b;
#pragma unroll
    for (int k = 0; k < kBlkK * 2; k += 32) {  // bytes: 16 elements
      uint32_t rA[4][4];
      uint32_t rB[4][4];  // each of two blocks of 8 columns
#pragma unroll
      for (int i = 0; i < 4; ++i) ldmatrix_x4(rA[i], sA + i * 16 * kPitch + k);
#pragma unroll
      for (int j = 0; j < 4; ++j) ldmatrix_x4(rB[j], sB + j * 16 * kPitch + k);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const uint32_t pair[2] = {rB[j / 2][j % 2 * 2], rB[j / 2][j % 2 * 2 + 1]};
          mma_m16n8k16(sum[i][j], rA[i], pair, bf16());
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      store_fragment(g, sum[i][j], first_row + warp_row + i * 16 + lane / 4,
                     first_col + warp_col + j * 8 + lane % 4 * 2);
    }
  }
}

}  // namespace

const Rung kRung = {kBlk, kBlk, kBlkK, kStages, kThreads, kSmemBytes};

void launch_rung(const Gemm& g) {
  launch(tensor_cores_kernel, one_block_a_tile(g), dim3(kThreads), kSmemBytes, g.stream, g);
}

}  // namespace ladder
