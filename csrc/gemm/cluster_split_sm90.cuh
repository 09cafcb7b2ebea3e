// The matrix product on sm_90a for few output tiles and a long k: the CTAs of a cluster each take a
// part of one tile's k, and add the parts through distributed shared memory.
//
//   mainloop    CTA `rank` multiplies the part of k with its number, as in kernel_sm90.cuh
//   write       its fp32 accumulators go to its ring, which is free by then
//   -- cluster barrier --
//   add, store  units of 64 x 64 are dealt out to the CTAs. The sum of a unit's parts, in the order
//               of the parts, goes through the ordinary epilogue, once.
//   -- cluster barrier --   a CTA's shared memory outlives all reads of it
//
// D has no parts in memory, and no second kernel adds them. Bound: the mainloop, then the exchange.
// Each SM writes its part once and reads as many bytes, most of them from other SMs: 128 KB each
// for 128 x 256.
#pragma once

#include <iterator>
#include <stdexcept>
#include <utility>

#include "common/switch.h"
#include "device/sm90/cluster.cuh"
#include "gemm/kernel_sm90.cuh"
#include "gemm/launch.h"
#include "gemm/sm90.cuh"

namespace warpwright {

// Named barrier of all consumers, after those of kernel_sm90.cuh.
constexpr int kRingBarrier = 5;

// The accumulators of a CTA in its ring, as units of 64 x 64: unit b * kChunks + c has the rows
// from b * 64 and the columns from c * 64. A unit lies in the order of its registers: four numbers
// of each thread, then four more of each. So all accesses are whole 16-byte vectors of a warp in
// one line, without bank conflicts.
template <class Tile>
struct PartExchange {
  static constexpr int kChunks = Tile::kBlkN / 64;
  static constexpr int kUnits = Tile::kBlkM / 64 * kChunks;
  static constexpr int kUnitBytes = 64 * 64 * 4;
  static constexpr int kVectorBytes = 128 * 16;  // one vector of each thread
  static constexpr int kVectors = kUnitBytes / kVectorBytes;
  static_assert(kUnits * kUnitBytes <= Tile::kStages * Tile::kStageBytes, "the ring holds a part");

  uint32_t shared;  // the ring

  __device__ __forceinline__ uint32_t address(int unit) const {
    return shared + unit * kUnitBytes + static_cast<uint32_t>(threadIdx.x % 128) * 16;
  }

  // A warpgroup calls it for 64 rows of the tile.
  __device__ __forceinline__ void write(const float (&d)[Tile::kRegs], int first_row) const {
    const uint32_t first = address(first_row / 64 * kChunks);
#pragma unroll
    for (int i = 0; i < Tile::kRegs; i += 4) {
      store_shared_u128(first + i / 4 * kVectorBytes,
                        make_uint4(__float_as_uint(d[i]), __float_as_uint(d[i + 1]),
                                   __float_as_uint(d[i + 2]), __float_as_uint(d[i + 3])));
    }
  }

  // The sum of all parts of a unit, always in the order of the CTAs' ranks.
  __device__ __forceinline__ void add(float (&sum)[32], int unit, int parts) const {
    const uint32_t own = address(unit);
#pragma unroll
    for (int i = 0; i < 32; ++i) sum[i] = 0.0f;
#pragma unroll 1
    for (int part = 0; part < parts; ++part) {
      const uint32_t source = map_to_cta(own, static_cast<uint32_t>(part));
      float4 values[kVectors];
#pragma unroll
      for (int j = 0; j < kVectors; ++j) values[j] = load_cluster_f32x4(source + j * kVectorBytes);
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        sum[j * 4] += values[j].x;
        sum[j * 4 + 1] += values[j].y;
        sum[j * 4 + 2] += values[j].z;
        sum[j * 4 + 3] += values[j].w;
      }
    }
  }
};

// It stores one unit at a time, so the bias is read per unit.
template <class Tile>
using ClusterSplitEpilogue =
    EpilogueSm90<typename Tile::Element, Tile::kStoreBuffers, /*kTight=*/true>;

// A warpgroup's rows over the CTA's part of k, to the ring.
template <class Tile>
__device__ __forceinline__ void multiply(const MainloopSm90<Tile>& loop,
                                         const PartExchange<Tile>& exchange,
                                         const GemmSm90Params<TmaOperands>& p,
                                         const TileCoord& tile, int first_row, uint32_t ones) {
  typename MainloopSm90<Tile>::Cursor cursor;
  typename MainloopSm90<Tile>::Accumulator d;
  const int k_tiles = tile.k_end - tile.k_begin;
  if constexpr (Tile::kRowSums) {
    RowSums<typename Tile::Element, Tile::kBlocks> sums(ones, p.row_sums, tile.n);
    loop.consume(d, k_tiles, first_row, cursor, sums);
    sums.store(p.row_sums, tile.split, tile.n, first_m<Tile>(tile) + first_row);
  } else {
    loop.consume(d, k_tiles, first_row, cursor);
  }
  // The other consumers too have waited for all stages, and their wgmma have read them.
  if constexpr (!Tile::kPingPong) named_barrier_sync(kRingBarrier, 128 * Tile::kConsumers);
#pragma unroll
  for (int i = 0; i < Tile::kBlocks; ++i) exchange.write(d[i], first_row + i * 64);
}

// A consumer warpgroup's share of a tile: its rows over the CTA's part of k, then its units over
// all of k. The rows of a ping-pong tile are one warpgroup's; the other one only adds.
template <class Tile>
__device__ __forceinline__ void multiply_and_add(const MainloopSm90<Tile>& loop,
                                                 const GemmSm90Params<TmaOperands>& p,
                                                 const TileCoord& tile, int consumer,
                                                 ClusterSplitEpilogue<Tile>& store, uint32_t ones) {
  using Exchange = PartExchange<Tile>;
  const Exchange exchange{loop.stages};
  // Each multiplies once or never. After a plain branch ptxas 13.0 serialises wgmma (C7515).
  constexpr int kMultiply = Tile::kPingPong ? 1 : Tile::kConsumers;
#pragma unroll 1
  for (int i = consumer; i < kMultiply; i += Tile::kConsumers) {
    multiply<Tile>(loop, exchange, p, tile, i * Tile::kRows, ones);
  }
  cluster_arrive();
  cluster_wait();
  // Units go to the CTAs in turn, and those of a CTA to its warpgroups in turn.
#pragma unroll 1
  for (int unit = tile.split + consumer * p.cluster; unit < Exchange::kUnits;
       unit += Tile::kConsumers * p.cluster) {
    const int row = first_m<Tile>(tile) + unit / Exchange::kChunks * 64;
    const int col = first_n<Tile>(tile, {}) + unit % Exchange::kChunks * 64;
    if (row >= p.output.m || col >= p.output.n) continue;
    float sum[32];
    exchange.add(sum, unit, p.cluster);
    store.store(sum, typename ClusterSplitEpilogue<Tile>::LateBias{}, p.output, /*split=*/0, row,
                col);
  }
  cluster_arrive();
  store.finish();
  cluster_wait();
}

// Operands and D as in gemm_sm90_kernel. p.cluster: CTAs of a cluster, which is also p.grid.splits.
// Grid: one cluster per tile. CTAs of a cluster are neighbours, so the tile's number is that of the
// cluster and the part's number the CTA's rank.
template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    gemm_cluster_split_sm90_kernel(const __grid_constant__ GemmSm90Params<TmaOperands> p) {
  if constexpr (kHasSm90a) {
    using Store = ClusterSplitEpilogue<Tile>;
    extern __shared__ char smem[];
    // Swizzle patterns repeat every 1024 bytes. Every CTA of the cluster rounds up alike.
    const uint32_t base = (smem_address(smem) + 1023) & ~1023u;
    const uint32_t buffers = base + Tile::kStages * Tile::kStageBytes;
    const uint32_t ones = buffers + Tile::kConsumers * Store::kSmemBytes;
    const MainloopSm90<Tile> loop{base, ones + (Tile::kRowSums ? kOnesBytes : 0)};
    if (p.overlap.next) let_next_kernel_start();

    set_up<Tile>(loop, p, ones);

    const unsigned tiles = p.num_blocks / static_cast<unsigned>(p.cluster);
    const unsigned block =
        cluster_cta_rank() * tiles + blockIdx.x / static_cast<unsigned>(p.cluster);
    const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
    if (warpgroup == 0) {
      setmaxnreg_dec<kLoadingRegisters<Tile, TmaOperands>>();
      p.operands.template produce<Tile>(loop, p, warpgroup, block, /*stride=*/p.num_blocks);
      // Takes part in the consumers' two barriers, and ends after them.
      __syncwarp();
      for (int i = 0; i < 2; ++i) {
        cluster_arrive_relaxed();
        cluster_wait();
      }
    } else {
      setmaxnreg_inc<kMultiplyingRegisters<Tile, TmaOperands>>();
      const int consumer = warpgroup - 1;
      Store store{buffers + consumer * Store::kSmemBytes, kStoreBarrier + consumer};
      multiply_and_add<Tile>(loop, p, tile_of_block(p.grid, block), consumer, store, ones);
    }
    if (p.overlap.previous) outlast_previous_kernel();
  } else {
    __trap();  // GemmParams::sm90 was set on a GPU without these kernels
  }
}

// ---- launch ----

template <class Tile>
void launch_cluster_split(const GemmParams& p, const GemmPlan& plan, void* workspace,
                          cudaStream_t stream) {
  using T = typename Tile::Element;
  constexpr int kSmemBytes = 1024 + MainloopSm90<Tile>::kSmemBytes +
                             Tile::kConsumers * ClusterSplitEpilogue<Tile>::kSmemBytes +
                             (Tile::kRowSums ? kOnesBytes : 0);
  static_assert(kSmemBytes <= 227 * 1024, "a CTA's shared memory on sm_90");
  GemmSm90Params<TmaOperands> params{};
  params.operands = tma_operands<Tile, TmaOperands>(p);
  params.output = sm90_output<T>(p, plan, workspace);
  params.grid = make_tile_grid(p.m, p.n, p.k, Tile::kBlkM, Tile::kBlkN, Tile::kBlkK, plan.splits);
  params.num_blocks = static_cast<unsigned>(params.grid.num_blocks());
  params.cluster = plan.splits;
  if (plan.sums_rows) {
    params.row_sums = {row_sum_parts<float>(p, plan, workspace), /*fp32=*/true,
                       static_cast<int>(p.m), plan.row_sum_shares};
  }
  params.overlap = {p.overlap.next && !plan.sums_rows, p.overlap.previous};
  launch_overlapping(p.overlap.previous, gemm_cluster_split_sm90_kernel<Tile>,
                     dim3(params.num_blocks), dim3(Tile::kThreads), params.cluster, kSmemBytes,
                     stream, params);
  if (plan.sums_rows) launch_add_row_sums<T>(p, plan, workspace, stream);
}

template <class T, Major kMajorA, Major kMajorB>
void launch_cluster_split_tiles(const GemmParams& p, const GemmPlan& plan, void* workspace,
                                cudaStream_t stream) {
  auto launches = [&]<GemmTile kTile>() {
    if constexpr (has_cluster_split_tile(kTile, kMajorA, kMajorB)) {
      if (plan.tile != kTile) return false;
      constexpr Sm90TileShape kShape = cluster_split_tile(kTile);
      using Tile = TileSm90<T, kShape.blk_m, kShape.blk_n, kShape.stages, kShape.ping_pong,
                            kShape.clusters, kMajorA, kMajorB>;
      launch_cluster_split<Tile>(p, plan, workspace, stream);
      return true;
    } else {
      return false;
    }
  };
  auto launches_one_of = [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
    return (launches.template operator()<kSm90Tiles[kIndex]>() || ...);
  };
  if (!launches_one_of(std::make_index_sequence<std::size(kSm90Tiles)>())) {
    throw std::logic_error("warpwright: matrix product: the plan names no tile of a cluster split");
  }
}

template <class T>
void launch_gemm_cluster_split(const GemmParams& p, const GemmPlan& plan, void* workspace,
                               cudaStream_t stream) {
  constexpr Major kK = Major::kK, kMN = Major::kMN;
  for_bool(p.a.major == kK, [&]<bool kAK>() {
    for_bool(p.b.major == kK, [&]<bool kBK>() {
      launch_cluster_split_tiles<T, kAK ? kK : kMN, kBK ? kK : kMN>(p, plan, workspace, stream);
    });
  });
}

}  // namespace warpwright
