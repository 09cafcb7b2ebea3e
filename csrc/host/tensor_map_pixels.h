// TMA descriptor of an image's rows of pixels. As in tensor_map.h.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "common/dtype.h"

namespace warpwright {

// A dense NHWC image, read in boxes of one row: box_images images by box_cols pixels by
// box_channels channels, dense in shared memory. Elements outside of the image read as zero and are
// not written.
struct TensorMapPixels {
  DType dtype;
  const void* pointer;  // multiple of 16
  int64_t batch;
  int64_t size[2];   // height and width
  int64_t channels;  // a multiple of 16 bytes
  int box_channels;  // a multiple of 16 bytes, at most 256 elements
  int box_cols;      // at most 256
  int box_images;    // the same
  bool swizzle;      // pixels of 64 bytes: the 16-byte chunk c of pixel i is at c ^ (i / 2 % 4)
};

CUtensorMap make_pixels_tensor_map(const TensorMapPixels& image);

}  // namespace warpwright
