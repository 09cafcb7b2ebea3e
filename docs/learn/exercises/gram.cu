// Gram matrix: a product by tiles in shared memory, so that each element read serves a whole tile.
#include "../simt.h"

constexpr int kTile = 16;

// x (rows, columns), y (rows, rows), y = x xᵀ. Grid: one block per tile of kTile x kTile of y, row
// by row. Block: one thread per element. Outside of x there are zeros, which add nothing.
__global__ void gram(const float* x, float* y, int rows, int columns) {
  __shared__ float a[kTile][kTile + 1];
  __shared__ float b[kTile][kTile + 1];
  GAP();
}

int tiles_of(int rows) {
  const int tiles = (rows + kTile - 1) / kTile;
  return tiles * tiles;
}

// y = x xᵀ; null, or what went wrong. On a GPU both pointers are to its memory.
extern "C" const char* run(const float* x, float* y, int rows, int columns, int order) {
  return simt::launch(order, gram, dim3(tiles_of(rows)), dim3(kTile, kTile), x, y, rows, columns);
}
