// The body of every matrix product on the portable mainloop. It has two extension points. Loaders
// bring the operands (contract and example: tile/mainloop_portable.cuh). Outputs take the tile of D
// (contract and example: tile/epilogue.cuh).
//
// A loader is made from (its Operand, first row of the CTA's tile, batch). A kernel is an entry of
// a few lines that names the Output. A fused epilogue is therefore an Output and an entry. For
// example D = A B^T + residual:
//
//   template <class T>
//   struct AddResidual {
//     static constexpr int kVec = MatrixOutput<T>::kVec;
//     MatrixOutput<T> d;
//     const T* residual;  // laid out like D
//     __device__ void store(int64_t row, int64_t col, const Accum<T> (&values)[kVec]) const {
//       Accum<T> sums[kVec];
//       for (int i = 0; i < kVec; ++i) {
//         const bool inside = row < d.rows && col + i < d.cols;
//         sums[i] = values[i] + (inside ? convert<Accum<T>>(residual[row * d.ld + col + i]) : 0);
//       }
//       d.store(row, col, sums);
//     }
//   };
//   template <class Tile, class LoaderA, class LoaderB>
//   __global__ void __launch_bounds__(Tile::kThreads, Tile::kMinBlocks)
//       residual_kernel(TileGrid grid, typename LoaderA::Operand a, typename LoaderB::Operand b,
//                       AddResidual<typename Tile::Element> output) {
//     multiply_tile<Tile, LoaderA, LoaderB>(
//         grid, a, b, [&](const TileCoord&, auto&& write) { write(output); });
//   }
//   launch_portable<Tile, LoaderA, LoaderB>(residual_kernel<Tile, LoaderA, LoaderB>, {m, n, k},
//                                           /*overlap=*/{}, stream, a, b, output);
#pragma once

#include <algorithm>
#include <stdexcept>

#include "device/math.cuh"
#include "gemm/gemm.h"
#include "host/launch_cluster.h"
#include "tile/epilogue.cuh"
#include "tile/mainloop_portable.cuh"
#include "tile/scheduler.cuh"

namespace warpwright {

template <GemmKind kKind, GemmTile kTile, class T,
          int kCtasPerSm = portable_tile(kKind, kTile).ctas_per_sm>
struct PortableTileOf {
  static constexpr TileShape kShape = portable_tile(kKind, kTile);
  static constexpr MathKind kMath =
      uses_tensor_cores(kKind) ? MathKind::kTensorCore : MathKind::kFma;
  using type = Tile<T, kMath, kShape.blk_m, kShape.blk_n, kShape.blk_k, kShape.warps_m,
                    kShape.warps_n, kShape.stages, kCtasPerSm>;
};

// A CTA's tile of D: A (m, k) and B (n, k) as their loaders see them. `store(tile, write)` calls
// write(output) once. Grid: one block per D tile, split and batch, in the order of tile_of_block.
template <class Tile, class LoaderA, class LoaderB, class Store>
__device__ __forceinline__ void multiply_tile(const TileGrid& grid,
                                              const typename LoaderA::Operand& a,
                                              const typename LoaderB::Operand& b, Store&& store) {
  extern __shared__ __align__(16) char smem[];
  using Loop = Mainloop<Tile, LoaderA, LoaderB>;
  const TileCoord tile = tile_of_block(grid, blockIdx.x);
  const int64_t first_m = int64_t{tile.m} * Tile::kBlkM;
  const int64_t first_n = int64_t{tile.n} * Tile::kBlkN;
  LoaderA loader_a(a, first_m, tile.batch);
  LoaderB loader_b(b, first_n, tile.batch);
  typename Loop::Accumulator accumulator;
  accumulator.clear();
  Loop::run(accumulator, loader_a, loader_b, tile.k_begin, tile.k_end, smem);
  store(tile, [&](const auto& output) {
    Epilogue<Tile>::run(accumulator, output, first_m, first_n, smem);
  });
}

// `batches` independent products, each with k in `splits` parts.
struct ProductExtents {
  int64_t m;
  int64_t n;
  int64_t k;
  int splits = 1;
  int64_t batches = 1;
};

template <class Tile, class LoaderA, class LoaderB>
constexpr int kPortableSmemBytes =
    std::max(Mainloop<Tile, LoaderA, LoaderB>::kSmemBytes, Epilogue<Tile>::kSmemBytes);

// Launches `kernel`, an entry of multiply_tile(), whose parameters after the grid are `args`.
template <class Tile, class LoaderA, class LoaderB, class... Params, class... Args>
void launch_portable(void (*kernel)(TileGrid, Params...), const ProductExtents& e, Overlap overlap,
                     cudaStream_t stream, Args&&... args) {
  const TileGrid grid = make_tile_grid(e.m, e.n, e.k, Tile::kBlkM, Tile::kBlkN, Tile::kBlkK,
                                       e.splits, static_cast<int>(e.batches));
  if (grid.num_blocks() > kMaxGridX) {
    throw std::runtime_error("warpwright: matrix product: more than 2^31 output tiles");
  }
  if (grid.num_blocks() == 0) return;
  launch_overlapping(overlap.previous, kernel, dim3(static_cast<unsigned>(grid.num_blocks())),
                     dim3(Tile::kThreads), /*cluster=*/1,
                     kPortableSmemBytes<Tile, LoaderA, LoaderB>, stream, grid, args...);
}

}  // namespace warpwright
