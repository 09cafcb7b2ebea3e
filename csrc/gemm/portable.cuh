// The portable kernel of two matrices, and the choice of its instance. Each portable_*.cu of
// instances/ holds one element type.
#pragma once

#include "common/switch.h"
#include "device/dependent_launch.cuh"
#include "gemm/kernel_portable.cuh"
#include "gemm/launch.h"
#include "gemm/output.cuh"
#include "tile/matrix_loader.cuh"

namespace warpwright {

template <class Tile, Major kMajor, int kBlkMN, bool kByElements>
using GemmLoader =
    std::conditional_t<kManyResults<Tile> && kMajor == Major::kK, TransposingLoader<Tile, kBlkMN>,
                       MatrixLoader<Tile, kMajor, kBlkMN, kByElements>>;

template <Major kMajor, class T>
MatrixOperand<T> matrix_operand(const Operand& operand, int64_t extent_mn, int64_t k,
                                bool vectorized) {
  return {static_cast<const T*>(operand.data),
          kMajor == Major::kK ? operand.stride_mn : operand.stride_k, extent_mn, k, vectorized};
}

// A: (m, k), B: (n, k), each contiguous in its kMajor direction. D: (m, n) row-major in `output`.
// If `output` has no pointer, D goes to `sums`, with splits its parts (splits, m, n).
template <class Tile, class LoaderA, class LoaderB>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kMinBlocks)
    gemm_portable_kernel(TileGrid grid, typename LoaderA::Operand a, typename LoaderB::Operand b,
                         ActivationOutput<typename Tile::Element> output,
                         SumOutput<typename Tile::Acc> sums, Overlap overlap) {
  if (overlap.next) let_next_kernel_start();
  multiply_tile<Tile, LoaderA, LoaderB>(grid, a, b, [&](const TileCoord& tile, auto&& write) {
    if (output.pointer != nullptr) {
      write(output);
    } else {
      sums.pointer += tile.split * sums.rows * sums.cols;
      write(sums);
    }
  });
  if (overlap.previous) outlast_previous_kernel();
}

template <GemmKind kKind, GemmTile kTile, class T, bool kByElements, Major kMajorA, Major kMajorB>
void launch_portable_instance(const GemmParams& p, const GemmPlan& plan, void* workspace,
                              cudaStream_t stream) {
  // 16-bit loaders of elements hold a whole tile in registers, which leaves room for two CTAs per
  // SM.
  constexpr int kCtas = kByElements && sizeof(T) == 2 ? 2 : portable_tile(kKind, kTile).ctas_per_sm;
  using Tile = typename PortableTileOf<kKind, kTile, T, kCtas>::type;
  using LoaderA = GemmLoader<Tile, kMajorA, Tile::kBlkM, kByElements>;
  using LoaderB = GemmLoader<Tile, kMajorB, Tile::kBlkN, kByElements>;
  static_assert(kPortableSmemBytes<Tile, LoaderA, LoaderB> <=
                    tile_smem_bytes(kKind, portable_tile(kKind, kTile)),
                "choose_gemm believes that the tile fits");
  const bool split = plan.splits > 1;
  ActivationOutput<T> output{};
  if (!split && !p.accum_d) output = activation_output<T>(p);
  SumOutput<Accum<T>> sums{};
  if (split) sums = part_output<Accum<T>>(p, workspace);
  if (!split && p.accum_d) sums = sum_output<Accum<T>>(p);
  const Overlap overlap{p.overlap.next && !split, p.overlap.previous};
  launch_portable<Tile, LoaderA, LoaderB>(
      gemm_portable_kernel<Tile, LoaderA, LoaderB>, {p.m, p.n, p.k, plan.splits}, overlap, stream,
      matrix_operand<kMajorA, T>(p.a, p.m, p.k, plan.a_vectorized),
      matrix_operand<kMajorB, T>(p.b, p.n, p.k, plan.b_vectorized), output, sums, overlap);
  if (split) launch_split_k_reduce<T>(p, plan, workspace, stream);
}

template <GemmKind kKind, class T>
void launch_gemm_portable(const GemmParams& p, const GemmPlan& plan, void* workspace,
                          cudaStream_t stream) {
  auto for_majors = [&]<GemmTile kTile, bool kByElements = false>() {
    for_bool(p.a.major == Major::kK, [&]<bool kAK>() {
      for_bool(p.b.major == Major::kK, [&]<bool kBK>() {
        launch_portable_instance<kKind, kTile, T, kByElements, kAK ? Major::kK : Major::kMN,
                                 kBK ? Major::kK : Major::kMN>(p, plan, workspace, stream);
      });
    });
  };
  if constexpr (portable_tile(kKind, GemmTile::k128x256).ctas_per_sm > 0) {
    if (plan.tile == GemmTile::k128x256) {
      return for_majors.template operator()<GemmTile::k128x256>();
    }
  }
  if constexpr (portable_tile(kKind, GemmTile::k128x128).ctas_per_sm > 0) {
    if (plan.tile == GemmTile::k128x128) {
      return for_majors.template operator()<GemmTile::k128x128>();
    }
  }
  for_bool(!(plan.a_vectorized && plan.b_vectorized), [&]<bool kByElements>() {
    for_majors.template operator()<GemmTile::k64x64, kByElements>();
  });
}

}  // namespace warpwright
