// Launching a kernel in clusters (sm_90 and later).
#pragma once

#include <array>

#include "host/launch.h"

namespace warpwright {

#ifdef __CUDACC__
// Calls f with the launch's description.
template <class... Params, class F>
void with_cluster_launch(void (*kernel)(Params...), dim3 grid, dim3 block, int cluster,
                         int64_t smem_bytes, cudaStream_t stream, F&& f) {
  cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(smem_bytes)),
             "shared memory opt-in");
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(cluster);
  attribute.val.clusterDim.y = 1;
  attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = static_cast<size_t>(smem_bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  f(config);
}

// As launch(), in clusters of `cluster` neighbouring blocks, which divides the grid.
template <class... Params, class... Args>
void launch_clusters(void (*kernel)(Params...), dim3 grid, dim3 block, int cluster,
                     int64_t smem_bytes, cudaStream_t stream, Args&&... args) {
  if (cluster == 1) return launch(kernel, grid, block, smem_bytes, stream, args...);
  with_cluster_launch(
      kernel, grid, block, cluster, smem_bytes, stream, [&](const cudaLaunchConfig_t& config) {
        cuda_check(cudaLaunchKernelEx(&config, kernel, Params(args)...), "kernel launch");
      });
}

// Clusters of such a launch that the current GPU runs at once; at least 1. A thread remembers its
// last question of each signature, since the driver takes microseconds to answer.
template <class... Params>
int64_t resident_clusters(void (*kernel)(Params...), dim3 block, int cluster, int64_t smem_bytes) {
  int gpu = 0;
  cuda_check(cudaGetDevice(&gpu), "current device");
  const std::array<int64_t, 5> question{reinterpret_cast<int64_t>(kernel), gpu,
                                        static_cast<int64_t>(block.x), cluster, smem_bytes};
  thread_local std::array<int64_t, 5> asked{};
  thread_local int answer = 0;
  if (question != asked) {
    const dim3 grid(static_cast<unsigned>(cluster));
    with_cluster_launch(
        kernel, grid, block, cluster, smem_bytes, nullptr, [&](const cudaLaunchConfig_t& config) {
          cuda_check(cudaOccupancyMaxActiveClusters(&answer, kernel, &config), "resident clusters");
        });
    asked = question;
  }
  return answer > 1 ? answer : 1;
}
#endif

}  // namespace warpwright
