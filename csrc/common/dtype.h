// Element types and devices of the layers that see no torch.
#pragma once

#include <cstdint>

namespace warpwright {

// Every op takes the four floating types; relu and max_pool2d also take the integers.
enum class DType : int8_t {
  kFloat32,
  kFloat64,
  kBFloat16,
  kFloat16,
  kUInt8,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
};

constexpr int64_t dtype_size(DType dtype) {
  constexpr int64_t kSizes[] = {4, 8, 2, 2, 1, 1, 2, 4, 8};
  return kSizes[static_cast<int>(dtype)];
}

constexpr const char* dtype_name(DType dtype) {
  constexpr const char* kNames[] = {"float32", "float64", "bfloat16", "float16", "uint8",
                                    "int8",    "int16",   "int32",    "int64"};
  return kNames[static_cast<int>(dtype)];
}

// The facts of a GPU that a choice of kernel may use. Read once per device from cudaDeviceProp, or
// filled in by a test without a GPU.
struct DeviceInfo {
  int sm_arch = 90;  // 10 * major + minor
  int num_sms = 132;
  int64_t smem_per_block = 227 * 1024;  // bytes a block may opt in to
  int64_t l2_bytes = 50 << 20;
  int clock_khz = 1980000;         // of the SMs, at most
  int memory_clock_khz = 2619000;  // two transfers per cycle
  int memory_bus_bits = 5120;
  // How many clusters of 1, 2, 4 and 8 blocks are resident on the GPU if each block fills an SM.
  int clusters[4] = {132, 66, 30, 15};

  double memory_bytes_per_second() const { return memory_clock_khz * 2e3 * (memory_bus_bits / 8); }
  // The bytes that memory delivers per cycle of the SMs.
  double memory_bytes_per_cycle() const { return memory_bytes_per_second() / (clock_khz * 1e3); }
};

}  // namespace warpwright
