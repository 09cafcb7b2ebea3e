// Launching a kernel: shared-memory opt-in, stream, and the launch check, in one place.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>

#include "common/dtype.h"

namespace warpwright {

inline void cuda_check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // clears a non-sticky error, so that no later call reports it
  throw std::runtime_error(std::string("warpwright: ") + what + ": " + cudaGetErrorString(status));
}

// The largest grid.x. Only grid.x takes data extents, because grid.y and grid.z end at 65535.
constexpr int64_t kMaxGridX = (int64_t{1} << 31) - 1;

// The current GPU. Read once per device; safe to call from several threads.
const DeviceInfo& current_device_info();

#ifdef __CUDACC__
// Lets a kernel use more than 48 KB of shared memory, static memory included. A driver call of
// about 1 us, so only for kernels that come near the limit.
template <class... Params>
void allow_shared_memory(void (*kernel)(Params...), int64_t smem_bytes) {
  if (smem_bytes <= 40 * 1024) return;
  cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(smem_bytes)),
             "shared memory opt-in");
}

// Launches on `stream` and checks. `smem_bytes` is dynamic shared memory.
template <class... Params, class... Args>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, int64_t smem_bytes,
            cudaStream_t stream, Args&&... args) {
  allow_shared_memory(kernel, smem_bytes);
  kernel<<<grid, block, static_cast<size_t>(smem_bytes), stream>>>(Params(args)...);
  cuda_check(cudaGetLastError(), "kernel launch");
}

// The configuration of cudaLaunchKernelEx. Keeps a pointer to `attributes`, no copy.
inline cudaLaunchConfig_t launch_config(dim3 grid, dim3 block, int64_t smem_bytes,
                                        cudaStream_t stream,
                                        std::span<cudaLaunchAttribute> attributes) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = static_cast<size_t>(smem_bytes);
  config.stream = stream;
  config.attrs = attributes.data();
  config.numAttrs = static_cast<unsigned>(attributes.size());
  return config;
}

// As launch(), with launch attributes.
template <class... Params, class... Args>
void launch_with(std::span<cudaLaunchAttribute> attributes, void (*kernel)(Params...), dim3 grid,
                 dim3 block, int64_t smem_bytes, cudaStream_t stream, Args&&... args) {
  allow_shared_memory(kernel, smem_bytes);
  const cudaLaunchConfig_t config = launch_config(grid, block, smem_bytes, stream, attributes);
  cuda_check(cudaLaunchKernelEx(&config, kernel, Params(args)...), "kernel launch");
}

inline cudaLaunchAttribute dependent_attribute() {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

// As launch(), as a programmatic dependent launch: from sm_90 on, blocks start while the previous
// kernel of `stream` still runs (device/dependent_launch.cuh).
template <class... Params, class... Args>
void launch_dependent(void (*kernel)(Params...), dim3 grid, dim3 block, int64_t smem_bytes,
                      cudaStream_t stream, Args&&... args) {
  if (current_device_info().sm_arch < 90) {
    return launch(kernel, grid, block, smem_bytes, stream, args...);
  }
  cudaLaunchAttribute attributes[] = {dependent_attribute()};
  launch_with(attributes, kernel, grid, block, smem_bytes, stream, args...);
}
#endif

}  // namespace warpwright
