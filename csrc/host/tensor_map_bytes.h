// TMA descriptors of bytes, in boxes that keep their layout.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace warpwright {

// A matrix, read in boxes: box_outer rows of box_inner bytes, one after another. Bytes outside of
// the extents read as zero. The inner extent, the pitch and box_inner are multiples of 16.
struct TensorMapBytes {
  const void* pointer;  // multiple of 16
  int64_t inner;        // bytes
  int64_t outer;
  int64_t pitch;  // bytes; no meaning if outer is 1
  int box_inner;  // bytes, at most 2048
  int box_outer;  // at most 256
};

CUtensorMap make_bytes_tensor_map(const TensorMapBytes& matrix);

}  // namespace warpwright
