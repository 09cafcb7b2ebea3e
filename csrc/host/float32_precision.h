// warpwright.set_float32_matmul_precision(): what linear's float32 products may be rounded to on
// CUDA. For all threads of the process.
#pragma once

#include <cstdint>

#include "host/export.h"

namespace warpwright {

// The order is that of LEVELS in python/warpwright/_precision.py.
enum class Float32Precision : int8_t {
  kTorch,    // as torch's own setting says, which is IEEE float32 or TF32
  kHighest,  // IEEE float32
  kHigh,     // each operand the sum of two TF32 numbers, where there is such a kernel; else IEEE
  kMedium,   // TF32
};

WARPWRIGHT_EXPORT Float32Precision float32_precision();
WARPWRIGHT_EXPORT void set_float32_precision(Float32Precision precision);

}  // namespace warpwright
