// A barrier of all blocks of a grid that launch_cooperative() started.
#pragma once

#include <cooperative_groups.h>

namespace warpwright {

// All threads of all blocks call it; what any of them wrote before, each of them sees after.
__device__ __forceinline__ void grid_barrier() { cooperative_groups::this_grid().sync(); }

}  // namespace warpwright
