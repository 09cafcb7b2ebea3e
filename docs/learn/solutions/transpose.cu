// Transpose: a tile goes through shared memory, so that both sides are read and written by rows.
#include "../simt.h"

constexpr int kTile = 32;
constexpr int kRows = 8;  // of threads: each thread has kTile / kRows elements

// x (rows, columns), y (columns, rows). Grid: one block per tile of kTile x kTile, row by row.
// Block: kTile x kRows threads. Neighbouring lanes touch neighbouring addresses of x, and of y.
__global__ void transpose(const float* x, float* y, int rows, int columns) {
  __shared__ float tile[kTile][kTile + 1];  // odd pitch: a column is in 32 banks
  const int tiles = (columns + kTile - 1) / kTile;
  const int row = blockIdx.x / tiles * kTile;
  const int column = blockIdx.x % tiles * kTile;
  const int lane = threadIdx.x;
  for (int i = threadIdx.y; i < kTile; i += kRows) {
    if (row + i < rows && column + lane < columns) {
      tile[i][lane] = x[(long long)(row + i) * columns + column + lane];
    }
  }
  __syncthreads();
  for (int i = threadIdx.y; i < kTile; i += kRows) {
    if (column + i < columns && row + lane < rows) {
      y[(long long)(column + i) * rows + row + lane] = tile[lane][i];
    }
  }
}

int tiles_of(int rows, int columns) {
  return (rows + kTile - 1) / kTile * ((columns + kTile - 1) / kTile);
}

// y = x transposed; null, or what went wrong. On a GPU both pointers are to its memory.
extern "C" const char* run(const float* x, float* y, int rows, int columns, int order) {
  return simt::launch(order, transpose, dim3(tiles_of(rows, columns)), dim3(kTile, kRows), x, y,
                      rows, columns);
}
