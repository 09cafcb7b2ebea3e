// The launch of the sm_90a kernel, and the choice of its instance. Each sm90_*.cu of instances/
// holds one kind of operands.
#pragma once

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <utility>

#include "common/switch.h"
#include "gemm/kernel_sm90.cuh"
#include "gemm/launch.h"
#include "gemm/operands_sm90.cuh"
#include "gemm/output.cuh"
#include "host/launch_cluster.h"
#include "host/tensor_map.h"

namespace warpwright {

// wgmma reads 32-bit operands along k only: with B n-major the kernel makes D^T = B A^T.
template <class T, Major kMajorB>
constexpr bool kSwapsOperands = sizeof(T) == 4 && kMajorB == Major::kMN;

template <class T, Sm90Loading kLoading, GemmTile kTile, Major kMajorA, Major kMajorB>
struct Sm90TileOf {
  static constexpr Sm90TileShape kShape = sm90_tile(kLoading, kTile);
  static constexpr bool kSwaps = kSwapsOperands<T, kMajorB>;
  static constexpr Major kFirst = kSwaps ? kMajorB : kMajorA;
  static constexpr Major kSecond = kSwaps ? kMajorA : kMajorB;
  using type = std::conditional_t<
      kLoading == Sm90Loading::kSplit, SplitTf32Tile<kShape.stages, kFirst, kSecond>,
      TileSm90<T, kSwaps ? kShape.blk_n : kShape.blk_m, kSwaps ? kShape.blk_m : kShape.blk_n,
               kShape.stages, kShape.ping_pong, kShape.clusters, kFirst, kSecond>>;
};

template <class T>
OutputSm90 sm90_output(const GemmParams& p, const GemmPlan& plan, void* workspace) {
  const bool split = writes_parts(plan);
  OutputSm90 output{};
  output.fp32 = sizeof(T) == 4 || split || p.accum_d;
  output.accumulate = !split && p.accumulate;
  output.d = split ? workspace : p.d;
  output.preactivation = split ? nullptr : p.preactivation;
  output.bias = split ? nullptr : p.bias;
  output.bias_pairs =
      p.n % 2 == 0 && reinterpret_cast<uintptr_t>(output.bias) % (2 * sizeof(T)) == 0;
  output.activation = split ? Activation::kNone : p.activation;
  output.m = static_cast<int>(p.m);
  output.n = static_cast<int>(p.n);
  output.transposed = p.transposed_d;
  output.pitch = split ? d_cols(p) : d_pitch(p);
  const auto address =
      reinterpret_cast<uintptr_t>(output.d) | reinterpret_cast<uintptr_t>(output.preactivation);
  output.pairs = (p.n | output.pitch) % 2 == 0 && address % (output.fp32 ? 8 : 4) == 0;
  output.use_tma = !output.fp32 && output.pitch * sizeof(T) % 16 == 0 && address % 16 == 0;
  if (output.use_tma) {
    auto map = [&](void* matrix) {
      return make_tensor_map({p.dtype(), false, matrix, p.n, p.m, output.pitch, 64, 64});
    };
    output.map = map(output.d);
    if (output.preactivation != nullptr) output.preactivation_map = map(output.preactivation);
  }
  // With two tiles across and a short k the loop over the chunks is 4 % faster
  // (docs/kernels/linear.md).
  const bool is_narrow = p.n > 128 && p.n <= 256 && p.k <= 128;
  output.only_rounds = output.use_tma && output.bias == nullptr && !output.accumulate &&
                       output.preactivation == nullptr && output.activation == Activation::kNone &&
                       !is_narrow;
  return output;
}

// The product alone, without the sum of the parts of a split k.
template <class Tile, class Store, class Loading>
void launch_sm90_product(const GemmParams& p, const GemmPlan& plan, const Loading& operands,
                         const typename Store::Output& output, void* workspace,
                         cudaStream_t stream) {
  constexpr int kSmemBytes = 1024 + MainloopOf<Tile>::kSmemBytes +
                             Tile::kConsumers * Store::kSmemBytes +
                             (Tile::kRowSums ? kOnesBytes : 0);
  static_assert(kSmemBytes <= 227 * 1024, "a CTA's shared memory on sm_90");
  constexpr bool kSwaps = Tile::kMnMajorTf32;
  const bool split = plan.splits > 1;
  GemmSm90Params<Loading, typename Store::Output> params{};
  params.operands = operands;
  params.cluster = Tile::kClusters ? plan.cluster : 1;
  params.grid = make_tile_grid(kSwaps ? p.n : p.m, kSwaps ? p.m : p.n, p.k, Tile::kBlkM,
                               Tile::kBlkN * params.cluster, Tile::kBlkK, plan.splits);
  if constexpr (requires { Store::order(params.grid); }) Store::order(params.grid);
  if (params.grid.num_blocks() > kMaxGridX) {
    throw std::runtime_error("warpwright: matrix product: more than 2^31 output tiles");
  }
  params.num_blocks = static_cast<unsigned>(params.grid.num_blocks());
  params.output = output;
  if (plan.sums_rows) {
    const bool in_parts = split || plan.row_sum_shares > 1;
    params.row_sums = {in_parts ? row_sum_parts<float>(p, plan, workspace) : p.row_sums,
                       in_parts || p.accum_d, static_cast<int>(p.m), plan.row_sum_shares};
  }
  params.overlap = {p.overlap.next && !split && plan.row_sum_shares == 1, p.overlap.previous};

  const int64_t clusters = std::min<int64_t>(
      params.grid.num_blocks(), clusters_at_once(params.cluster, current_device_info()));
  launch_overlapping(p.overlap.previous, gemm_sm90_kernel<Tile, Loading, Store>,
                     dim3(static_cast<unsigned>(clusters * params.cluster)),
                     dim3(gemm_sm90_threads<Tile, Loading>()), params.cluster, kSmemBytes, stream,
                     params);
}

template <class Tile, class Loading>
void launch_sm90_kernel(const GemmParams& p, const GemmPlan& plan, const Loading& operands,
                        void* workspace, cudaStream_t stream) {
  using T = typename Tile::Element;
  launch_sm90_product<Tile, EpilogueOf<Tile, Loading>>(
      p, plan, operands, sm90_output<T>(p, plan, workspace), workspace, stream);
  if (plan.splits > 1) {
    launch_split_k_reduce<T>(p, plan, workspace, stream);
  } else if (plan.sums_rows && plan.row_sum_shares > 1) {
    launch_add_row_sums<T>(p, plan, workspace, stream);
  }
}

template <Sm90Loading kLoading, class Tile>
void launch_sm90_tile(const GemmParams& p, const GemmPlan& plan, void* workspace,
                      cudaStream_t stream) {
  const GemmParams product = Tile::kMnMajorTf32 ? swapped_operands(p) : p;
  if constexpr (kLoading == Sm90Loading::kRealigned) {
    launch_sm90_kernel<Tile>(p, plan, realigned_operands<Tile>(p), workspace, stream);
  } else if constexpr (kLoading == Sm90Loading::kSplit) {
    launch_sm90_kernel<Tile>(p, plan, split_operands<Tile>(product), workspace, stream);
  } else {
    using Loading =
        std::conditional_t<kLoading == Sm90Loading::kTransposed, RewrittenOperands, TmaOperands>;
    const int share = Tile::kClusters ? plan.cluster : 1;
    launch_sm90_kernel<Tile>(p, plan, tma_operands<Tile, Loading>(product, share), workspace,
                             stream);
  }
}

template <GemmKind kKind, class T, Sm90Loading kLoading, Major kMajorA, Major kMajorB>
void launch_sm90_tiles(const GemmParams& p, const GemmPlan& plan, void* workspace,
                       cudaStream_t stream) {
  auto launches = [&]<GemmTile kTile>() {
    if constexpr (has_sm90_tile(kKind, kLoading, kTile, kMajorA, kMajorB)) {
      if (plan.tile != kTile) return false;
      using Tile = typename Sm90TileOf<T, kLoading, kTile, kMajorA, kMajorB>::type;
      launch_sm90_tile<kLoading, Tile>(p, plan, workspace, stream);
      return true;
    } else {
      return false;
    }
  };
  auto launches_one_of = [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
    return (launches.template operator()<kSm90Tiles[kIndex]>() || ...);
  };
  const bool found = launches_one_of(std::make_index_sequence<std::size(kSm90Tiles)>());
  if (!found) throw std::logic_error("warpwright: matrix product: the plan names no sm_90a tile");
}

template <GemmKind kKind, class T>
void launch_gemm_sm90(const GemmParams& p, const GemmPlan& plan, void* workspace,
                      cudaStream_t stream) {
  auto launch = [&]<Sm90Loading kLoading, Major kMajorA, Major kMajorB>() {
    launch_sm90_tiles<kKind, T, kLoading, kMajorA, kMajorB>(p, plan, workspace, stream);
  };
  constexpr Major kK = Major::kK, kMN = Major::kMN;
  if constexpr (kKind == GemmKind::k16Bit) {
    for_bool(p.a.major == kK, [&]<bool kAK>() {
      for_bool(p.b.major == kK, [&]<bool kBK>() {
        constexpr Major kMajorA = kAK ? kK : kMN, kMajorB = kBK ? kK : kMN;
        plan.loading == Sm90Loading::kRealigned
            ? launch.template operator()<Sm90Loading::kRealigned, kMajorA, kMajorB>()
            : launch.template operator()<Sm90Loading::kTma, kMajorA, kMajorB>();
      });
    });
  } else if constexpr (kKind == GemmKind::kTf32) {
    if (p.b.major == kK) return launch.template operator()<Sm90Loading::kTma, kK, kK>();
    p.a.major == kK ? launch.template operator()<Sm90Loading::kSwapped, kK, kMN>()
                    : launch.template operator()<Sm90Loading::kTransposed, kMN, kMN>();
  } else {
    if (p.b.major == kK) return launch.template operator()<Sm90Loading::kSplit, kK, kK>();
    p.a.major == kK ? launch.template operator()<Sm90Loading::kSplit, kK, kMN>()
                    : launch.template operator()<Sm90Loading::kSplit, kMN, kMN>();
  }
}

}  // namespace warpwright
