// Launches of the second pass of long rows, and the table of roots.
#include "host/launch.h"
#include "ops/fft_conv/cuda/fused/launch.h"
#include "ops/fft_conv/cuda/fused/long_products.cuh"

namespace warpwright::fft {
namespace {

__global__ void __launch_bounds__(256) roots_kernel(float2* roots, int points) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < points) roots[i] = exact_root(i, points);
}

void launch_product(void (*kernel)(LongProductOperands), const LongProductOperands& operands,
                    int64_t blocks, int64_t tiles, cudaStream_t stream) {
  if (blocks > kMaxGridX) throw std::runtime_error("warpwright: fft_conv: too many rows");
  launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(LongRowPlan::kThreads),
         8 * tiles * LongRowPlan::kElements, stream, operands);
}

}  // namespace

void launch_roots(float2* roots, int points, cudaStream_t stream) {
  launch(roots_kernel, dim3(static_cast<unsigned>(ceil_div(points, 256))), dim3(256), 0, stream,
         roots, points);
}

void launch_long_weight(const LongProductOperands& p, int64_t blocks, cudaStream_t stream) {
  launch_product(long_weight_kernel, p, blocks, 1, stream);
}

void launch_long_product(const LongProductOperands& p, int64_t blocks, cudaStream_t stream) {
  if (p.pairs <= kFftFewPairs) {
    launch_product(long_product_kernel<true>, p, blocks, 2, stream);
  } else {
    launch_product(long_product_kernel<false>, p, blocks, 1, stream);
  }
}

void launch_long_gradient_product(const LongProductOperands& p, int64_t blocks,
                                  cudaStream_t stream) {
  launch_product(long_gradient_kernel, p, blocks, 2, stream);
}

}  // namespace warpwright::fft
