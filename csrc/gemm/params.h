// The parameters of a matrix product: D (m, n) = A (m, k) B^T (n, k) + bias.
#pragma once

#include <cstdint>
#include <utility>

#include "common/activation.h"
#include "common/dtype.h"
#include "tile/major.h"

namespace warpwright {

inline bool rows_are_aligned(const void* data, int64_t pitch_bytes, uintptr_t alignment) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  return (address | static_cast<uintptr_t>(pitch_bytes)) % alignment == 0;
}

// An operand with one contiguous direction. mn is m of A and n of B.
struct Operand {
  const void* data;  // element (mn, k) at data[mn * stride_mn + k * stride_k]; one stride is 1
  DType dtype;
  int64_t stride_mn;
  int64_t stride_k;
  Major major;   // the contiguous direction; its lines are called rows
  bool aligned;  // rows start at multiples of 16 bytes, as TMA needs

  // Elements from one row to the next.
  int64_t pitch() const { return major == Major::kK ? stride_mn : stride_k; }
  bool rows_start_at(uintptr_t alignment) const {
    return rows_are_aligned(data, pitch() * dtype_size(dtype), alignment);
  }
};

inline Operand make_operand(const void* data, DType dtype, int64_t stride_mn, int64_t stride_k) {
  Operand operand{data, dtype, stride_mn, stride_k, stride_k == 1 ? Major::kK : Major::kMN, false};
  operand.aligned = operand.rows_start_at(16);
  return operand;
}

// Which neighbouring launches of this call the kernel may overlap: they are independent of it.
struct Overlap {
  bool next;
  bool previous;
};

// D[m, n] = activation(sum over k of A[m, k] * B[n, k] + bias[n]).
struct GemmParams {
  int64_t m;
  int64_t n;
  int64_t k;
  Operand a;
  Operand b;         // of a's dtype
  const void* bias;  // (n) or null
  void* d;           // (m, n), row-major
  int64_t d_pitch;   // elements from one row of D to the next; 0: n

  bool tf32;    // float operands may be rounded to TF32
  bool tf32x3;  // or each may be split into the sum of two TF32 numbers
  bool sm90;    // the sm_90a kernels run here: sm90_path_available()

  Activation activation;
  void* preactivation;  // laid out like d: D before the activation; or null. D is dense then

  // For gradients in float32 of 16-bit operands, and for gradients that arrive in chunks and are
  // rounded once, at the end. Each element has one writer, so the order of the calls is the order
  // of the sum.
  bool accum_d;     // D has the accumulator's type (float for 16-bit operands), without a bias
  bool accumulate;  // D += A B^T, without bias and activation. 16-bit D: sm_90a only, each call
                    // rounds

  // D is (n, m), row-major: the layout of a weight that a layer reads transposed. Only if
  // stores_transposed(); transposed() has the same D from every kernel.
  bool transposed_d;

  void* row_sums;  // (m), of D's type: sum over k of A[m, k], written if GemmPlan::sums_rows; or
                   // null
  Overlap overlap;

  DType dtype() const { return a.dtype; }
};

// Nothing is launched for it.
inline bool is_empty(const GemmParams& p) { return p.m == 0 || p.n == 0; }

// D as it lies in memory.
inline int64_t d_rows(const GemmParams& p) { return p.transposed_d ? p.n : p.m; }
inline int64_t d_cols(const GemmParams& p) { return p.transposed_d ? p.m : p.n; }
inline int64_t d_pitch(const GemmParams& p) { return p.d_pitch != 0 ? p.d_pitch : d_cols(p); }

// The product D^T = B A^T, which writes the same memory. Without bias, activation and row sums.
inline GemmParams transposed(GemmParams p) {
  std::swap(p.m, p.n);
  std::swap(p.a, p.b);
  p.transposed_d = !p.transposed_d;
  p.row_sums = nullptr;
  return p;
}

}  // namespace warpwright
