// warpwright.set_float32_matmul_precision(): how linear's float32 products are computed on CUDA.
// One setting for all threads of the process.
#pragma once

#include <cstdint>

#include "host/export.h"

namespace warpwright {

// The order is that of LEVELS in python/warpwright/_precision.py.
enum class Float32Precision : int8_t {
  kTorch,    // torch's own setting: IEEE float32 or TF32
  kHighest,  // IEEE float32
  kHigh,     // sums of two TF32 numbers if there is such a kernel, else IEEE float32
  kMedium,   // TF32
};

WARPWRIGHT_EXPORT Float32Precision float32_precision();
WARPWRIGHT_EXPORT void set_float32_precision(Float32Precision precision);

}  // namespace warpwright
