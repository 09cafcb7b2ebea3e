// The matrix product on the portable mainloop, and the choice of its instance. Each
// linear_<type>.cu instantiates launch_gemm_portable for one element type.
#pragma once

#include "device/math.cuh"
#include "host/launch_cluster.h"
#include "ops/linear/linear.h"
#include "gemm/output.cuh"
#include "tile/matrix_loader.cuh"
#include "tile/scheduler.cuh"

namespace warpwright {

template <GemmKind kKind, GemmTile kTile, class T, bool kNarrow>
struct GemmTileOf {
  static constexpr TileShape kShape = tile_shape(kKind, kTile);
  static constexpr MathKind kMath = kKind == GemmKind::k16Bit || kKind == GemmKind::kTf32
                                        ? MathKind::kTensorCore
                                        : MathKind::kFma;
  // Narrow 16-bit loaders hold a whole tile's elements in registers: room for two CTAs an SM.
  static constexpr int kCtas = kNarrow && sizeof(T) == 2 ? 2 : kShape.ctas_per_sm;
  using type = Tile<T, kMath, kShape.blk_m, kShape.blk_n, kShape.blk_k, kShape.warps_m,
                    kShape.warps_n, kShape.stages, kCtas>;
};

template <class Tile, Major kMajor, int kBlkMN, bool kNarrow>
using GemmLoader =
    std::conditional_t<kManyResults<Tile> && kMajor == Major::kK, TurningLoader<Tile, kBlkMN>,
                       MatrixLoader<Tile, kMajor, kBlkMN, kNarrow>>;

// A: (m, k), B: (n, k), each contiguous in its kMajor direction. D: (m, n) row-major in `output`;
// or, if that is null, in `sums`, with splits its parts (splits, m, n). Grid: one block a D tile
// and split, in the order of tile_of_block.
template <class Tile, Major kMajorA, Major kMajorB, bool kNarrow>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kMinBlocks)
    gemm_kernel(TileGrid grid, MatrixOperand<typename Tile::Element> a,
                MatrixOperand<typename Tile::Element> b,
                ActivationOutput<typename Tile::Element> output, SumOutput<typename Tile::Acc> sums,
                Beside beside) {
  if (beside.next) let_next_kernel_start();
  extern __shared__ __align__(16) char smem[];
  using LoaderA = GemmLoader<Tile, kMajorA, Tile::kBlkM, kNarrow>;
  using LoaderB = GemmLoader<Tile, kMajorB, Tile::kBlkN, kNarrow>;
  using Loop = Mainloop<Tile, LoaderA, LoaderB>;

  const TileCoord tile = tile_of_block(grid, blockIdx.x);
  const int64_t first_m = int64_t{tile.m} * Tile::kBlkM;
  const int64_t first_n = int64_t{tile.n} * Tile::kBlkN;
  LoaderA loader_a(a, first_m);
  LoaderB loader_b(b, first_n);
  typename Loop::Accumulator accumulator;
  accumulator.clear();
  Loop::run(accumulator, loader_a, loader_b, tile.k_begin, tile.k_end, smem);

  if (output.pointer != nullptr) {
    Epilogue<Tile>::run(accumulator, output, first_m, first_n, smem);
  } else {
    sums.pointer += tile.split * sums.rows * sums.cols;
    Epilogue<Tile>::run(accumulator, sums, first_m, first_n, smem);
  }
  if (beside.previous) outlast_previous_kernel();
}

template <GemmKind kKind, GemmTile kTile, class T, bool kNarrow, Major kMajorA, Major kMajorB>
void launch_gemm_instance(const GemmParams& p, const GemmConfig& config, cudaStream_t stream) {
  using Tile = typename GemmTileOf<kKind, kTile, T, kNarrow>::type;
  using Acc = typename Tile::Acc;
  using Loop = Mainloop<Tile, GemmLoader<Tile, kMajorA, Tile::kBlkM, kNarrow>,
                        GemmLoader<Tile, kMajorB, Tile::kBlkN, kNarrow>>;
  constexpr int kSmemBytes = std::max(Loop::kSmemBytes, Epilogue<Tile>::kSmemBytes);
  static_assert(kSmemBytes <= tile_smem_bytes(kKind, tile_shape(kKind, kTile)),
                "choose_gemm_config believes that the tile fits");

  const TileGrid grid =
      make_tile_grid(p.m, p.n, p.k, Tile::kBlkM, Tile::kBlkN, Tile::kBlkK, config.splits);
  if (grid.num_blocks() > kMaxGridX) {
    throw std::runtime_error("warpwright: linear: more than 2^31 output tiles");
  }
  const MatrixOperand<T> a{static_cast<const T*>(p.a),
                           kMajorA == Major::kK ? p.a_stride_m : p.a_stride_k, p.m, p.k,
                           config.a_wide};
  const MatrixOperand<T> b{static_cast<const T*>(p.b),
                           kMajorB == Major::kK ? p.b_stride_n : p.b_stride_k, p.n, p.k,
                           config.b_wide};
  const bool split = config.splits > 1;
  ActivationOutput<T> output{};
  if (!split && !p.accum_d) output = activation_output<T>(p);
  SumOutput<Acc> sums{};
  if (split) sums = split_output<Acc>(p);
  if (!split && p.accum_d) sums = sum_output<Acc>(p);
  launch_beside(p.beside.previous, gemm_kernel<Tile, kMajorA, kMajorB, kNarrow>,
                dim3(static_cast<unsigned>(grid.num_blocks())), dim3(Tile::kThreads),
                /*cluster=*/1, kSmemBytes, stream, grid, a, b, output, sums,
                Beside{p.beside.next && !split, p.beside.previous});
  if (split) launch_split_k_reduce<T>(p, config.splits, stream);
}

template <GemmKind kKind, class T>
void launch_gemm_portable(const GemmParams& p, const GemmConfig& config, cudaStream_t stream) {
  auto for_majors = [&]<GemmTile kTile, bool kNarrow = false>() {
    for_bool(config.a_k_major, [&]<bool kAK>() {
      for_bool(config.b_k_major, [&]<bool kBK>() {
        launch_gemm_instance<kKind, kTile, T, kNarrow, kAK ? Major::kK : Major::kMN,
                             kBK ? Major::kK : Major::kMN>(p, config, stream);
      });
    });
  };
  if constexpr (tile_shape(kKind, GemmTile::kLarge).ctas_per_sm > 0) {
    if (config.tile == GemmTile::kLarge) return for_majors.template operator()<GemmTile::kLarge>();
  }
  if constexpr (tile_shape(kKind, GemmTile::kMedium).ctas_per_sm > 0) {
    if (config.tile == GemmTile::kMedium)
      return for_majors.template operator()<GemmTile::kMedium>();
  }
  for_bool(!(config.a_wide && config.b_wide),
           [&]<bool kNarrow>() { for_majors.template operator()<GemmTile::kSmall, kNarrow>(); });
}

void launch_gemm_bf16(const GemmParams& p, const GemmConfig& config, cudaStream_t stream);
void launch_gemm_fp16(const GemmParams& p, const GemmConfig& config, cudaStream_t stream);
void launch_gemm_tf32(const GemmParams& p, const GemmConfig& config, cudaStream_t stream);
void launch_gemm_fp32(const GemmParams& p, const GemmConfig& config, cudaStream_t stream);
void launch_gemm_fp64(const GemmParams& p, const GemmConfig& config, cudaStream_t stream);

}  // namespace warpwright
