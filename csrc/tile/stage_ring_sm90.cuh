// A ring of shared-memory stages on sm_90a: a producer thread fills them by asynchronous copies,
// consumer warps read them, and two mbarriers per stage hand them over.
#pragma once

#include <cstdint>

#include "device/sm90/mbarrier.cuh"

namespace warpwright {

// The next stage, and the parity of its round through the ring.
template <int kStages>
struct StageCursor {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ void skip(int stages) {
    const int target = stage + stages;
    parity ^= static_cast<uint32_t>(target / kStages) & 1;
    stage = target % kStages;
  }
};

// Producer and consumers keep a cursor each. Example, with copies of `bytes` per stage:
//   producer: wait_empty(cursor); expect(cursor, bytes); tma_load(…, full(cursor.stage)); next()
//   consumer: wait_full(cursor); read; release(cursor), once per warp; next()
template <int kStages>
struct StageRing {
  using Cursor = StageCursor<kStages>;
  static constexpr int kBarrierBytes = 2 * 8 * kStages;

  uint32_t barriers;  // shared memory, multiple of 8: kStages "full", then kStages "empty"

  __device__ __forceinline__ uint32_t full(int stage) const { return barriers + stage * 8; }
  __device__ __forceinline__ uint32_t empty(int stage) const {
    return barriers + (kStages + stage) * 8;
  }

  // One thread of the CTA calls it; fence_mbarrier_init() and a barrier of the CTA follow.
  __device__ __forceinline__ void init(int releases) const {
#pragma unroll
    for (int s = 0; s < kStages; ++s) {
      mbarrier_init(full(s), 1);
      mbarrier_init(empty(s), releases);
    }
  }

  __device__ __forceinline__ void wait_empty(const Cursor& at) const {
    mbarrier_wait(empty(at.stage), at.parity ^ 1);
  }
  __device__ __forceinline__ void expect(const Cursor& at, int bytes) const {
    mbarrier_arrive_expect_tx(full(at.stage), bytes);
  }
  __device__ __forceinline__ void wait_full(const Cursor& at) const {
    mbarrier_wait(full(at.stage), at.parity);
  }
  // Called when every lane of the warp has finished with the stage. A warp that reads a stage of
  // TMA's by ordinary loads (not by wgmma) calls release_loaded() of loaded_stage_sm90.cuh.
  __device__ __forceinline__ void release(const Cursor& at) const {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty(at.stage));
  }
};

}  // namespace warpwright
