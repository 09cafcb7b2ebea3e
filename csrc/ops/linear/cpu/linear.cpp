// The matrix products call ATen's (MKL, oneDNN), which a kernel of ours would not beat.
#include <ATen/ops/addmm.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>

#include "cpu/types.h"
#include "ops/linear/activation.h"

namespace warpwright {
namespace {

at::ScalarType scalar_type(DType dtype) {
  at::ScalarType type = at::kFloat;
  for_cpu_dtype(dtype, [&]<class T>() { type = c10::CppTypeToScalarType<T>::value; });
  return type;
}

// A tensor over memory that another tensor owns.
at::Tensor over(const void* data, at::IntArrayRef sizes, at::IntArrayRef strides, DType dtype) {
  return at::from_blob(const_cast<void*>(data), sizes, strides,
                       at::TensorOptions().dtype(scalar_type(dtype)));
}

}  // namespace

void gemm_cpu(const GemmParams& p) {
  if (p.m == 0 || p.n == 0) return;
  const DType dtype = p.dtype();
  const at::Tensor a = over(p.a.data, {p.m, p.k}, {p.a.stride_mn, p.a.stride_k}, dtype);
  const at::Tensor b = over(p.b.data, {p.k, p.n}, {p.b.stride_k, p.b.stride_mn}, dtype);
  if (p.transposed_d) return gemm_cpu(transposed(p));
  if (p.accum_d) {
    const DType type = dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
    at::Tensor sum = over(p.d, {p.m, p.n}, {d_pitch(p), 1}, type);
    const at::Tensor wide_a = a.to(sum.scalar_type()), wide_b = b.to(sum.scalar_type());
    if (p.accumulate) {
      at::addmm_out(sum, sum, wide_a, wide_b);
    } else {
      at::mm_out(sum, wide_a, wide_b);
    }
    return;
  }
  void* sums = p.preactivation != nullptr ? p.preactivation : p.d;
  at::Tensor d = over(sums, {p.m, p.n}, {d_pitch(p), 1}, dtype);
  if (p.bias != nullptr) {
    at::addmm_out(d, over(p.bias, {p.n}, {1}, dtype), a, b);
  } else {
    at::mm_out(d, a, b);
  }
  if (p.activation != Activation::kNone) {
    linear_activation_forward_cpu({dtype, p.activation, p.m * p.n, sums, p.d});
  }
}

void column_sum_cpu(const ColumnSumParams& p) {
  const at::Tensor matrix = over(p.matrix, {p.rows, p.cols}, {p.stride_row, p.stride_col}, p.dtype);
  at::Tensor sum = over(p.sum, {p.cols}, {1}, p.dtype);
  at::sum_out(sum, matrix, /*dim=*/0);
}

}  // namespace warpwright
