// The matrix product on the sm_90a mainloop: tensor maps, the persistent kernel, its launch. Each
// linear_sm90_<type>.cu instantiates launch_gemm_sm90 for one element type.
#pragma once

#include <type_traits>
#include <utility>

#include "device/dependent_launch.cuh"
#include "device/math.cuh"
#include "device/sm90/arch.cuh"
#include "host/launch_cluster.h"
#include "host/switch.h"
#include "host/tensor_map.h"
#include "gemm/output.cuh"
#include "gemm/instances/sm90.h"
#include "tile/epilogue_sm90.cuh"
#include "tile/mainloop_sm90.cuh"
#include "tile/mn_major_tf32_sm90.cuh"
#include "tile/realigning_loader_sm90.cuh"
#include "tile/scheduler.cuh"
#include "tile/split_tf32_sm90.cuh"

namespace warpwright {

// Loading: how the operands reach the stages, TmaOperands, TurnedOperands or RealignedOperands.
template <class Loading>
struct GemmSm90Params {
  Loading operands;
  OutputSm90 output;
  TileGrid grid;           // of clusters: its tiles are kBlkM by cluster * kBlkN
  unsigned num_blocks;     // of the grid
  int cluster;             // CTAs, if Tile::kClusters
  RowSumsOutput row_sums;  // if Tile::kRowSums
  Beside beside;
};

// Where a CTA has its tile of D.
template <class Tile>
__device__ __forceinline__ int first_m(const TileCoord& tile) {
  return tile.m * Tile::kBlkM;
}
template <class Tile>
__device__ __forceinline__ int first_n(const TileCoord& tile, ClusterPlace cluster) {
  return (tile.n * cluster.ctas + cluster.rank) * Tile::kBlkN;
}

// A consumer's first column of D, which MN-major TF32 operands give transposed.
template <class Tile>
__device__ __forceinline__ int first_col(const TileCoord& tile, ClusterPlace cluster,
                                         int first_row) {
  return Tile::kMnMajorTf32 ? first_m<Tile>(tile) + first_row : first_n<Tile>(tile, cluster);
}

// One thread of a warpgroup loads both operands.
struct TmaOperands {
  static constexpr int kWarpgroups = 1;
  static constexpr int kRegisters = kProducerRegisters;  // of a thread that loads
  static constexpr int kConsumerRegisters = warpwright::kConsumerRegisters;

  CUtensorMap a;
  CUtensorMap b;
  int stage_bytes;  // of both boxes
  bool b_once;      // nobody will find b in L2 again

  __device__ __forceinline__ void prefetch() const {
    prefetch_tensor_map(&a);
    prefetch_tensor_map(&b);
  }
  // At each stage's barrier.
  __device__ __forceinline__ int arrivals() const { return 1; }

  template <class Tile, class Params>
  __device__ __forceinline__ void produce(const MainloopSm90<Tile>& loop, const Params& p,
                                          int /*warpgroup*/, unsigned first,
                                          unsigned stride) const {
    if (threadIdx.x != 0) return;
    const TmaLoaderA<Tile> loader_a{&a, loop.cluster};
    auto produce_tiles = [&](const auto& loader_b) {
      typename MainloopSm90<Tile>::Cursor cursor;
      for (unsigned block = first; block < p.num_blocks; block += stride) {
        const TileCoord tile = tile_of_block(p.grid, block);
        loop.produce(loader_a, loader_b, stage_bytes, first_m<Tile>(tile),
                     first_n<Tile>(tile, loop.cluster), tile.k_begin, tile.k_end, cursor);
      }
      if (loop.cluster.ctas > 1) loop.drain(cursor);
    };
    if (b_once) {
      produce_tiles(TmaLoaderB<Tile, /*kHasPolicy=*/true>{&b, {}, evict_first_policy()});
    } else {
      produce_tiles(TmaLoaderB<Tile>{&b});
    }
  }
};

// The same, and a second warpgroup that rewrites B: turns it, splits it, or both.
struct RewrittenOperands : TmaOperands {
  static constexpr int kWarpgroups = 2;
  static constexpr int kRegisters = 56;  // 256 * 56 + 256 * 200 = 65536
  static constexpr int kConsumerRegisters = 200;

  template <class Tile, class Loop, class Params>
  __device__ __forceinline__ void produce(const Loop& loop, const Params& p, int warpgroup,
                                          unsigned first, unsigned stride) const {
    if (warpgroup == 0) {
      TmaOperands::template produce<Tile>(loop, p, warpgroup, first, stride);
    } else {
      int stages = 0;
      for (unsigned block = first; block < p.num_blocks; block += stride) {
        const TileCoord tile = tile_of_block(p.grid, block);
        stages += tile.k_end - tile.k_begin;
      }
      loop.rewrite_b(stages);
    }
  }
};

// The stages of a CTA in order, each with the first row of operand 0 (A) or 1 (B).
template <class Tile, int kOperand>
class StageWalk {
 public:
  __device__ __forceinline__ StageWalk(const TileGrid& grid, unsigned num_blocks)
      : grid_(grid), num_blocks_(num_blocks), block_(blockIdx.x) {
    enter();
  }
  __device__ __forceinline__ bool done() const { return block_ >= num_blocks_; }
  __device__ __forceinline__ int first() const { return first_; }
  __device__ __forceinline__ int k_tile() const { return k_tile_; }
  __device__ __forceinline__ void next() {
    if (++k_tile_ < k_end_) return;
    block_ += gridDim.x;
    if (!done()) enter();
  }

 private:
  __device__ __forceinline__ void enter() {
    const TileCoord tile = tile_of_block(grid_, block_);
    first_ = kOperand == 0 ? first_m<Tile>(tile) : first_n<Tile>(tile, {});
    k_tile_ = tile.k_begin;
    k_end_ = tile.k_end;
  }

  const TileGrid& grid_;
  unsigned num_blocks_;
  unsigned block_;
  int first_;
  int k_tile_;
  int k_end_;
};

// 16-bit operands at any multiple of 2 bytes: a warpgroup loads A, another B. One that TMA can load
// comes by TMA.
struct RealignedOperands {
  static constexpr int kWarpgroups = 2;
  static constexpr int kRegisters = 80;  // 256 * 80 + 256 * 176 = 65536
  static constexpr int kConsumerRegisters = 176;

  CUtensorMap map[2];  // if not `realigned`
  RealignedOperand operand[2];
  bool realigned[2];

  __device__ __forceinline__ void prefetch() const {
    for (int i = 0; i < 2; ++i) {
      if (!realigned[i]) prefetch_tensor_map(&map[i]);
    }
  }
  __device__ __forceinline__ int arrivals() const { return arrivals(0) + arrivals(1); }

  template <class Tile>
  __device__ __forceinline__ void produce(const MainloopSm90<Tile>& loop,
                                          const GemmSm90Params<RealignedOperands>& p, int warpgroup,
                                          unsigned, unsigned) const {
    if (warpgroup == 0) {
      produce_operand<Tile, Tile::kMajorA, 0>(loop, p, 0);
    } else {
      produce_operand<Tile, Tile::kMajorB, 1>(loop, p, Tile::kBytesA);
    }
  }

 private:
  __device__ __forceinline__ int arrivals(int i) const {
    return realigned[i] ? kRealigningWarps : 1;
  }

  // `offset`: of the operand within a stage.
  template <class Tile, Major kMajor, int kOperand>
  __device__ __forceinline__ void produce_operand(const MainloopSm90<Tile>& loop,
                                                  const GemmSm90Params<RealignedOperands>& p,
                                                  int offset) const {
    constexpr int kRows = RealigningLoader<kMajor>::kRows;
    static_assert(Tile::kBlkM == kRows && Tile::kBlkN == kRows && !Tile::kClusters);
    StageWalk<Tile, kOperand> walk(p.grid, p.num_blocks);
    if (realigned[kOperand]) {
      RealigningLoader<kMajor>(operand[kOperand]).produce(loop, walk, offset);
    } else if (threadIdx.x % 128 == 0) {
      const TmaLoader<Tile, kMajor, kRows> loader{&map[kOperand]};
      for (typename MainloopSm90<Tile>::Cursor cursor; !walk.done(); walk.next(), cursor.next()) {
        mbarrier_wait(loop.empty(cursor.stage), cursor.parity ^ 1);
        const uint32_t barrier = loop.full(cursor.stage);
        mbarrier_arrive_expect_tx(barrier, kRows * 128);
        loader.load(loop.stages + cursor.stage * Tile::kStageBytes + offset, walk.first(),
                    walk.k_tile(), barrier);
      }
    }
  }
};

enum GemmSm90Barrier { kStoreBarrier = 1, kTurnBarrier = 3 };  // of consumer 0; + 1 of consumer 1

template <class Tile>
using MainloopOf = std::conditional_t<
    Tile::kSplitsTf32, SplitTf32Mainloop<Tile>,
    std::conditional_t<Tile::kMnMajorTf32, MnMajorTf32Mainloop<Tile>, MainloopSm90<Tile>>>;

template <class Tile>
using EpilogueOf = std::conditional_t<Tile::kMnMajorTf32, TransposedEpilogue<Tile::kBlocks>,
                                      EpilogueSm90<typename Tile::Element>>;

template <class Tile, class Loading>
constexpr int gemm_sm90_threads() {
  return 128 * (Loading::kWarpgroups + Tile::kConsumers);
}

// A: (m, k), B: (n, k), each contiguous in its kMajor direction. D: (m, n) row-major, in fp32 or
// the operands' type, or with splits its fp32 parts (splits, m, n); if A is MN-major TF32, what is
// A and m here is B and n of D's owner. Grid: as many clusters (mostly of one CTA) as fit on the
// GPU; each takes every gridDim-th of their tiles in tile_of_block's order. The first warpgroup or
// two load, the last two multiply and store.
template <class Tile, class Loading>
__global__ void __launch_bounds__((gemm_sm90_threads<Tile, Loading>()), 1)
    gemm_sm90_kernel(const __grid_constant__ GemmSm90Params<Loading> p) {
  if constexpr (kHasSm90a) {
    extern __shared__ char smem[];
    using Loop = MainloopOf<Tile>;
    using Store = EpilogueOf<Tile>;
    // Swizzle patterns repeat every 1024 bytes; every CTA of the cluster rounds up alike.
    const uint32_t base = (smem_address(smem) + 1023) & ~1023u;
    const uint32_t buffers = base + Tile::kStages * Tile::kStageBytes;
    const ClusterPlace cluster = Tile::kClusters
                                     ? ClusterPlace{p.cluster, static_cast<int>(cluster_cta_rank())}
                                     : ClusterPlace{};
    const uint32_t ones = buffers + Tile::kConsumers * Store::kSmemBytes;
    const Loop loop{base, ones + (Tile::kRowSums ? kOnesBytes : 0), cluster};
    if (p.beside.next) let_next_kernel_start();

    if constexpr (Tile::kRowSums) {
      if (threadIdx.x < kOnesBytes / 16) write_ones<typename Tile::Element>(ones);
      __syncthreads();
    }
    if (threadIdx.x == 0) {
      p.operands.prefetch();
      if (p.output.use_tma) prefetch_tensor_map(&p.output.map);
      if (p.output.use_tma && p.output.preactivation != nullptr) {
        prefetch_tensor_map(&p.output.preactivation_map);
      }
      loop.init(p.operands.arrivals());
    }
    if (cluster.ctas > 1) {
      cluster_arrive_relaxed();
      cluster_wait();
    } else {
      __syncthreads();
    }

    // Not a variable: each side of the branch below is short of other registers.
    auto first_block = [&] { return blockIdx.x / static_cast<unsigned>(cluster.ctas); };
    const unsigned stride = gridDim.x / static_cast<unsigned>(cluster.ctas);

    const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
    if (warpgroup < Loading::kWarpgroups) {
      setmaxnreg_dec<Loading::kRegisters>();
      p.operands.template produce<Tile>(loop, p, warpgroup, first_block(), stride);
    } else {
      setmaxnreg_inc<Loading::kConsumerRegisters>();
      const int consumer = warpgroup - Loading::kWarpgroups;
      const int first_row = Tile::kPingPong ? 0 : consumer * Tile::kRows;
      Store store{buffers + consumer * Store::kSmemBytes, kStoreBarrier + consumer};
      typename Loop::Cursor cursor;
      typename Loop::Accumulator d;
      // Ping-pong: the mainloops take turns; consumer 0 has the first.
      int turn = 0;
      if (Tile::kPingPong && consumer == 1) named_barrier_arrive(kTurnBarrier, 256);
      for (unsigned block = first_block(); block < p.num_blocks; block += stride, turn ^= 1) {
        const TileCoord tile = tile_of_block(p.grid, block);
        const int k_tiles = tile.k_end - tile.k_begin;
        if (Tile::kPingPong && turn != consumer) {
          cursor.skip(k_tiles);
          continue;
        }
        const int col = first_col<Tile>(tile, cluster, first_row);
        // Before the mainloop, which hides the reads; behind it where row sums have the registers.
        constexpr bool kBiasBehind =
            Tile::kRowSums && Loading::kConsumerRegisters < kConsumerRegisters;
        decltype(Store::template load_bias<Tile::kRegs>(p.output, col)) bias;
        if constexpr (!kBiasBehind) bias = Store::template load_bias<Tile::kRegs>(p.output, col);
        if (Tile::kPingPong) named_barrier_sync(kTurnBarrier + consumer, 256);
        if constexpr (Tile::kRowSums) {
          const bool wanted = p.row_sums.sums != nullptr && first_n<Tile>(tile, cluster) == 0;
          RowSums<typename Tile::Element, Tile::kBlocks> sums(ones, wanted);
          loop.consume(d, k_tiles, first_row, cursor, sums);
          sums.store(p.row_sums, tile.split, first_m<Tile>(tile) + first_row);
        } else {
          loop.consume(d, k_tiles, first_row, cursor);
        }
        if (Tile::kPingPong && p.num_blocks - block > stride) {
          named_barrier_arrive(kTurnBarrier + 1 - consumer, 256);
        }
        if constexpr (kBiasBehind) bias = Store::template load_bias<Tile::kRegs>(p.output, col);
        if constexpr (Tile::kSplitsTf32) {
          const TileCoord at = tile_of_block(p.grid, derive_anew(static_cast<int>(block)));
          p.operands.template recompute<Tile>(d[0], first_m<Tile>(at) + first_row,
                                              first_n<Tile>(at, cluster), at.k_begin, at.k_end);
        }
        if constexpr (Tile::kMnMajorTf32) {
          // Anew: its mainloop has no registers for them.
          const TileCoord at = tile_of_block(p.grid, derive_anew(static_cast<int>(block)));
          store.store(d, bias, p.output, at.split, first_n<Tile>(at, cluster),
                      first_col<Tile>(at, cluster, first_row));
        } else {
#pragma unroll
          for (int i = 0; i < Tile::kBlocks; ++i) {
            store.store(d[i], bias, p.output, tile.split, first_m<Tile>(tile) + first_row + i * 64,
                        col);
          }
        }
      }
      store.finish();
    }
    if (p.beside.previous) outlast_previous_kernel();
  } else {
    __trap();  // GemmParams::sm90 was set where it may not be
  }
}

// ---- launch ----

template <class Loader>
CUtensorMap operand_map(const GemmParams& p, Major major, const void* pointer, int64_t rows,
                        int64_t stride_row, int64_t stride_k, int box_outer) {
  const bool tf32 = p.dtype == DType::kFloat32 && p.tf32;
  return major == Major::kK ? make_tensor_map({p.dtype, tf32, pointer, p.k, rows, stride_row,
                                               Loader::kBoxInner, box_outer})
                            : make_tensor_map({p.dtype, tf32, pointer, rows, p.k, stride_k,
                                               Loader::kBoxInner, box_outer});
}
template <class Tile>
CUtensorMap operand_map_a(const GemmParams& p, int box_outer = TmaLoaderA<Tile>::box_outer(1)) {
  return operand_map<TmaLoaderA<Tile>>(p, Tile::kMajorA, p.a, p.m, p.a_stride_m, p.a_stride_k,
                                       box_outer);
}
template <class Tile>
CUtensorMap operand_map_b(const GemmParams& p, int box_outer = TmaLoaderB<Tile>::box_outer(1)) {
  return operand_map<TmaLoaderB<Tile>>(p, Tile::kMajorB, p.b, p.n, p.b_stride_n, p.b_stride_k,
                                       box_outer);
}

// What lies outside of an operand TMA fills with zeros, more slowly than it loads: boxes have no
// more rows than a K-major operand of a single tile, but for whole swizzle patterns. What the rest
// of a stage holds reaches rows or columns of the accumulators that are outside of D.
template <class Loader>
int box_outer_of(Major major, int64_t rows) {
  const int box_outer = Loader::box_outer(1);
  return major == Major::kK
             ? static_cast<int>(std::min<int64_t>(box_outer, ceil_div<int64_t>(rows, 8) * 8))
             : box_outer;
}

// Weights of a few rows are read once. Smaller ones may still be there for the gradient.
constexpr int64_t kFewRows = 64;
constexpr int64_t kLargeWeights = int64_t{16} << 20;

// share: CTAs that load A together, each a part.
template <class Tile, class Loading>
Loading tma_operands(const GemmParams& p, int share = 1) {
  using LoaderA = TmaLoaderA<Tile>;
  using LoaderB = TmaLoaderB<Tile>;
  const int box_a =
      share > 1 ? LoaderA::box_outer(share) : box_outer_of<LoaderA>(Tile::kMajorA, p.m);
  const int box_b = box_outer_of<LoaderB>(Tile::kMajorB, p.n);
  Loading operands{};
  operands.a = operand_map_a<Tile>(p, box_a);
  operands.b = operand_map_b<Tile>(p, box_b);
  const int missing_rows = LoaderA::box_outer(1) - box_a * share + LoaderB::box_outer(1) - box_b;
  operands.stage_bytes = Tile::kBytesA + Tile::kBytesB - missing_rows * 128;
  operands.b_once = p.m <= kFewRows && p.n * p.k * sizeof(typename Tile::Element) >= kLargeWeights;
  return operands;
}

inline RealignedOperand realigned_operand(Major major, const void* pointer, int64_t extent,
                                          int64_t stride, int64_t k, int64_t stride_k) {
  const bool along_k = major == Major::kK;
  const int64_t rows = along_k ? extent : k;
  const int64_t cols = along_k ? k : extent;
  const int64_t pitch = (along_k ? stride : stride_k) * 2;
  return {static_cast<const char*>(pointer), pitch, (rows - 1) * pitch + cols * 2,
          static_cast<int>(rows), static_cast<int>(cols)};
}
template <class Tile>
RealignedOperands realigned_operands(const GemmParams& p, const GemmConfig& config) {
  RealignedOperands operands{};
  operands.operand[0] = realigned_operand(Tile::kMajorA, p.a, p.m, p.a_stride_m, p.k, p.a_stride_k);
  operands.operand[1] = realigned_operand(Tile::kMajorB, p.b, p.n, p.b_stride_n, p.k, p.b_stride_k);
  operands.realigned[0] = config.a_realigned;
  operands.realigned[1] = config.b_realigned;
  if (!config.a_realigned) operands.map[0] = operand_map_a<Tile>(p);
  if (!config.b_realigned) operands.map[1] = operand_map_b<Tile>(p);
  return operands;
}

template <class Tile, class Loading>
void launch_gemm_sm90_kernel(const GemmParams& p, const GemmConfig& config, const Loading& operands,
                             cudaStream_t stream) {
  using T = typename Tile::Element;
  constexpr int kSmemBytes = 1024 + MainloopOf<Tile>::kSmemBytes +
                             Tile::kConsumers * EpilogueOf<Tile>::kSmemBytes +
                             (Tile::kRowSums ? kOnesBytes : 0);
  static_assert(kSmemBytes <= 227 * 1024, "a CTA's shared memory on sm_90");
  GemmSm90Params<Loading> params{};
  params.operands = operands;
  constexpr bool kSwapped = Tile::kMnMajorTf32;
  params.cluster = Tile::kClusters ? config.cluster : 1;
  params.grid = make_tile_grid(kSwapped ? p.n : p.m, kSwapped ? p.m : p.n, p.k, Tile::kBlkM,
                               Tile::kBlkN * params.cluster, Tile::kBlkK, config.splits);
  if (params.grid.num_blocks() > kMaxGridX) {
    throw std::runtime_error("warpwright: linear: more than 2^31 output tiles");
  }
  params.num_blocks = static_cast<unsigned>(params.grid.num_blocks());
  OutputSm90& output = params.output;
  const bool split = config.splits > 1;
  output.fp32 = sizeof(T) == 4 || split || p.accum_d;
  output.accumulate = !split && p.accumulate;
  output.d = split ? p.workspace : p.d;
  output.preactivation = split ? nullptr : p.preactivation;
  output.bias = split ? nullptr : p.bias;
  output.bias_pairs =
      p.n % 2 == 0 && reinterpret_cast<uintptr_t>(output.bias) % (2 * sizeof(T)) == 0;
  output.activation = split ? Activation::kNone : p.activation;
  output.m = static_cast<int>(p.m);
  output.n = static_cast<int>(p.n);
  output.pitch = split ? p.n : d_pitch(p);
  const auto address =
      reinterpret_cast<uintptr_t>(output.d) | reinterpret_cast<uintptr_t>(output.preactivation);
  output.pairs = (p.n | output.pitch) % 2 == 0 && address % (output.fp32 ? 8 : 4) == 0;
  output.use_tma = !output.fp32 && output.pitch * sizeof(T) % 16 == 0 && address % 16 == 0;
  if (output.use_tma) {
    auto map = [&](void* matrix) {
      return make_tensor_map({p.dtype, false, matrix, p.n, p.m, output.pitch, 64, 64});
    };
    output.map = map(output.d);
    if (output.preactivation != nullptr) output.preactivation_map = map(output.preactivation);
  }

  if (p.row_sums != nullptr) {
    params.row_sums = {split ? row_sum_parts<float>(p, config.splits) : p.row_sums, split,
                       static_cast<int>(p.m)};
  }
  params.beside = {p.beside.next && !split, p.beside.previous};

  const int64_t clusters = std::min<int64_t>(
      params.grid.num_blocks(), clusters_at_once(params.cluster, current_device_info()));
  launch_beside(p.beside.previous, gemm_sm90_kernel<Tile, Loading>,
                dim3(static_cast<unsigned>(clusters * params.cluster)),
                dim3(gemm_sm90_threads<Tile, Loading>()), params.cluster, kSmemBytes, stream,
                params);
  if (split) launch_split_k_reduce<T>(p, config.splits, stream);
}

template <class Tile>
void launch_gemm_sm90_tile(const GemmParams& p, const GemmConfig& config, cudaStream_t stream) {
  const int share = Tile::kClusters ? config.cluster : 1;
  launch_gemm_sm90_kernel<Tile>(p, config, tma_operands<Tile, TmaOperands>(p, share), stream);
}

// Of D^T = B A^T, for 32-bit operands of which B, at least, is n-major.
inline GemmParams swapped_operands(GemmParams p) {
  std::swap(p.m, p.n);
  std::swap(p.a, p.b);
  std::swap(p.a_stride_m, p.b_stride_n);
  std::swap(p.a_stride_k, p.b_stride_k);
  return p;
}

template <class Tile>
void launch_swapped_gemm_sm90_tile(const GemmParams& p, const GemmConfig& config,
                                   cudaStream_t stream) {
  using Loading = std::conditional_t<Tile::kMajorB == Major::kMN, RewrittenOperands, TmaOperands>;
  launch_gemm_sm90_kernel<Tile>(p, config, tma_operands<Tile, Loading>(swapped_operands(p)),
                                stream);
}

template <class T, GemmTile kTile, Major kMajorA, Major kMajorB>
using Sm90TileOf = TileSm90<T, sm90_tile_shape(kTile).blk_m, sm90_tile_shape(kTile).blk_n,
                            sm90_tile_shape(kTile).stages, sm90_tile_shape(kTile).ping_pong,
                            sm90_tile_shape(kTile).clusters, kMajorA, kMajorB>;

// kMajorA: of linear's A, which comes second here.
template <GemmTile kTile, Major kMajorA>
constexpr Sm90TileShape kSwappedShape =
    sm90_tile_shape(kTile, kMajorA == Major::kK ? Sm90Operands::kSwapped : Sm90Operands::kTurned);
template <GemmTile kTile, Major kMajorA>
using SwappedTileOf =
    TileSm90<float, kSwappedShape<kTile, kMajorA>.blk_n, kSwappedShape<kTile, kMajorA>.blk_m,
             kSwappedShape<kTile, kMajorA>.stages, kSwappedShape<kTile, kMajorA>.ping_pong,
             /*kClusters=*/false, Major::kMN, kMajorA>;

template <class T, Major kMajorA, Major kMajorB>
using RealignedTileOf = TileSm90<T, kRealignedTile.blk_m, kRealignedTile.blk_n,
                                 kRealignedTile.stages, kRealignedTile.ping_pong,
                                 /*kClusters=*/false, kMajorA, kMajorB>;

template <class T>
void launch_gemm_sm90_type(const GemmParams& p, const GemmConfig& config, cudaStream_t stream) {
  auto launch_tile = [&]<GemmTile kTile, Major kMajorA, Major kMajorB>() {
    launch_gemm_sm90_tile<Sm90TileOf<T, kTile, kMajorA, kMajorB>>(p, config, stream);
  };
  auto for_tile = [&]<Major kMajorA, Major kMajorB>() {
    if constexpr (sizeof(T) == 2) {
      if (config.a_realigned || config.b_realigned) {
        using Tile = RealignedTileOf<T, kMajorA, kMajorB>;
        return launch_gemm_sm90_kernel<Tile>(p, config, realigned_operands<Tile>(p, config),
                                             stream);
      }
    }
    switch (config.tile) {
      case GemmTile::kLarge:
        return launch_tile.template operator()<GemmTile::kLarge, kMajorA, kMajorB>();
      case GemmTile::kMedium:
        return launch_tile.template operator()<GemmTile::kMedium, kMajorA, kMajorB>();
      case GemmTile::kSmall:
        return launch_tile.template operator()<GemmTile::kSmall, kMajorA, kMajorB>();
      case GemmTile::kWide:
        if constexpr (sizeof(T) == 4) {
          return launch_tile.template operator()<GemmTile::kWide, kMajorA, kMajorB>();
        }
    }
  };
  if constexpr (sizeof(T) == 4) {
    if (config.b_k_major) return for_tile.template operator()<Major::kK, Major::kK>();
    for_bool(config.a_k_major, [&]<bool kAK>() {
      constexpr Major kMajorA = kAK ? Major::kK : Major::kMN;
      auto launch = [&]<GemmTile kTile>() {
        launch_swapped_gemm_sm90_tile<SwappedTileOf<kTile, kMajorA>>(p, config, stream);
      };
      config.tile == GemmTile::kLarge ? launch.template operator()<GemmTile::kLarge>()
                                      : launch.template operator()<GemmTile::kMedium>();
    });
  } else {
    for_bool(config.a_k_major, [&]<bool kAK>() {
      for_bool(config.b_k_major, [&]<bool kBK>() {
        for_tile.template operator()<kAK ? Major::kK : Major::kMN, kBK ? Major::kK : Major::kMN>();
      });
    });
  }
}

}  // namespace warpwright
