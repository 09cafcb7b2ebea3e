// Cluster: blocks on two SMs take two tiles, one beside the other, and load one A between them.
// Why: each loads half of A's rows and TMA writes them to both (multicast). A block then asks L2
// for 64 + 256 rows a k tile in place of 128 + 256: five sixths of the bytes.
// Bound: still the tensor cores; it pays only where L2 held them up. The loops are rung 8's, now
// the shipped ones of tile/mainloop_sm90.cuh, where a stage is free once the warps of both blocks
// say so.
#include "host/launch_cluster.h"
#include "host/tensor_map.h"
#include "ladder.cuh"
#include "tile/mainloop_sm90.cuh"

namespace ladder {
namespace {

using namespace warpwright;  // TileSm90, MainloopSm90, TmaLoader*

constexpr int kCluster = 2;
using Tile = TileSm90<bf16, 128, 256, /*kStages=*/4, /*kPingPong=*/false, /*kClusters=*/true,
                      Major::kK, Major::kK>;
using Loop = MainloopSm90<Tile>;
constexpr int kSmemBytes = 1024 + Loop::kSmemBytes;  // ring and barriers

// A (m, k), B (n, k), D (m, n), row-major; map_a: boxes of 64 (k) x 64 rows, map_b: of 256 rows.
// Grid: clusters of two blocks, each takes every gridDim / 2-th pair of tiles of D, 512 columns in
// all.
__global__ void __launch_bounds__(Tile::kThreads, 1)
    cluster_kernel(const __grid_constant__ CUtensorMap map_a,
                   const __grid_constant__ CUtensorMap map_b, Gemm g) {
  extern __shared__ char smem[];
  // Both blocks round up alike: a multicast writes to the same place in each.
  const uint32_t ring = (smem_address(smem) + 1023) & ~1023u;
  const ClusterPlace cluster{kCluster, static_cast<int>(cluster_cta_rank())};
  const Loop loop{ring, ring + Tile::kStages * Tile::kStageBytes, cluster};
  if (threadIdx.x == 0) loop.init();
  cluster_arrive_relaxed();  // nobody writes to a neighbour whose barriers are not there yet
  cluster_wait();

  const int pairs_n = g.n / (kCluster * Tile::kBlkN);
  const int pairs = g.m / Tile::kBlkM * pairs_n;
  const int k_tiles = g.k / Tile::kBlkK;
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  auto tile_row = [&](int pair) { return pair / pairs_n * Tile::kBlkM; };
  auto tile_col = [&](int pair) {
    return (pair % pairs_n * kCluster + cluster.rank) * Tile::kBlkN;
  };
  Loop::Cursor cursor;
  if (warpgroup == 0) {
    setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x == 0) {
      const TmaLoaderA<Tile> a{&map_a, cluster};  // half of 128 rows, to both blocks
      const TmaLoaderB<Tile> b{&map_b};           // this block's 256 rows
      for (int pair = blockIdx.x / kCluster; pair < pairs; pair += gridDim.x / kCluster) {
        loop.produce(a, b, Tile::kStageBytes, tile_row(pair), tile_col(pair), 0, k_tiles, cursor);
      }
      // A block stays until its neighbour can no longer signal its barriers or write to its ring.
      loop.drain(cursor);
    }
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    const int thread = threadIdx.x % 128;
    const int first_row = (warpgroup - 1) * Tile::kRows;
    Loop::Accumulator sum;
    for (int pair = blockIdx.x / kCluster; pair < pairs; pair += gridDim.x / kCluster) {
      loop.consume(sum, k_tiles, first_row, cursor);
      const int row = tile_row(pair) + first_row + thread / 32 * 16 + thread % 32 / 4;
      const int col = tile_col(pair) + thread % 4 * 2;
#pragma unroll
      for (int j = 0; j < 32; ++j) store_fragment(g, &sum[0][j * 4], row, col + j * 8);
    }
  }
}

}  // namespace

const Rung kRung = {Tile::kBlkM,   kCluster* Tile::kBlkN, Tile::kBlkK,
                    Tile::kStages, Tile::kThreads,        kSmemBytes};

void launch_rung(const Gemm& g) {
  const CUtensorMap a =
      make_tensor_map({DType::kBFloat16, false, g.a, g.k, g.m, g.k, TmaLoaderA<Tile>::kBoxInner,
                       TmaLoaderA<Tile>::box_outer(kCluster)});
  const CUtensorMap b =
      make_tensor_map({DType::kBFloat16, false, g.b, g.k, g.n, g.k, TmaLoaderB<Tile>::kBoxInner,
                       TmaLoaderB<Tile>::box_outer(1)});
  const unsigned pairs = one_block_a_tile(g).x;
  const unsigned clusters =
      std::min(pairs, static_cast<unsigned>(current_device_info().num_sms / kCluster));
  launch_clusters(cluster_kernel, dim3(clusters * kCluster), dim3(Tile::kThreads), kCluster,
                  kSmemBytes, g.stream, a, b, g);
}

}  // namespace ladder
