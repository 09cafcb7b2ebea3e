// Row sum: one block per row; a tree in shared memory adds the threads' sums.
#include "../simt.h"

constexpr int kThreads = 128;

// x (rows, columns), y (rows). Grid: block r has row r. Thread t adds elements t, t + kThreads,
// ...; then thread t < offset adds thread t + offset's sum, for offset = kThreads / 2, ..., 1.
__global__ void row_sum(const float* x, float* y, int columns) {
  __shared__ float sums[kThreads];
  const float* row = x + (long long)blockIdx.x * columns;
  GAP();
}

// y = the sums of x's rows; null, or what went wrong. On a GPU both pointers are to its memory.
extern "C" const char* run(const float* x, float* y, int rows, int columns, int order) {
  return simt::launch(order, row_sum, dim3(rows), dim3(kThreads), x, y, columns);
}
