#pragma once

#include <cstdint>

#include "common/dtype.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace warpwright {

enum class Codes { kInt8, kE4m3, kE5m2 };

// D[m, n] = row_scale[m] * col_scale[n] * (sum over k of A[m, k] * B[n, k]) + bias[n].
struct Product8BitParams {
  int64_t m;
  int64_t n;
  int64_t k;
  const void* a;    // (m, k) codes, contiguous along k
  const void* b;    // (n, k), the same
  int64_t a_pitch;  // bytes from row to row
  int64_t b_pitch;
  Codes a_codes;
  Codes b_codes;          // kInt8 if and only if a_codes is
  bool exact;             // of floats: sums move to float32 every 128 k
  const float* row_scale;  // (m), or one number if !scales_rows; null: 1
  const float* col_scale;  // (n), or one number if !scales_cols; null: 1
  bool scales_rows;
  bool scales_cols;
  const void* bias;  // (n) or null
  DType bias_type;
  void* d;     // (m, n), dense
  DType type;  // of D: float32, bfloat16, float16; of int8 codes also int32, without scales and bias
};

}  // namespace warpwright
