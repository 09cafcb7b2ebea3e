// Element types and devices as the torch-free layers know them.
#pragma once

#include <cstdint>

namespace warpwright {

enum class DType : int8_t { kFloat32, kFloat64, kBFloat16, kFloat16 };

constexpr int64_t dtype_size(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return 8;
    case DType::kFloat32:
      return 4;
    default:
      return 2;
  }
}

constexpr const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat64:
      return "float64";
    case DType::kBFloat16:
      return "bfloat16";
    default:
      return "float16";
  }
}

// What choose_config() may know of the GPU; filled once per device from cudaDeviceProp, or by hand
// in a test that has no GPU.
struct DeviceInfo {
  int sm_arch = 90;  // 10 * major + minor
  int num_sms = 132;
  int64_t smem_per_block = 227 * 1024;  // bytes a block may opt in to
  int64_t l2_bytes = 50 << 20;
};

}  // namespace warpwright
