// Tensor cores: both products by mma.sync. A warp owns 16 queries; their scores stay in its
// registers, where they already lie as the left operand of the second product.
// Why: one instruction does 2048 products. The score tile's way through shared memory is gone.
// Bound: waiting. A tile is loaded, then used: the tensor cores rest while the block waits for
// memory.
#include "fragments.cuh"

namespace ladder {
namespace {

constexpr int kThreads = 128;
constexpr int kRows = kThreads / 32 * 16;  // queries of a block: as many as a tile has keys
static_assert(kRows == kKeys);
constexpr int kSmemBytes = 2 * kTileBytes;

// 64 rows from memory to shared memory, by way of registers. 16 lanes copy a row.
__device__ void load_tile(const bf16* rows, char* tile) {
#pragma unroll
  for (int i = 0; i < kKeys * 16 / kThreads; ++i) {
    const int row = (threadIdx.x + i * kThreads) / 16, piece = threadIdx.x % 16;
    *reinterpret_cast<uint4*>(tile + row * kPitch + piece * 16) =
        *reinterpret_cast<const uint4*>(rows + row * kHead + piece * 8);
  }
}

// Grid: a block per 64 queries of a head.
__global__ void __launch_bounds__(kThreads, 2) tensor_cores_kernel(Problem p) {
  extern __shared__ __align__(16) char smem[];
  char* values = smem + kTileBytes;
  const int warp = threadIdx.x / 32;
  const int64_t first = int64_t{blockIdx.x} * kRows * kHead;
  const int64_t head = int64_t{blockIdx.x} * kRows / p.tokens * p.tokens * kHead;
  WarpAttention own;
  load_tile(p.q + first, smem);
  __syncthreads();
  own.load_queries(warpwright::smem_address(smem) + warp * 16 * kPitch);
  for (int key = 0; key < p.tokens; key += kKeys) {
    __syncthreads();  // nobody reads the last tiles any more
    load_tile(p.k + head + int64_t{key} * kHead, smem);
    load_tile(p.v + head + int64_t{key} * kHead, values);
    __syncthreads();
    own.attend(warpwright::smem_address(smem), warpwright::smem_address(values));
  }
  own.store(p.out + first + warp * 16 * kHead);
}

}  // namespace

const Rung kRung = {kRows, kThreads, kSmemBytes};

void launch_rung(const Problem& p) {
  warpwright::launch(tensor_cores_kernel, dim3(static_cast<unsigned>(p.rows() / kRows)),
                     dim3(kThreads), kSmemBytes, p.stream, p);
}

}  // namespace ladder
