// Facts of the current GPU, read from the driver once per device.
#include <mutex>
#include <vector>

#include "host/launch_cluster.h"

namespace warpwright {
namespace {

__global__ void empty_kernel() {}

DeviceInfo read_device_info(int device) {
  auto attribute = [&](cudaDeviceAttr which) {
    int value = 0;
    cuda_check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
    return value;
  };
  DeviceInfo info;
  info.sm_arch = 10 * attribute(cudaDevAttrComputeCapabilityMajor) +
                 attribute(cudaDevAttrComputeCapabilityMinor);
  info.num_sms = attribute(cudaDevAttrMultiProcessorCount);
  info.smem_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  info.l2_bytes = attribute(cudaDevAttrL2CacheSize);
  info.clock_khz = attribute(cudaDevAttrClockRate);
  info.memory_clock_khz = attribute(cudaDevAttrMemoryClockRate);
  info.memory_bus_bits = attribute(cudaDevAttrGlobalMemoryBusWidth);
  for (int i = 0; i < 4; ++i) {
    info.clusters[i] = info.num_sms >> i;
    if (i > 0 && info.sm_arch >= 90) {
      info.clusters[i] = resident_clusters(empty_kernel, dim3(32), 1 << i, info.smem_per_block);
    }
  }
  return info;
}

}  // namespace

const DeviceInfo& current_device_info() {
  constexpr int kMaxDevices = 64;
  static DeviceInfo infos[kMaxDevices];
  static std::once_flag once[kMaxDevices];
  int device = 0;
  cuda_check(cudaGetDevice(&device), "cudaGetDevice");
  if (device >= kMaxDevices) throw std::runtime_error("warpwright: more than 64 CUDA devices");
  std::call_once(once[device], [&] { infos[device] = read_device_info(device); });
  return infos[device];
}

}  // namespace warpwright
