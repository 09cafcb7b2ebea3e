// Softmax: a block per row. One walk over it for the maximum, one for the sum of exponentials, one
// to write.
// Why: the same block-wide reduction, twice per row. Without the maximum exp overflows.
// Bound: memory. The row is read three times and written once, as far as L2 does not keep it.
#include "row.cuh"

namespace ladder {
namespace {

// x, y: (rows, cols). Grid: one block per row.
__global__ void __launch_bounds__(kRowThreads, 2)
    softmax_kernel(const float* x, float* y, int cols) {
  __shared__ float shared[kRowWarps];
  const float* row = x + int64_t{blockIdx.x} * cols;
  float* out = y + int64_t{blockIdx.x} * cols;
  float largest = -INFINITY;
  for_vectors(row, cols, [&](int, Vec4 z) { largest = fmaxf(largest, max_of(z)); });
  largest = warpwright::block_reduce(largest, warpwright::Max{}, -INFINITY, shared);
  float sum = 0;
  for_vectors(row, cols, [&](int, Vec4 z) { sum += sum_of(exps(z, largest)); });
  sum = warpwright::block_reduce(sum, warpwright::Sum{}, 0.f, shared);
  const float scale = 1 / sum;
  for_vectors(row, cols, [&](int v, Vec4 z) {
    warpwright::store_vec(out + int64_t{v} * kVec, times(exps(z, largest), scale));
  });
}

}  // namespace

const Rung kRung = {Function::kSoftmax, kVec, kAnyCols, kRowThreads, kRowWarps* int{sizeof(float)}};

void launch_rung(const Problem& p) {
  warpwright::launch(softmax_kernel, dim3(static_cast<unsigned>(p.rows)), dim3(kRowThreads), 0,
                     p.stream, p.x, p.result, static_cast<int>(p.cols));
}

}  // namespace ladder
