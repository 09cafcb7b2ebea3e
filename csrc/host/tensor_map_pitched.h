// TMA descriptor of the windows of an image that is a slice of a wider one. As in tensor_map.h.
#pragma once

#include <cuda.h>

#include "host/tensor_map.h"

namespace warpwright {

// The im2col view of an NHWC image whose pixels are `pitch` elements apart, a multiple of 16 bytes.
// L2 is filled by 128 bytes, so that the neighbours of a narrow slice stay in memory.
CUtensorMap make_pitched_im2col_tensor_map(const TensorMapIm2col& image, int64_t pitch);

}  // namespace warpwright
