// Scan: running sums of a row, by distances 1, 2, 4, ... (Hillis and Steele).
#include "../simt.h"

constexpr int kThreads = 256;

// x and y (rows, columns), columns <= kThreads. Grid: block r has row r, thread t element t.
// In the round with distance d every element adds the one that is d to its left.
__global__ void scan(const float* x, float* y, int columns) {
  __shared__ float sums[kThreads];
  const long long row = (long long)blockIdx.x * columns;
  const int t = threadIdx.x;
  sums[t] = t < columns ? x[row + t] : 0;
  __syncthreads();
  for (int d = 1; d < kThreads; d *= 2) {
    const float left = t >= d ? sums[t - d] : 0;
    __syncthreads();  // all have read
    sums[t] += left;
    __syncthreads();  // all have written
  }
  if (t < columns) y[row + t] = sums[t];
}

// y = the running sums of x's rows; null, or what went wrong. On a GPU both pointers are to its
// memory.
extern "C" const char* run(const float* x, float* y, int rows, int columns, int order) {
  return simt::launch(order, scan, dim3(rows), dim3(kThreads), x, y, columns);
}
