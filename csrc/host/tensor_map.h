// TMA descriptors. The host builds one in about a microsecond and passes it to the kernel by value.
// The runtime looks up the driver's function, so that the library does not link to libcuda.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "common/dtype.h"

namespace warpwright {

// A matrix whose inner direction is contiguous, read or written in boxes of box_inner x box_outer
// elements. In shared memory a box is box_outer rows of 128 bytes, swizzled: the 16-byte chunk c of
// row r is at chunk c ^ (r % 8). Extents are below 2^31.
struct TensorMap2d {
  DType dtype;
  bool round_to_tf32;   // loads round float elements to TF32 (nearest)
  const void* pointer;  // multiple of 16
  int64_t inner;
  int64_t outer;
  int64_t pitch;  // elements between outer indices; a multiple of 16 bytes unless outer is 1
  int box_inner;  // at most 128 bytes
  int box_outer;  // at most 256
};

CUtensorMap make_tensor_map(const TensorMap2d& matrix);

// A tensor of rows, in boxes of box_rows rows of one (batch, head) by 128 bytes of columns. A box
// has TensorMap2d's layout in shared memory. Rows and columns outside of the extents read as zero
// and are not written.
struct TensorMapRows {
  DType dtype;          // of 16 bits, or float32, which loads round to TF32
  const void* pointer;  // multiple of 16
  int64_t cols;         // contiguous
  // Of rows, heads and batches. Strides are in elements, multiples of 16 bytes unless it is 1.
  int64_t extent[3];
  int64_t stride[3];
  int box_rows;  // at most 256
};

CUtensorMap make_rows_tensor_map(const TensorMapRows& tensor);

// The im2col view of an NHWC image: boxes of box_pixels output pixels by box_channels, at one
// filter tap (tma_load_im2col_4d). In shared memory a box is box_pixels rows of 128 bytes, swizzled
// as above. Pairs are (height, width).
struct TensorMapIm2col {
  DType dtype;
  bool round_to_tf32;
  const void* pointer;  // multiple of 16
  int64_t batch;
  int64_t size[2];     // of the image
  int64_t channels;    // a multiple of 16 bytes
  int64_t pitch;       // elements between pixels, a multiple of 16 bytes; 0: channels
  int64_t windows[2];  // per image
  int stride[2];       // from one window to the next, at most 8
  int padding[2];      // before the image, at most 128, maybe negative
  int box_channels;    // at most 128 bytes
  int box_pixels;      // at most 1024
};

CUtensorMap make_im2col_tensor_map(const TensorMapIm2col& image);

}  // namespace warpwright
