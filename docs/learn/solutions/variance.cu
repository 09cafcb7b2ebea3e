// Variance: one warp per row; each lane has a state, and states merge (welford.py).
#include "../simt.h"

struct State {
  float count;
  float mean;
  float m2;  // sum of (x - mean)²
};

// Either may be empty: {0, 0, 0}.
__device__ State merge(State a, State b) {
  const float count = a.count + b.count;
  if (count == 0) return {0, 0, 0};
  const float delta = b.mean - a.mean;
  const float share = b.count / count;
  return {count, a.mean + delta * share, a.m2 + b.m2 + delta * delta * a.count * share};
}

// x (rows, columns), y (rows): the mean square distance from the row's mean. Grid: block r has row
// r, 32 threads. One read of x.
__global__ void variance(const float* x, float* y, int columns) {
  const long long row = (long long)blockIdx.x * columns;
  State state = {0, 0, 0};
  for (int i = threadIdx.x; i < columns; i += 32) state = merge(state, {1, x[row + i], 0});
  for (int mask = 16; mask > 0; mask /= 2) {
    const State other = {__shfl_xor_sync(~0u, state.count, mask),
                         __shfl_xor_sync(~0u, state.mean, mask),
                         __shfl_xor_sync(~0u, state.m2, mask)};
    state = merge(state, other);
  }
  if (threadIdx.x == 0) y[blockIdx.x] = state.m2 / state.count;
}

// y = the variances of x's rows; null, or what went wrong. On a GPU both pointers are to its
// memory.
extern "C" const char* run(const float* x, float* y, int rows, int columns, int order) {
  return simt::launch(order, variance, dim3(rows), dim3(32), x, y, columns);
}
