// Launching a kernel in clusters (sm_90 and later).
#pragma once

#include "host/launch.h"

namespace warpwright {

#ifdef __CUDACC__
inline cudaLaunchAttribute cluster_attribute(int cluster) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(cluster);
  attribute.val.clusterDim.y = 1;
  attribute.val.clusterDim.z = 1;
  return attribute;
}

// As launch(), in clusters of `cluster` consecutive blocks; `cluster` divides the grid.
template <class... Params, class... Args>
void launch_clusters(void (*kernel)(Params...), dim3 grid, dim3 block, int cluster,
                     int64_t smem_bytes, cudaStream_t stream, Args&&... args) {
  if (cluster == 1) return launch(kernel, grid, block, smem_bytes, stream, args...);
  cudaLaunchAttribute attributes[] = {cluster_attribute(cluster)};
  launch_with(attributes, kernel, grid, block, smem_bytes, stream, args...);
}

// The same. With `overlap` the kernel may start before the previous one ends, as in
// launch_dependent().
template <class... Params, class... Args>
void launch_overlapping(bool overlap, void (*kernel)(Params...), dim3 grid, dim3 block, int cluster,
                        int64_t smem_bytes, cudaStream_t stream, Args&&... args) {
  if (!overlap) return launch_clusters(kernel, grid, block, cluster, smem_bytes, stream, args...);
  if (cluster == 1) return launch_dependent(kernel, grid, block, smem_bytes, stream, args...);
  cudaLaunchAttribute attributes[] = {cluster_attribute(cluster), dependent_attribute()};
  launch_with(attributes, kernel, grid, block, smem_bytes, stream, args...);
}

// How many clusters of the kernel are resident on the GPU; 0 if unknown.
template <class... Params>
int resident_clusters(void (*kernel)(Params...), dim3 block, int cluster, int64_t smem_bytes) {
  allow_shared_memory(kernel, smem_bytes);
  cudaLaunchAttribute attributes[] = {cluster_attribute(cluster)};
  const cudaLaunchConfig_t config =
      launch_config(dim3(static_cast<unsigned>(cluster)), block, smem_bytes, nullptr, attributes);
  int clusters = 0;
  if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return clusters;
}
#endif

}  // namespace warpwright
