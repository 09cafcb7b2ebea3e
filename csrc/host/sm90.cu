// Answers once per device.
#include "host/sm90.h"

#include <cstdlib>
#include <cstring>
#include <mutex>

#include "host/launch.h"

namespace warpwright {
namespace {

// Never launched: its launch bound tells which architecture's code the driver loaded for this GPU.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr int kProbeThreads = 256;
#else
constexpr int kProbeThreads = 128;
#endif
__global__ void __launch_bounds__(kProbeThreads) sm90a_probe_kernel() {}

bool has_sm90a_code() {
  if (current_device_info().sm_arch != 90) return false;
  cudaFuncAttributes attributes;
  cuda_check(cudaFuncGetAttributes(&attributes, sm90a_probe_kernel), "cudaFuncGetAttributes");
  return attributes.maxThreadsPerBlock == 256;
}

}  // namespace

bool sm90_path_available() {
  constexpr int kMaxDevices = 64;
  static bool available[kMaxDevices];
  static std::once_flag once[kMaxDevices];
  int device = 0;
  cuda_check(cudaGetDevice(&device), "cudaGetDevice");
  if (device >= kMaxDevices) return false;
  std::call_once(once[device], [&] { available[device] = has_sm90a_code(); });
  if (!available[device]) return false;
  const char* path = std::getenv("WARPWRIGHT_PATH");
  return path == nullptr || std::strcmp(path, "portable") != 0;
}

}  // namespace warpwright
