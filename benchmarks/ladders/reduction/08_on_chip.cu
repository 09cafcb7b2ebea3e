// On chip: the row stays in shared memory between the walks, so that memory sees it once.
// Why: one read and one write are the least that softmax can do. The walks inside the SM cost
// little.
// Bound: memory. A row of 32,000 floats leaves room for one block per SM: while it computes,
// nothing loads.
#include "row.cuh"

namespace ladder {
namespace {

constexpr int kMaxCols = 58080;  // of the 227 KB that a block may have, `shared` takes 128 bytes

// x, y: (rows, cols). Grid: one block per row. Dynamic shared memory: the row.
__global__ void __launch_bounds__(kRowThreads, 1)
    on_chip_kernel(const float* x, float* y, int cols) {
  extern __shared__ __align__(16) float held[];
  __shared__ float shared[kRowWarps];
  const float* row = x + int64_t{blockIdx.x} * cols;
  float* out = y + int64_t{blockIdx.x} * cols;
  float largest = -INFINITY;
  for_vectors(row, cols, [&](int v, Vec4 z) {
    warpwright::store_vec(held + v * kVec, z);
    largest = fmaxf(largest, max_of(z));
  });
  largest = warpwright::block_reduce(largest, warpwright::Max{}, -INFINITY, shared);
  // Each thread reads what it wrote itself: no barrier is needed for the row.
  float sum = 0;
  for_vectors(held, cols, [&](int v, Vec4 z) {
    const Vec4 exponentials = exps(z, largest);
    warpwright::store_vec(held + v * kVec, exponentials);
    sum += sum_of(exponentials);
  });
  sum = warpwright::block_reduce(sum, warpwright::Sum{}, 0.f, shared);
  const float scale = 1 / sum;
  for_vectors(held, cols, [&](int v, Vec4 e) {
    warpwright::store_vec_streaming(out + int64_t{v} * kVec, times(e, scale));
  });
}

}  // namespace

const Rung kRung = {Function::kSoftmax, kVec, kMaxCols, kRowThreads,
                    (kMaxCols + kRowWarps) * int{sizeof(float)}};

void launch_rung(const Problem& p) {
  warpwright::launch(on_chip_kernel, dim3(static_cast<unsigned>(p.rows)), dim3(kRowThreads),
                     p.cols * int64_t{sizeof(float)}, p.stream, p.x, p.result,
                     static_cast<int>(p.cols));
}

}  // namespace ladder
