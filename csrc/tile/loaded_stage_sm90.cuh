// Handing back a stage of a ring (stage_ring_sm90.cuh) that a warp has read by ordinary loads.
#pragma once

#include "device/sm90/tma.cuh"

namespace warpwright {

// TMA writes through another proxy than ordinary loads read. Without the fence the next copy may
// overwrite a stage before earlier loads have read it, in spite of the arrival. Reads by wgmma use
// TMA's proxy and need no fence. All lanes of the warp call.
template <class Ring>
__device__ __forceinline__ void release_loaded(const Ring& ring, const typename Ring::Cursor& at) {
  fence_proxy_async();
  __syncwarp();
  ring.release(at);
}

}  // namespace warpwright
