// How tile numbers reach the warpgroups of a persistent CTA. The producer thread takes the next
// tile and passes its number on through two slots of shared memory.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/reduce.cuh"
#include "device/sm90/cluster.cuh"
#include "device/ticket.cuh"
#include "ops/attention/cuda/sm90/schedule.cuh"
#include "tile/stage_ring_sm90.cuh"

namespace warpwright {

struct TileQueue {
  static constexpr int kSlots = 2;
  static constexpr int kSmemBytes = StageRing<kSlots>::kBarrierBytes + 8 * kSlots;

  uint32_t shared;  // kSmemBytes, a multiple of 8
  StageRing<kSlots>::Cursor at = {};
  bool started = false;

  __device__ __forceinline__ StageRing<kSlots> ring() const { return {shared}; }
  __device__ __forceinline__ void init(int consumer_warps) const { ring().init(consumer_warps); }

  // Whether `tile` is one, for the producer and for a consumer.
  template <class Params>
  __device__ __forceinline__ bool holds(const Params& p, int tile) const {
    return tile < p.schedule.num_tiles;
  }
  template <class Params>
  __device__ __forceinline__ bool popped(const Params& p, int tile) const {
    return tile < p.schedule.num_tiles;
  }
  // The producer calls it to pass on `tile`, which it returns.
  template <class Params>
  __device__ __forceinline__ int push(const Params&, int tile) {
    ring().wait_empty(at);
    store_shared_u32(slot(), static_cast<uint32_t>(tile));
    mbarrier_arrive(ring().full(at.stage));
    at.next();
    return tile;
  }
  // The producer calls it to get the tile after `tile`.
  __device__ __forceinline__ int next(const TileSchedule& schedule, int tile) {
    if (schedule.counter == nullptr) return tile + static_cast<int>(gridDim.x);
    if (!started) wait_for_previous_kernel();  // it clears the counter
    started = true;
    return static_cast<int>(gridDim.x) + take_ticket(schedule.counter);
  }
  // Each consumer warp calls it. Lane 0, which releases the slot, reads it for the warp: its
  // release then orders the read before the producer's next store.
  __device__ __forceinline__ int pop() {
    ring().wait_full(at);
    uint32_t tile = 0;
    if (threadIdx.x % kWarpSize == 0) tile = load_shared_u32(slot());
    tile = __shfl_sync(kFullMask, tile, 0);
    ring().release(at);
    at.next();
    return static_cast<int>(tile);
  }
  // A consumer warp calls it after a tile.
  __device__ __forceinline__ void finish() const {}

 private:
  __device__ __forceinline__ uint32_t slot() const {
    return shared + StageRing<kSlots>::kBarrierBytes + at.stage * 8;
  }
};

}  // namespace warpwright
