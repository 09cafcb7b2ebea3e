// Transpose: a tile goes through shared memory, so that both sides are read and written by rows.
#include "../simt.h"

constexpr int kTile = 32;
constexpr int kRows = 8;  // of threads: each thread has kTile / kRows elements

// x (rows, columns), y (columns, rows). Grid: one block per tile of kTile x kTile, row by row.
// Block: kTile x kRows threads. Neighbouring lanes touch neighbouring addresses of x, and of y.
__global__ void transpose(const float* x, float* y, int rows, int columns) {
  __shared__ float tile[kTile][kTile];
  GAP();
}

int tiles_of(int rows, int columns) {
  return (rows + kTile - 1) / kTile * ((columns + kTile - 1) / kTile);
}

// y = x transposed; null, or what went wrong. On a GPU both pointers are to its memory.
extern "C" const char* run(const float* x, float* y, int rows, int columns, int order) {
  return simt::launch(order, transpose, dim3(tiles_of(rows, columns)), dim3(kTile, kRows), x, y,
                      rows, columns);
}
