// The matrix product on the sm_90a mainloop: a persistent kernel with two extension points. The
// Loading brings the operands (contract and example: operands_sm90.cuh). The Store takes a
// warpgroup's accumulators to D. A Store has
//   using Output = ...;               // the kernel's parameter, with prefetch() of its tensor maps
//   static constexpr int kSmemBytes;  // per warpgroup, at a multiple of 1024
//   Store{shared, barrier};           // its shared memory and a named barrier
//   template <int kRegs> auto load_bias(const Output&, int col) const;   // before the mainloop
//   void store(float (&d)[kRegs], const Bias&, const Output&, int64_t split, int row, int col);
//   void finish();                    // its stores have read shared memory; may take the Output
//   static void order(TileGrid&);     // optional, on the host: another order of tiles
//   void begin();                     // optional: its barriers, once
//   void prefetch(const Output&, int row, int col);   // optional: loads, before a tile's mainloop
// store() gets 64 rows of D from `row` and kRegs * 2 columns from `col`, in wgmma's order
// (accumulator_row(), accumulator_col()). A fused epilogue is a Store that changes the accumulators
// before it stores them. For example D = min(A B^T, 6) + bias:
//
//   template <class T>
//   struct ClampingEpilogue : EpilogueSm90<T> {
//     template <int kRegs, class Bias>
//     __device__ void store(float (&d)[kRegs], const Bias& bias, const OutputSm90& output,
//                           int64_t split, int row, int col) {
//       for (int i = 0; i < kRegs; ++i) d[i] = fminf(d[i], 6.0f);
//       EpilogueSm90<T>::store(d, bias, output, split, row, col);
//     }
//   };
//   gemm_sm90_kernel<Tile, TmaOperands, ClampingEpilogue<T>>
#pragma once

#include <type_traits>

#include "device/dependent_launch.cuh"
#include "device/math.cuh"
#include "device/sm90/arch.cuh"
#include "gemm/operands_sm90.cuh"
#include "gemm/params.h"
#include "tile/epilogue_sm90.cuh"
#include "tile/scheduler.cuh"

namespace warpwright {

template <class Loading, class Output = OutputSm90>
struct GemmSm90Params {
  Loading operands;
  Output output;
  TileGrid grid;           // of clusters: its tiles are kBlkM by cluster * kBlkN
  unsigned num_blocks;     // of the grid
  int cluster;             // CTAs, if Tile::kClusters
  RowSumsOutput row_sums;  // if Tile::kRowSums
  Overlap overlap;
};

// Of consumer 0; + 1 of consumer 1. Only two consumers take turns.
enum GemmSm90Barrier { kStoreBarrier = 1, kTurnBarrier = 3 };

template <class Tile>
using MainloopOf = std::conditional_t<
    Tile::kSplitsTf32, SplitTf32Mainloop<Tile>,
    std::conditional_t<Tile::kMnMajorTf32, MnMajorTf32Mainloop<Tile>, MainloopSm90<Tile>>>;

template <class Tile, class Loading>
constexpr int kLoadingRegisters = Tile::kConsumers == 3 ? kProducerRegistersOf3
                                  : Tile::kTight        ? kProducerRegistersTight
                                                        : Loading::kRegisters;
template <class Tile, class Loading>
constexpr int kMultiplyingRegisters = Tile::kConsumers == 3 ? kConsumerRegistersOf3
                                      : Tile::kTight        ? kConsumerRegistersTight
                                                            : Loading::kConsumerRegisters;

// Whether the loops over a tile's chunks and blocks of rows are loops. With a third warpgroup of
// either kind no register is left for them.
template <class Tile, class Loading>
constexpr bool kRolls = kMultiplyingRegisters<Tile, Loading> >= kConsumerRegisters;

template <class Tile, class Loading>
using EpilogueOf = std::conditional_t<
    Tile::kMnMajorTf32, TransposedEpilogue<Tile::kBlocks>,
    EpilogueSm90<typename Tile::Element, Tile::kStoreBuffers, Tile::kTight, kRolls<Tile, Loading>>>;

// Whether the Store is one that may take EpilogueSm90::store_boxes(). Tight tiles have no registers
// for it.
template <class Store>
constexpr bool kHasShortEpilogue = false;
template <class T, int kBuffers, bool kRolled>
constexpr bool kHasShortEpilogue<EpilogueSm90<T, kBuffers, /*kTight=*/false, kRolled>> =
    sizeof(T) == 2;

template <class Tile, class Loading>
constexpr int gemm_sm90_threads() {
  return 128 * (Loading::kWarpgroups + Tile::kConsumers);
}

// All threads of the CTA call it before the first stage. It includes a barrier of the cluster.
template <class Tile, class Loop, class Params>
__device__ __forceinline__ void set_up(const Loop& loop, const Params& p, uint32_t ones) {
  if constexpr (Tile::kRowSums) {
    if (threadIdx.x < kOnesBytes / 16) write_ones<typename Tile::Element>(ones);
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    p.operands.prefetch();
    p.output.prefetch();
    loop.init(p.operands.arrivals());
  }
  if (loop.cluster.ctas > 1) {
    cluster_arrive_relaxed();
    cluster_wait();
  } else {
    __syncthreads();
  }
}

template <class Store, class Output>
__device__ __forceinline__ void prefetch(Store& store, const Output& output, int row, int col) {
  if constexpr (requires { store.prefetch(output, row, col); }) store.prefetch(output, row, col);
}

// Calls f(values, i) for each block of 64 rows. In a loop, as EpilogueSm90::for_chunks(): the
// second block moves to the first one.
template <bool kRolled, class V, int kBlocks, int kRegs, class F>
__device__ __forceinline__ void for_blocks(V (&d)[kBlocks][kRegs], F&& f) {
  if constexpr (kRolled && kBlocks == 2) {
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      f(d[0], i);
#pragma unroll
      for (int r = 0; r < kRegs; ++r) d[0][r] = d[1][r];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) f(d[i], i);
  }
}

// A consumer's part of the tile `at`, from row first_row of the tile and column `col` of D.
template <class Tile, class Loading, class Store, class Accumulator, class Bias, class Output>
__device__ __forceinline__ void store_tile(Store& store, Accumulator& d, const Bias& bias,
                                           const Output& output, const TileCoord& at,
                                           ClusterPlace cluster, int first_row, int col,
                                           bool rounds_tiles) {
  if constexpr (Tile::kMnMajorTf32) {
    store.store(d, bias, output, at.split, first_n<Tile>(at, cluster),
                first_col<Tile>(at, cluster, first_row));
  } else if (rounds_tiles) {
    if constexpr (kHasShortEpilogue<Store>) {
      store.store_boxes(d, output, first_m<Tile>(at) + first_row, col);
    }
  } else {
    for_blocks<kRolls<Tile, Loading>>(d, [&](auto& values, int i) {
      store.store(values, bias, output, at.split, first_m<Tile>(at) + first_row + i * 64,
                  Tile::kTight ? first_col<Tile>(at, cluster, first_row) : col);
    });
  }
}

// A: (m, k), B: (n, k), each contiguous in its kMajor direction. D: (m, n) row-major, in fp32 or
// the operands' type. With splits D is its fp32 parts (splits, m, n). If A is MN-major and has 32
// bits, A and m are B and n of GemmParams.
// Grid: as many clusters (mostly of one CTA) as fit on the GPU. Each takes every gridDim-th of
// their tiles in tile_of_block's order. The first one or two warpgroups load; the last two multiply
// and store.
template <class Tile, class Loading, class Store = EpilogueOf<Tile, Loading>>
__global__ void __launch_bounds__((gemm_sm90_threads<Tile, Loading>()), 1)
    gemm_sm90_kernel(const __grid_constant__ GemmSm90Params<Loading, typename Store::Output> p) {
  if constexpr (kHasSm90a) {
    extern __shared__ char smem[];
    using Loop = MainloopOf<Tile>;
    // Swizzle patterns repeat every 1024 bytes. Every CTA of the cluster rounds up alike.
    const uint32_t base = (smem_address(smem) + 1023) & ~1023u;
    const uint32_t buffers = base + Tile::kStages * Tile::kStageBytes;
    const ClusterPlace cluster = Tile::kClusters
                                     ? ClusterPlace{p.cluster, static_cast<int>(cluster_cta_rank())}
                                     : ClusterPlace{};
    const uint32_t ones = buffers + Tile::kConsumers * Store::kSmemBytes;
    const Loop loop{base, ones + (Tile::kRowSums ? kOnesBytes : 0), cluster};
    if (p.overlap.next) let_next_kernel_start();

    set_up<Tile>(loop, p, ones);

    // A function, not a variable: each side of the branch below needs the register.
    auto first_block = [&] { return blockIdx.x / static_cast<unsigned>(cluster.ctas); };
    const unsigned stride = gridDim.x / static_cast<unsigned>(cluster.ctas);

    const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
    if (warpgroup < Loading::kWarpgroups) {
      setmaxnreg_dec<kLoadingRegisters<Tile, Loading>>();
      p.operands.template produce<Tile>(loop, p, warpgroup, first_block(), stride);
    } else {
      setmaxnreg_inc<kMultiplyingRegisters<Tile, Loading>>();
      const int consumer = warpgroup - Loading::kWarpgroups;
      const int first_row = Tile::kPingPong ? 0 : consumer * Tile::kRows;
      Store store{buffers + consumer * Store::kSmemBytes, kStoreBarrier + consumer};
      if constexpr (requires { store.begin(); }) store.begin();
      typename Loop::Cursor cursor;
      typename Loop::Accumulator d;
      bool rounds_tiles = false;
      if constexpr (kHasShortEpilogue<Store>) rounds_tiles = p.output.only_rounds;
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
        // Recomputed after a mainloop that leaves no registers to keep them.
        auto coordinates = [&] {
          constexpr bool kRecomputes = Tile::kMnMajorTf32 || Tile::kTight;
          return kRecomputes ? tile_of_block(p.grid, derive_anew(static_cast<int>(block))) : tile;
        };
        const int col = first_col<Tile>(tile, cluster, first_row);
        // Read before the mainloop, which hides the latency. If row sums take the registers, it is
        // read after the mainloop.
        constexpr bool kLateBias =
            Tile::kRowSums && kMultiplyingRegisters<Tile, Loading> < kConsumerRegisters;
        decltype(Store::template load_bias<Tile::kRegs>(p.output, col)) bias;
        if constexpr (!kLateBias) bias = Store::template load_bias<Tile::kRegs>(p.output, col);
        prefetch(store, p.output, first_m<Tile>(tile) + first_row, col);
        if (Tile::kPingPong) named_barrier_sync(kTurnBarrier + consumer, 256);
        if constexpr (Tile::kRowSums) {
          const int tile_n = tile.n * cluster.ctas + cluster.rank;
          RowSums<typename Tile::Element, Tile::kBlocks> sums(ones, p.row_sums, tile_n);
          loop.consume(d, k_tiles, first_row, cursor, sums);
          const TileCoord at = coordinates();
          sums.store(p.row_sums, at.split, at.n * cluster.ctas + cluster.rank,
                     first_m<Tile>(at) + first_row);
        } else {
          loop.consume(d, k_tiles, first_row, cursor);
        }
        if (Tile::kPingPong && p.num_blocks - block > stride) {
          named_barrier_arrive(kTurnBarrier + 1 - consumer, 256);
        }
        if constexpr (kLateBias) bias = Store::template load_bias<Tile::kRegs>(p.output, col);
        if constexpr (Tile::kSplitsTf32) {
          const TileCoord at = tile_of_block(p.grid, derive_anew(static_cast<int>(block)));
          p.operands.template recompute<Tile>(d[0], first_m<Tile>(at) + first_row,
                                              first_n<Tile>(at, cluster), at.k_begin, at.k_end);
        }
        store_tile<Tile, Loading>(store, d, bias, p.output, coordinates(), cluster, first_row, col,
                                  rounds_tiles);
      }
      if constexpr (requires { store.finish(p.output); }) {
        store.finish(p.output);
      } else {
        store.finish();
      }
    }
    if (p.overlap.previous) outlast_previous_kernel();
  } else {
    __trap();  // GemmParams::sm90 was set on a GPU without these kernels
  }
}

}  // namespace warpwright
