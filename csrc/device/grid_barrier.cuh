// A barrier for all blocks of a grid that launch_cooperative() started.
#pragma once

#include <cooperative_groups.h>

namespace warpwright {

// All threads of all blocks must call. Writes before the barrier are visible to all threads after
// it.
__device__ __forceinline__ void grid_barrier() { cooperative_groups::this_grid().sync(); }

}  // namespace warpwright
