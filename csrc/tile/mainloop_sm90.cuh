// D = A B^T of one tile on sm_90a. A producer thread fills a ring of shared-memory stages by TMA;
// with realigning_loader_sm90.cuh warpgroups fill it. Two consumer warpgroups multiply the stages
// by wgmma. mbarriers hand the stages over.
// Cooperative: each consumer owns half of the tile's rows. Ping-pong: each owns every second tile,
// so that one stores while the other multiplies.
// Bound: the tensor cores, if a stage's bytes arrive from L2 in the time of its math. A 128 x 256
// tile needs 48 bytes per cycle and SM, a 128 x 64 tile 96. Multicast within a cluster of 2 or 4
// CTAs divides A's part by that number.
#pragma once

#include <cstdint>

#include "device/evict_first.cuh"
#include "device/mma_sm80.cuh"
#include "device/sm90/cluster.cuh"
#include "device/sm90/mbarrier.cuh"
#include "device/sm90/tma.cuh"
#include "device/sm90/wgmma.cuh"
#include "tile/row_sums_sm90.cuh"
#include "tile/stage_ring_sm90.cuh"
#include "tile/tile_portable.cuh"

namespace warpwright {

// A stage holds kBlkM + kBlkN rows of 128 bytes (K-major), or columns 128 bytes wide of kBlkK rows
// (MN-major). Either way M and N take 128 bytes per element.
template <class T, int kBlkM_, int kBlkN_, int kStages_, bool kPingPong_, bool kClusters_,
          Major kMajorA_, Major kMajorB_>
struct TileSm90 {
  using Element = T;
  static constexpr int kBlkM = kBlkM_;
  static constexpr int kBlkN = kBlkN_;
  static constexpr int kBlkK = 128 / static_cast<int>(sizeof(T));
  static constexpr int kStages = kStages_;
  static constexpr bool kPingPong = kPingPong_;
  // The launch may form clusters of CTAs with neighbouring tiles along N. Such a cluster loads A
  // once.
  static constexpr bool kClusters = kClusters_;
  static constexpr Major kMajorA = kMajorA_;
  static constexpr Major kMajorB = kMajorB_;

  // Warpgroups. A cooperative tile of 192 rows has three, of 64 rows each.
  static constexpr int kConsumers = !kPingPong && kBlkM == 192 ? 3 : 2;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kRows = kPingPong ? kBlkM : kBlkM / kConsumers;  // rows of D of a warpgroup
  static constexpr int kBlocks = kRows / 64;  // of 64 rows, those of one wgmma
  static constexpr int kRegs = kBlkN / 2;     // of a block, per thread

  static constexpr int kBytesA = kBlkM * 128;
  static constexpr int kBytesB = kBlkN * 128;
  static constexpr int kStageBytes = kBytesA + kBytesB;

  // Of the epilogue, per warpgroup. Four stages of 192x192 leave room for one.
  static constexpr int kStoreBuffers = kConsumers == 3 ? 1 : 2;

  // wgmma reads 32-bit operands in shared memory along k only. mn_major_tf32_sm90.cuh transposes
  // the others.
  static constexpr bool kMnMajorTf32 = sizeof(T) == 4 && kMajorA == Major::kMN;
  static constexpr bool kSplitsTf32 = false;  // float32 as two TF32 numbers: split_tf32_sm90.cuh
  static_assert(sizeof(T) == 2 || kMnMajorTf32 || kMajorB == Major::kK, "A goes first");
  // linear's weight gradient may want the row sums of A, which are the bias gradient.
  static constexpr bool kRowSums = sizeof(T) == 2 && kMajorA == Major::kMN && kMajorB == Major::kMN;
  static_assert(kRows % 64 == 0 && kBlkN % 64 == 0 && kBlkN <= 256, "whole wgmma blocks");
  static constexpr int kAccumulators = kBlocks * kRegs;  // per thread
  // They leave no registers for the bias and the tile's coordinates during the mainloop.
  static constexpr bool kTight = kAccumulators > 128;
  static_assert(kAccumulators <= 192, "accumulators and addresses in 240 registers");
};

// Registers per thread after setmaxnreg: 128 * 40 + 256 * 232 <= 65536.
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;
// The same of a tight tile (128 * 24 + 256 * 240) and of three consumers (128 * 32 + 384 * 160).
constexpr int kProducerRegistersTight = 24, kConsumerRegistersTight = 240;
constexpr int kProducerRegistersOf3 = 32, kConsumerRegistersOf3 = 160;

// A CTA's rank in its cluster of 1, 2 or 4.
struct ClusterPlace {
  int ctas = 1;
  int rank = 0;
};

// Loads rows first_row .. of an operand, one k tile at a time, by TMA. The CTAs of `share` each
// load a part of the rows (K-major) or of k (MN-major) and multicast it. kHasPolicy: loads carry an
// L2 policy, for operands that are not shared. Without it they name none: naming the default policy
// made large products a third slower.
template <class Tile, Major kMajor, int kRows, bool kHasPolicy = false>
struct TmaLoader {
  const CUtensorMap* map;
  ClusterPlace share = {};
  uint64_t policy = 0;

  // This CTA's `barrier` must expect kRows * 128 bytes: its own part, and by multicast the parts
  // that the other CTAs of `share` load.
  __device__ __forceinline__ void load(uint32_t shared, int first_row, int k_tile,
                                       uint32_t barrier) const {
    const int part = share.rank * box_outer(share.ctas);
    const int k = k_tile * Tile::kBlkK;
    if constexpr (kMajor == Major::kK) {
      copy(shared + part * 128, k, first_row + part, barrier);
    } else {
#pragma unroll
      for (int row = 0; row < kRows; row += kBoxInner) {
        copy(shared + (row + part) * 128, first_row + row, k + part, barrier);
      }
    }
  }

  static constexpr int kBoxInner = Tile::kBlkK;  // 128 bytes in either direction
  // A multiple of 8: whole swizzle patterns.
  __host__ __device__ static constexpr int box_outer(int ctas) {
    return (kMajor == Major::kK ? kRows : Tile::kBlkK) / ctas;
  }

 private:
  __device__ __forceinline__ void copy(uint32_t shared, int c0, int c1, uint32_t barrier) const {
    if constexpr (kHasPolicy) {
      tma_load_2d(shared, map, c0, c1, barrier, policy);
    } else if (share.ctas > 1) {
      tma_load_multicast_2d(shared, map, c0, c1, barrier,
                            static_cast<uint16_t>((1u << share.ctas) - 1));
    } else {
      tma_load_2d(shared, map, c0, c1, barrier);
    }
  }
};

template <class Tile>
using TmaLoaderA = TmaLoader<Tile, Tile::kMajorA, Tile::kBlkM>;
template <class Tile, bool kHasPolicy = false>
using TmaLoaderB = TmaLoader<Tile, Tile::kMajorB, Tile::kBlkN, kHasPolicy>;

template <class Tile>
struct MainloopSm90 {
  using T = typename Tile::Element;
  using Cursor = StageCursor<Tile::kStages>;
  using Accumulator = float[Tile::kBlocks][Tile::kRegs];
  static constexpr int kSmemBytes = Tile::kStages * (Tile::kStageBytes + 16);
  static constexpr int kConsumerWarps = 4 * (Tile::kPingPong ? 1 : Tile::kConsumers);

  uint32_t stages;    // shared memory, multiple of 1024: kStages of kStageBytes
  uint32_t barriers;  // multiple of 8: kStages "full", then kStages "empty"
  ClusterPlace cluster = {};

  __device__ __forceinline__ uint32_t full(int stage) const { return barriers + stage * 8; }
  __device__ __forceinline__ uint32_t empty(int stage) const {
    return barriers + (Tile::kStages + stage) * 8;
  }

  // One thread of the CTA calls it; a barrier of the cluster follows. A stage is full after
  // `producer_arrivals` arrivals and the bytes that they announced.
  __device__ __forceinline__ void init(int producer_arrivals = 1) const {
#pragma unroll
    for (int s = 0; s < Tile::kStages; ++s) {
      mbarrier_init(full(s), producer_arrivals);
      // A stage is free when every warp that reads it or its multicast copies has released it.
      mbarrier_init(empty(s), kConsumerWarps * cluster.ctas);
    }
    fence_mbarrier_init();
    fence_proxy_async();
  }

  // One thread of the CTA calls it. `bytes`: what the loaders bring per stage.
  template <class LoaderA, class LoaderB>
  __device__ __forceinline__ void produce(const LoaderA& a, const LoaderB& b, int bytes,
                                          int first_m, int first_n, int k_begin, int k_end,
                                          Cursor& cursor) const {
#pragma unroll 1
    for (int k = k_begin; k < k_end; ++k) {
      mbarrier_wait(empty(cursor.stage), cursor.parity ^ 1);
      const uint32_t barrier = full(cursor.stage);
      const uint32_t shared = stages + cursor.stage * Tile::kStageBytes;
      mbarrier_arrive_expect_tx(barrier, bytes);
      a.load(shared, first_m, k, barrier);
      b.load(shared + Tile::kBytesA, first_n, k, barrier);
      cursor.next();
    }
  }

  // The producer of a cluster calls it after its last stage; it waits until all stages are free. A
  // CTA must not end before the others have sent their last arrivals to its barriers.
  __device__ __forceinline__ void drain(Cursor cursor) const {
#pragma unroll 1
    for (int s = 0; s < Tile::kStages; ++s) {
      mbarrier_wait(empty(cursor.stage), cursor.parity ^ 1);
      cursor.next();
    }
  }

  // One warpgroup calls it; first_row: its rows within the tile. Overwrites the accumulators, and
  // those of `sums`, a RowSums or NoRowSums.
  template <class Sums = NoRowSums>
  __device__ __forceinline__ void consume(Accumulator& d, int k_tiles, int first_row,
                                          Cursor& cursor, Sums&& sums = {}) const {
    constexpr bool kTransA = Tile::kMajorA == Major::kMN;
    constexpr bool kTransB = Tile::kMajorB == Major::kMN;
    constexpr int kStepA = kTransA ? 2048 : 32;  // bytes per wgmma along k
    constexpr int kStepB = kTransB ? 2048 : 32;
    constexpr uint64_t kFields = wgmma_descriptor_fields(/*leading=*/8192, /*stride=*/1024);
    const uint64_t a0 = wgmma_descriptor(kFields, stages + first_row * 128);
    const uint64_t b0 = wgmma_descriptor(kFields, stages + Tile::kBytesA);
    int previous = 0;
#pragma unroll 1
    for (int k = 0; k < k_tiles; ++k) {
      const uint32_t offset = static_cast<uint32_t>(cursor.stage) * (Tile::kStageBytes >> 4);
      mbarrier_wait(full(cursor.stage), cursor.parity);
#pragma unroll
      for (int i = 0; i < Tile::kBlocks; ++i) wgmma_pin(d[i]);
      sums.pin();
      auto multiply = [&] {
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
#pragma unroll
          for (int i = 0; i < Tile::kBlocks; ++i) {
            wgmma<T, kTransA, kTransB>(d[i], a0 + offset + ((step * kStepA + i * 8192) >> 4),
                                       b0 + offset + ((step * kStepB) >> 4), step > 0 || k > 0);
          }
        }
      };
      // Each branch has the whole stage and its own commit. With a branch around the sums alone,
      // ptxas would close a group before it. The wait below, one group short, would then wait for
      // this stage.
      if (sums.takes(k)) {
        multiply();
        sums.multiply(a0 + offset);
        wgmma_commit();
      } else {
        multiply();
        wgmma_commit();
      }
      // The newest batch still runs; the one before has read its stage.
      wgmma_wait<1>();
#pragma unroll
      for (int i = 0; i < Tile::kBlocks; ++i) wgmma_pin(d[i]);
      sums.pin();
      if (k > 0) release(previous);
      previous = cursor.stage;
      cursor.next();
    }
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < Tile::kBlocks; ++i) wgmma_pin(d[i]);
    sums.pin();
    release(previous);
  }

  // Each consumer warp calls it; it arrives at every CTA whose copies land in this stage.
  __device__ __forceinline__ void release(int stage) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (lane >= cluster.ctas) return;
    if (cluster.ctas == 1) {
      mbarrier_arrive(empty(stage));
    } else {
      mbarrier_arrive_cluster(map_to_cta(empty(stage), lane));
    }
  }
};

}  // namespace warpwright
