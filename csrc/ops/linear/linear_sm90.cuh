// The matrix product on the sm_90a mainloop: tensor maps, the persistent kernel, its launch. Each
// linear_sm90_<type>.cu instantiates launch_gemm_sm90 for one element type.
#pragma once

#include "device/math.cuh"
#include "device/sm90/arch.cuh"
#include "host/launch_cluster.h"
#include "host/switch.h"
#include "host/tensor_map.h"
#include "ops/linear/linear_output.cuh"
#include "ops/linear/linear_sm90.h"
#include "tile/epilogue_sm90.cuh"
#include "tile/mainloop_sm90.cuh"
#include "tile/scheduler.cuh"

namespace warpwright {

struct GemmSm90Params {
  CUtensorMap a;
  CUtensorMap b;
  OutputSm90 output;
  TileGrid grid;        // of clusters: its tiles are kClusterM * kBlkM by kClusterN * kBlkN
  unsigned num_blocks;  // of the grid
};

enum GemmSm90Barrier { kStoreBarrier = 1, kTurnBarrier = 3 };  // of consumer 0; + 1 of consumer 1

// A: (m, k), B: (n, k), each contiguous in its kMajor direction. D: (m, n) row-major, in fp32 or
// the operands' type, or with splits its fp32 parts (splits, m, n). Grid: as many clusters as fit
// on the GPU; each takes every gridDim-th tile of tile_of_block's order. Warpgroup 0 loads, 1 and 2
// multiply and store.
template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    gemm_sm90_kernel(const __grid_constant__ GemmSm90Params p) {
  if constexpr (kHasSm90a) {
    extern __shared__ char smem[];
    using Loop = MainloopSm90<Tile>;
    using Store = EpilogueSm90<typename Tile::Element>;
    // Swizzle patterns repeat every 1024 bytes; every CTA of the cluster rounds up alike.
    const uint32_t base = (smem_address(smem) + 1023) & ~1023u;
    const uint32_t buffers = base + Tile::kStages * Tile::kStageBytes;
    const Loop loop{base, buffers + Tile::kConsumers * Store::kSmemBytes};

    const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
    const int rank = Tile::kCluster > 1 ? static_cast<int>(cluster_cta_rank()) : 0;
    if (threadIdx.x == 0) {
      prefetch_tensor_map(&p.a);
      prefetch_tensor_map(&p.b);
      if (p.output.use_tma) prefetch_tensor_map(&p.output.map);
      loop.init();
    }
    if constexpr (Tile::kCluster > 1) {
      cluster_arrive();
      cluster_wait();
    } else {
      __syncthreads();
    }

    const unsigned first = blockIdx.x / Tile::kCluster;
    const unsigned stride = gridDim.x / Tile::kCluster;
    typename Loop::Cursor cursor;
    auto first_m = [&](const TileCoord& tile) {
      return (tile.m * Tile::kClusterM + rank % Tile::kClusterM) * Tile::kBlkM;
    };
    auto first_n = [&](const TileCoord& tile) {
      return (tile.n * Tile::kClusterN + rank / Tile::kClusterM) * Tile::kBlkN;
    };

    if (warpgroup == 0) {
      setmaxnreg_dec<kProducerRegisters>();
      if (threadIdx.x == 0) {
        const TmaLoaderA<Tile> a{&p.a};
        const TmaLoaderB<Tile> b{&p.b};
        for (unsigned block = first; block < p.num_blocks; block += stride) {
          const TileCoord tile = tile_of_block(p.grid, block);
          loop.produce(a, b, first_m(tile), first_n(tile), tile.k_begin, tile.k_end, rank, cursor);
        }
      }
    } else {
      setmaxnreg_inc<kConsumerRegisters>();
      const int consumer = warpgroup - 1;
      const int first_row = Tile::kPingPong ? 0 : consumer * Tile::kRows;
      Store store{buffers + consumer * Store::kSmemBytes, kStoreBarrier + consumer};
      typename Loop::Accumulator d;
      // Ping-pong: the mainloops take turns; consumer 0 has the first.
      int turn = 0;
      if (Tile::kPingPong && consumer == 1) named_barrier_arrive(kTurnBarrier, 256);
      for (unsigned block = first; block < p.num_blocks; block += stride, turn ^= 1) {
        const TileCoord tile = tile_of_block(p.grid, block);
        const int k_tiles = tile.k_end - tile.k_begin;
        if (Tile::kPingPong && turn != consumer) {
          cursor.skip(k_tiles);
          continue;
        }
        const auto bias = Store::template load_bias<Tile::kRegs>(p.output, first_n(tile));
        if (Tile::kPingPong) named_barrier_sync(kTurnBarrier + consumer, 256);
        loop.consume(d, k_tiles, first_row, cursor);
        if (Tile::kPingPong && p.num_blocks - block > stride) {
          named_barrier_arrive(kTurnBarrier + 1 - consumer, 256);
        }
#pragma unroll
        for (int i = 0; i < Tile::kBlocks; ++i) {
          store.store(d[i], bias, p.output, tile.split, first_m(tile) + first_row + i * 64,
                      first_n(tile));
        }
      }
      store.finish();
    }
    // A CTA stays until nobody can signal its barriers any more.
    if constexpr (Tile::kCluster > 1) {
      __syncwarp();
      cluster_arrive();
      cluster_wait();
    }
  } else {
    __trap();  // GemmParams::sm90 was set where it may not be
  }
}

// raster_rows: rows of A that the CTAs of one wave share, for the sake of L2.
template <class Tile>
void launch_gemm_sm90_tile(const GemmParams& p, int splits, int num_sms, int raster_rows,
                           cudaStream_t stream) {
  using T = typename Tile::Element;
  using LoaderA = TmaLoaderA<Tile>;
  using LoaderB = TmaLoaderB<Tile>;
  constexpr bool kTf32 = sizeof(T) == 4;
  constexpr int kSmemBytes =
      1024 + MainloopSm90<Tile>::kSmemBytes + Tile::kConsumers * EpilogueSm90<T>::kSmemBytes;
  static_assert(kSmemBytes <= 227 * 1024, "a CTA's shared memory on sm_90");
  auto operand_map = [&](Major major, const void* pointer, int64_t rows, int64_t stride_row,
                         int64_t stride_k, int box_inner, int box_outer) {
    return major == Major::kK ? make_tensor_map({p.dtype, kTf32, pointer, p.k, rows, stride_row,
                                                 box_inner, box_outer})
                              : make_tensor_map({p.dtype, kTf32, pointer, rows, p.k, stride_k,
                                                 box_inner, box_outer});
  };
  GemmSm90Params params{};
  params.a = operand_map(Tile::kMajorA, p.a, p.m, p.a_stride_m, p.a_stride_k, LoaderA::kBoxInner,
                         LoaderA::kBoxOuter);
  params.b = operand_map(Tile::kMajorB, p.b, p.n, p.b_stride_n, p.b_stride_k, LoaderB::kBoxInner,
                         LoaderB::kBoxOuter);
  params.grid = make_tile_grid(p.m, p.n, p.k, Tile::kBlkM * Tile::kClusterM,
                               Tile::kBlkN * Tile::kClusterN, Tile::kBlkK, splits);
  params.grid.group_m =
      std::clamp(raster_rows / (Tile::kBlkM * Tile::kClusterM), 1, params.grid.tiles_m);
  if (params.grid.num_blocks() > kMaxGridX) {
    throw std::runtime_error("warpwright: linear: more than 2^31 output tiles");
  }
  params.num_blocks = static_cast<unsigned>(params.grid.num_blocks());
  OutputSm90& output = params.output;
  const bool split = splits > 1;
  output.fp32 = kTf32 || split || p.accum_d;
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
    output.map = make_tensor_map({p.dtype, false, output.d, p.n, p.m, output.pitch, 64, 64});
  }

  const int64_t clusters = std::min<int64_t>(params.grid.num_blocks(), num_sms / Tile::kCluster);
  launch_clusters(gemm_sm90_kernel<Tile>, dim3(static_cast<unsigned>(clusters * Tile::kCluster)),
                  dim3(Tile::kThreads), Tile::kCluster, kSmemBytes, stream, params);
  if (split) launch_split_k_reduce<T>(p, splits, stream);
}

template <class T, GemmTile kTile, Major kMajorA, Major kMajorB>
using Sm90TileOf = TileSm90<T, sm90_tile_shape(kTile).blk_m, sm90_tile_shape(kTile).blk_n,
                            sm90_tile_shape(kTile).stages, sm90_tile_shape(kTile).ping_pong,
                            /*kClusterM=*/1, /*kClusterN=*/1, kMajorA, kMajorB>;

template <class T>
void launch_gemm_sm90_type(const GemmParams& p, const GemmConfig& config, cudaStream_t stream) {
  const int num_sms = current_device_info().num_sms;
  auto launch_tile = [&]<GemmTile kTile, Major kMajorA, Major kMajorB>() {
    launch_gemm_sm90_tile<Sm90TileOf<T, kTile, kMajorA, kMajorB>>(p, config.splits, num_sms,
                                                                  kRasterRows, stream);
  };
  auto for_tile = [&]<Major kMajorA, Major kMajorB>() {
    switch (config.tile) {
      case GemmTile::kLarge:
        return launch_tile.template operator()<GemmTile::kLarge, kMajorA, kMajorB>();
      case GemmTile::kMedium:
        return launch_tile.template operator()<GemmTile::kMedium, kMajorA, kMajorB>();
      case GemmTile::kSmall:
        return launch_tile.template operator()<GemmTile::kSmall, kMajorA, kMajorB>();
    }
  };
  if constexpr (sizeof(T) == 4) {
    for_tile.template operator()<Major::kK, Major::kK>();
  } else {
    for_bool(config.a_k_major, [&]<bool kAK>() {
      for_bool(config.b_k_major, [&]<bool kBK>() {
        for_tile.template operator()<kAK ? Major::kK : Major::kMN, kBK ? Major::kK : Major::kMN>();
      });
    });
  }
}

}  // namespace warpwright
