// Parameters, tile and shared memory of the fused backward on sm_90a.
#pragma once

#include "ops/attention/cuda/sm90/params.cuh"
#include "ops/attention/gang_schedule.h"
#include "tile/stage_ring_sm90.cuh"

namespace warpwright {

struct AttentionFusedSm90Params : AttentionBackwardSm90Params {
  CUtensorMap dk, dv;
  bool want_dk, want_dv;
  float* dq_sums;
  int* turns;  // (B * H, query blocks): additions done; zero at the start
  int H_kv;
  GangSchedule schedule;
};

// kHead: D and D_v are padded to it. kStages: stages of Q. kDsBuffers: buffers of dS. kSumBuffers:
// buffers of dQ, each with a writer warp.
template <int kHead_, int kStages_, int kDsBuffers_, int kSumBuffers_>
struct FusedTileSm90 {
  static constexpr int kHead = kHead_;
  // The half of dQ that a warpgroup computes, 64 queries by 64 columns: half of the columns, or
  // half of the queries.
  static constexpr bool kSplitsColumns = kHead == 128;
  static constexpr int kStages = kStages_;
  static constexpr int kDoutStages = 2;
  static constexpr int kDsBuffers = kDsBuffers_;
  static constexpr int kSumBuffers = kSumBuffers_;
  static constexpr int kConsumers = 2;
  static constexpr int kBlockM = kSplitsColumns ? 64 : 128;  // queries per step
  static constexpr int kBlockN = 64 * kConsumers;            // keys
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = 240;
  static_assert(kSumBuffers <= 2, "one warp loads Q and dO, another one K and V");

  static constexpr int kChunks = kHead / 64;
  static constexpr int kKBytes = kBlockN * kHead * 2;      // of K and of V
  static constexpr int kBlockBytes = kBlockM * kHead * 2;  // of Q and of dO
  static constexpr int kDsBytes = kBlockN * kBlockM * 2;
  static constexpr int kSumBytes = kBlockM * kHead * 4;  // of dQ
  static constexpr int kStatsBytes = kBlockM * 4;        // of lse and of delta
  static constexpr int kK = 0;
  static constexpr int kV = kK + kKBytes;
  static constexpr int kQ = kV + kKBytes;
  static constexpr int kDout = kQ + kStages * kBlockBytes;
  static constexpr int kDs = kDout + kDoutStages * kBlockBytes;
  static constexpr int kSum = kDs + kDsBuffers * kDsBytes;
  static constexpr int kLse = kSum + kSumBuffers * kSumBytes;
  static constexpr int kDelta = kLse + kStages * kStatsBytes;
  static constexpr int kRow = kDelta + kDoutStages * kStatsBytes;  // of a stage's first query
  static constexpr int kBarriers = kRow + kStages * 8;
  static constexpr int kSmemBytes =
      kBarriers + StageRing<kStages>::kBarrierBytes + StageRing<kDoutStages>::kBarrierBytes +
      2 * StageRing<1>::kBarrierBytes + StageRing<kSumBuffers>::kBarrierBytes + 1024;  // alignment
  static_assert(kSmemBytes <= 227 * 1024);
};

}  // namespace warpwright
