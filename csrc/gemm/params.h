// What a matrix product and a column sum are asked for.
#pragma once

#include <cstdint>
#include <optional>

#include "host/activation.h"
#include "host/dtype.h"

namespace warpwright {

// Kernels of one call that have nothing to do with each other may run at the same time: the next
// with this one, and this one with the previous.
struct Beside {
  bool next;
  bool previous;
};

// D[m, n] = activation(sum over k of A[m, k] * B[n, k] + bias[n]).
struct GemmParams {
  DType dtype;
  bool tf32;    // float operands may be rounded to TF32
  bool tf32x3;  // else each may be the sum of two TF32 numbers
  bool sm90;    // the sm_90a kernels run here: sm90_path_available()
  int64_t m;
  int64_t n;
  int64_t k;
  const void* a;  // element (m, k) at a[m * a_stride_m + k * a_stride_k]; one of the two is 1
  int64_t a_stride_m;
  int64_t a_stride_k;
  const void* b;  // element (n, k) at b[n * b_stride_n + k * b_stride_k]; one of the two is 1
  int64_t b_stride_n;
  int64_t b_stride_k;
  const void* bias;  // (n) or null
  void* d;           // (m, n), row-major
  void* workspace;   // gemm_workspace_bytes(), or null if that is 0

  Activation activation;
  void* preactivation;  // laid out like d: D before the activation; or null. D is dense then

  // For gradients that come in chunks and are rounded once, at their end. One writer an element:
  // the sums come in the order of the calls.
  bool accum_d;  // D is of the accumulator's type: float for 16-bit operands; without a bias
  // D += A B^T in place of D =, without a bias or an activation; on sm_90a also in 16 bits, rounded
  // every time.
  bool accumulate;

  int64_t d_pitch;  // elements from a row of D to the next; 0: n

  void* row_sums;  // (m): sum over k of A[m, k], where can_sum_rows(); or null
  Beside beside;
};

// Nothing is launched for it.
inline bool is_empty(const GemmParams& p) { return p.m == 0 || p.n == 0; }

inline int64_t d_pitch(const GemmParams& p) { return p.d_pitch != 0 ? p.d_pitch : p.n; }

// sum[col] = sum over rows of matrix[row * stride_row + col * stride_col].
struct ColumnSumParams {
  DType dtype;
  int64_t rows;
  int64_t cols;
  const void* matrix;
  int64_t stride_row;
  int64_t stride_col;
  void* sum;        // (cols)
  void* workspace;  // column_sum_workspace_bytes(), or null if that is 0
  bool beside_previous;
};

// What a linear's backward asks for; each may be missing.
struct LinearGradients {
  std::optional<GemmParams> input;
  std::optional<GemmParams> weight;
  std::optional<ColumnSumParams> bias;
};

}  // namespace warpwright
