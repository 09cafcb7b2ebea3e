// Handing back a stage of a ring (stage_ring_sm90.cuh) that a warp has read by ordinary loads.
#pragma once

#include "device/sm90/tma.cuh"

namespace warpwright {

// TMA writes through another proxy than loads read, so an arrival does not hold the next copy
// behind loads on their way: they would return its data. The fence does. Reads by wgmma are in
// TMA's proxy and need none. All lanes of the warp call.
template <class Ring>
__device__ __forceinline__ void release_loaded(const Ring& ring, const typename Ring::Cursor& at) {
  fence_proxy_async();
  __syncwarp();
  ring.release(at);
}

}  // namespace warpwright
