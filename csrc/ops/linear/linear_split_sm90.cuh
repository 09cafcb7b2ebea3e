// The matrix product of a small output on sm_90a: k is split over the CTAs of a cluster, which add
// up their parts through each other's shared memory, in order: no workspace and no second launch.
// Bound: the bytes of the operands, or the latency of a launch.
#pragma once

#include "device/sm90/arch.cuh"
#include "device/sm90/cluster.cuh"
#include "host/launch_cluster.h"
#include "ops/linear/linear_output.cuh"
#include "tile/mainloop_sm90.cuh"
#include "tile/scheduler.cuh"

namespace warpwright {

struct GemmSplitSm90Params {
  CUtensorMap a;
  CUtensorMap b;
  TileGrid grid;  // of clusters
  int splits;     // CTAs of a cluster
};

constexpr int kSplitThreads = 256;

// A: (m, k), B: (n, k), each contiguous in its kMajor direction. D: (m, n) row-major in `output`.
// Grid: a cluster for each D tile; CTA i of it multiplies the i-th part of k and stores the i-th
// part of the tile's rows. Warpgroup 0 loads, 1 multiplies, both add up and store.
template <class Tile, class Output>
__global__ void __launch_bounds__(kSplitThreads, 2)
    gemm_split_sm90_kernel(const __grid_constant__ GemmSplitSm90Params p, Output output) {
  if constexpr (kHasSm90a) {
    extern __shared__ char smem[];
    using Loop = MainloopSm90<Tile>;
    constexpr int kVec = Output::kVec;
    constexpr int kPitch = Tile::kBlkN + 4;  // of a part: floats
    static_assert(Tile::kBlocks == 1 && kVec % 4 == 0, "64 rows of whole 16-byte vectors");
    static_assert(Tile::kBlkM * kPitch * 4 <= Tile::kStages * Tile::kStageBytes, "in the ring");
    // Every CTA of the cluster rounds up alike.
    const uint32_t base = (smem_address(smem) + 1023) & ~1023u;
    const Loop loop{base, base + Tile::kStages * Tile::kStageBytes};

    const int thread = static_cast<int>(threadIdx.x);
    const int warpgroup = __shfl_sync(~0u, thread / 128, 0);
    const int rank = static_cast<int>(cluster_cta_rank());
    const TileCoord tile = tile_of_block(p.grid, blockIdx.x / p.splits);
    const int k_begin = static_cast<int>(int64_t{rank} * p.grid.k_tiles / p.splits);
    const int k_end = static_cast<int>(int64_t{rank + 1} * p.grid.k_tiles / p.splits);
    const int first_m = tile.m * Tile::kBlkM;
    const int first_n = tile.n * Tile::kBlkN;
    if (thread == 0) {
      prefetch_tensor_map(&p.a);
      prefetch_tensor_map(&p.b);
      loop.init();
    }
    __syncthreads();

    // A thread's columns; their bias is on its way during the mainloop.
    constexpr int kChunks = Tile::kBlkN / kVec;
    const int col = thread % kChunks * kVec;
    const auto columns = output.columns(first_n + col);

    typename Loop::Cursor cursor;
    if (warpgroup == 0) {
      if (thread == 0) {
        const TmaLoaderA<Tile> a{&p.a};
        const TmaLoaderB<Tile> b{&p.b};
        loop.produce(a, b, first_m, first_n, k_begin, k_end, /*rank=*/0, cursor);
      }
    } else {
      typename Loop::Accumulator d;
      loop.consume(d, k_end - k_begin, /*first_row=*/0, cursor);
      // When all four warps have multiplied every load, the ring is free for this CTA's part.
      named_barrier_sync(/*id=*/1, 128);
      const int row = thread % 128 / 32 * 16 + thread % 32 / 4;
      float* part = reinterpret_cast<float*>(smem + (base - smem_address(smem))) + row * kPitch +
                    thread % 4 * 2;
#pragma unroll
      for (int i = 0; i < Tile::kRegs / 4; ++i) {
        *reinterpret_cast<float2*>(part + i * 8) = make_float2(d[0][i * 4], d[0][i * 4 + 1]);
        *reinterpret_cast<float2*>(part + i * 8 + 8 * kPitch) =
            make_float2(d[0][i * 4 + 2], d[0][i * 4 + 3]);
      }
    }
    __syncwarp();
    cluster_arrive();
    cluster_wait();

    const int end_row = (rank + 1) * Tile::kBlkM / p.splits;
#pragma unroll 1
    for (int row = rank * Tile::kBlkM / p.splits + thread / kChunks; row < end_row;
         row += kSplitThreads / kChunks) {
      if (first_m + row >= output.rows) break;
      const uint32_t place = base + (row * kPitch + col) * 4;
      float sums[kVec] = {};
#pragma unroll 4
      for (int split = 0; split < p.splits; ++split) {
        const uint32_t part = map_to_cta(place, split);
#pragma unroll
        for (int i = 0; i < kVec; i += 4) {
          const float4 v = load_cluster(part + i * 4, float4{});
          sums[i] += v.x;
          sums[i + 1] += v.y;
          sums[i + 2] += v.z;
          sums[i + 3] += v.w;
        }
      }
      if constexpr (requires { columns.add_old(int64_t{0}, sums); }) {
        columns.add_old(first_m + row, sums);
      }
      columns.store(first_m + row, sums);
    }
    // A CTA stays until nobody reads its part any more.
    cluster_arrive();
    cluster_wait();
  } else {
    __trap();  // GemmParams::sm90 was set where it may not be
  }
}

// a and b: the operands' tensor maps for this Tile.
template <class Tile>
void launch_gemm_split_sm90(const GemmParams& p, const CUtensorMap& a, const CUtensorMap& b,
                            int splits, int raster_rows, cudaStream_t stream) {
  using T = typename Tile::Element;
  constexpr int kSmemBytes = 1024 + MainloopSm90<Tile>::kSmemBytes;
  static_assert(2 * (kSmemBytes + 1024) <= 228 * 1024, "two CTAs an SM");
  GemmSplitSm90Params params{a, b, {}, splits};
  params.grid = make_tile_grid(p.m, p.n, p.k, Tile::kBlkM, Tile::kBlkN, Tile::kBlkK);
  params.grid.group_m = std::clamp(raster_rows / Tile::kBlkM, 1, params.grid.tiles_m);
  const int64_t blocks = params.grid.num_blocks() * splits;
  if (blocks > kMaxGridX) throw std::runtime_error("warpwright: linear: more than 2^31 blocks");
  auto run = [&]<class Output>(const Output& output) {
    launch_clusters(gemm_split_sm90_kernel<Tile, Output>, dim3(static_cast<unsigned>(blocks)),
                    dim3(kSplitThreads), splits, kSmemBytes, stream, params, output);
  };
  if (p.accum_d) {
    run(sum_output<float>(p));
  } else {
    run(activation_output<T>(p));
  }
}

}  // namespace warpwright
