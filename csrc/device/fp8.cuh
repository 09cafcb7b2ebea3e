// The 8-bit floats.
#pragma once

#include <cuda_fp8.h>

namespace warpwright {

using fp8_e4m3 = __nv_fp8_e4m3;
using fp8_e5m2 = __nv_fp8_e5m2;

}  // namespace warpwright
