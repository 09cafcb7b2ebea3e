// Global norm of all gradients, and the factor that clips it. Each block sums the squares of one
// chunk. The block that finishes last adds the partial sums in a fixed order. No host in between,
// no float atomics: the result does not depend on which block is last.
#include "device/reduce.cuh"
#include "device/vec.cuh"
#include "host/launch.h"
#include "ops/optim/optim.h"
#include "ops/optim/optim_table.cuh"

namespace warpwright {
namespace {

constexpr int kUnroll = kGradNormUnroll;

struct NormEntry {
  const void* grad;
  int64_t numel;
  int32_t head;
  DType dtype;
};

struct NormScalars {
  double max_norm;
  const float* grad_scale;
  double* result;
  double* partials;
  unsigned* counter;
  unsigned first_block, num_blocks;  // of this launch among all; of all launches
};

// The squares of one chunk, in one thread. fp32 for up to kUnroll vectors, then double.
template <class T>
__device__ __forceinline__ double sum_squares(const NormEntry& entry, int64_t chunk) {
  constexpr int kSize = kVecSize<T>;
  const T* grad = static_cast<const T*>(entry.grad);
  const int64_t head = entry.head;
  const int64_t num_vectors = (entry.numel - head) / kSize;
  const int64_t first = chunk * (kOptimThreads * kUnroll) + threadIdx.x;
  Vec<T, kSize> loaded[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t v = first + u * kOptimThreads;
#pragma unroll
    for (int j = 0; j < kSize; ++j) loaded[u][j] = convert<T>(0.0f);
    if (v < num_vectors) loaded[u] = load_vec<kSize>(grad + head + v * kSize);
  }
  Accum<T> sum = 0;
  auto add = [&](T x) {
    const auto value = convert<Accum<T>>(x);
    sum += value * value;
  };
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
    for (int j = 0; j < kSize; ++j) add(loaded[u][j]);
  }
  if (chunk == 0) {
    const int64_t tail = head + num_vectors * kSize + threadIdx.x;
    if (threadIdx.x < head) add(grad[threadIdx.x]);
    if (tail < entry.numel) add(grad[tail]);
  }
  return sum;
}

// Layout: table.entry[t] is one gradient, dense, of any of the four types.
// Grid: block b sums chunk b - first_chunk[t] of gradient t into partials[first_block + b]. The
// block that draws the last ticket of all launches adds partials 0, 1, and so on, and writes the
// result.
template <class Table>
__global__ void __launch_bounds__(kOptimThreads)
    grad_norm_kernel(const __grid_constant__ Table table,
                     const __grid_constant__ NormScalars scalars) {
  __shared__ double shared_sums[kOptimThreads / kWarpSize];
  __shared__ bool shared_last;
  const int which = find_entry(table, blockIdx.x);
  const NormEntry& entry = table.entry[which];
  const int64_t chunk = blockIdx.x - table.first_chunk[which];
  double sum = 0;
  switch (entry.dtype) {
    case DType::kFloat32:
      sum = sum_squares<float>(entry, chunk);
      break;
    case DType::kFloat64:
      sum = sum_squares<double>(entry, chunk);
      break;
    case DType::kBFloat16:
      sum = sum_squares<bf16>(entry, chunk);
      break;
    default:
      sum = sum_squares<half>(entry, chunk);
      break;
  }
  sum = block_reduce(sum, Sum{}, 0.0, shared_sums);
  if (threadIdx.x == 0) {
    scalars.partials[scalars.first_block + blockIdx.x] = sum;
    __threadfence();  // the partial sum is visible before the ticket
    const unsigned last = scalars.num_blocks - 1;
    shared_last = atomicInc(scalars.counter, last) == last;  // wraps to zero for the next step
  }
  __syncthreads();
  if (!shared_last) return;

  __threadfence();
  double total = 0;
  for (unsigned i = threadIdx.x; i < scalars.num_blocks; i += kOptimThreads) {
    total += __ldcg(scalars.partials + i);
  }
  total = block_reduce(total, Sum{}, 0.0, shared_sums);
  if (threadIdx.x == 0) {
    double norm = sqrt(total);
    if (scalars.grad_scale != nullptr) norm /= *scalars.grad_scale;
    const double factor = scalars.max_norm / (norm + 1e-6);
    scalars.result[0] = norm;
    scalars.result[1] = factor >= 1.0 ? 1.0 : factor;  // NaN remains
  }
}

template <class Table>
void launch_tables(const GradNormParams& p, const GradNormPlan& plan, double* partials,
                   cudaStream_t stream) {
  static_assert(sizeof(NormEntry) == kGradNormEntryBytes);
  NormScalars scalars{p.max_norm, p.grad_scale, p.result, partials, p.counter, 0, 0};
  scalars.num_blocks = static_cast<unsigned>(plan.blocks());
  for_each_table<Table>(
      plan,
      [&](int64_t i) {
        const GradNormTensor& t = p.tensors[i];
        return NormEntry{t.grad, t.numel, plan.tensors[i].head, t.dtype};
      },
      [&](const Table& table, unsigned blocks) {
        launch(grad_norm_kernel<Table>, dim3(blocks), dim3(kOptimThreads), 0, stream, table,
               scalars);
        scalars.first_block += blocks;
      });
}

}  // namespace

void launch_grad_norm(const GradNormParams& p, const GradNormPlan& plan, void* workspace,
                      cudaStream_t stream) {
  auto* partials = static_cast<double*>(workspace);
  if (plan.small_table)
    launch_tables<ChunkTable<NormEntry, kSmallTableBytes>>(p, plan, partials, stream);
  else
    launch_tables<ChunkTable<NormEntry, kLargeTableBytes>>(p, plan, partials, stream);
}

}  // namespace warpwright
