// Launching a kernel in clusters (sm_90 and later).
#pragma once

#include "host/launch.h"

namespace warpwright {

#ifdef __CUDACC__
// As launch(), in clusters of `cluster` neighbouring blocks, which divides the grid.
template <class... Params, class... Args>
void launch_clusters(void (*kernel)(Params...), dim3 grid, dim3 block, int cluster,
                     int64_t smem_bytes, cudaStream_t stream, Args&&... args) {
  if (cluster == 1) return launch(kernel, grid, block, smem_bytes, stream, args...);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(cluster);
  attribute.val.clusterDim.y = 1;
  attribute.val.clusterDim.z = 1;
  launch_with(attribute, kernel, grid, block, smem_bytes, stream, args...);
}
#endif

}  // namespace warpwright
