// Softmax: one warp per row, maximum and sum in one pass (the state of online_softmax.py).
#include "../simt.h"

struct State {
  float m;  // maximum
  float s;  // sum of exp(x - m)
};

__device__ State merge(State a, State b) {
  const float m = a.m > b.m ? a.m : b.m;
  if (m == -INFINITY) return {m, 0};  // -inf - -inf would be NaN
  return {m, a.s * expf(a.m - m) + b.s * expf(b.m - m)};
}

// x and y (rows, columns); every row has an element above -inf. Grid: block r has row r, 32
// threads. Two reads of x, one write of y.
__global__ void softmax(const float* x, float* y, int columns) {
  const long long row = (long long)blockIdx.x * columns;
  State state = {-INFINITY, 0};
  for (int i = threadIdx.x; i < columns; i += 32) state = merge(state, {x[row + i], 1});
  for (int mask = 16; mask > 0; mask /= 2) {
    const State other = {__shfl_xor_sync(~0u, state.m, mask), __shfl_xor_sync(~0u, state.s, mask)};
    state = merge(state, other);
  }
  for (int i = threadIdx.x; i < columns; i += 32) y[row + i] = expf(x[row + i] - state.m) / state.s;
}

// y = the softmax of x's rows; null, or what went wrong. On a GPU both pointers are to its memory.
extern "C" const char* run(const float* x, float* y, int rows, int columns, int order) {
  return simt::launch(order, softmax, dim3(rows), dim3(32), x, y, columns);
}
