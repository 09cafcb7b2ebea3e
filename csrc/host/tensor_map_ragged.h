// A tensor map of rows in which a box ends where a sequence of the rows ends.
#pragma once

#include "host/tensor_map.h"

namespace warpwright {

// Extent of the rows in such a map, and its last coordinate.
constexpr int kRaggedEnd = 1 << 30;

// Packed rows of sequences (rows, heads, cols), read or written in boxes of box_rows rows of one
// head by 64 columns. A box has TensorMap2d's layout in shared memory. Five coordinates name row r
// of a sequence that has n rows and ends before row e of all: (column, kRaggedEnd - n + r, head, e,
// kRaggedEnd). Rows from n on are past the extent of the second dimension, so they read as zero and
// are not written. The other two dimensions bring the address back: their strides are a row's, and
// 2^34 elements less a row's. 2^30 times 2^34 elements of 2 bytes are 0 modulo 2^64.
struct TensorMapRagged {
  DType dtype;                      // of 16 bits
  const void* pointer;              // multiple of 16
  int64_t cols;                     // contiguous
  int64_t heads;                    // at least 1
  int64_t row_stride, head_stride;  // elements, multiples of 8 and below 2^34
  int box_rows;                     // at most 256
};

CUtensorMap make_ragged_tensor_map(const TensorMapRagged& tensor);

}  // namespace warpwright
