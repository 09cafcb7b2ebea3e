// Tensors as the operands of a product, and sums of products.
#include "ops/linear/torch/common.h"

namespace warpwright {

OptionalTensor linear_operands(const Tensor& input, const Tensor& weight,
                               const OptionalTensor& bias) {
  check_has_storage(input, "linear: input");
  check_has_storage(weight, "linear: weight");
  if (!bias.has_value() || !bias->defined()) return bias;
  check_has_storage(*bias, "linear: bias");
  return bias->contiguous();
}

Matrix as_matrix(const Tensor& tensor) {
  Matrix m{tensor, 1, tensor.size(-1), 0, 1};
  for (int64_t d = 0; d + 1 < tensor.dim(); ++d) m.rows *= tensor.size(d);
  if (tensor.dim() == 2) {
    m.stride_row = tensor.stride(0);
    m.stride_col = tensor.stride(1);
  } else if (tensor.is_contiguous()) {
    m.stride_row = m.cols;
  } else {
    m.owner = tensor.reshape({m.rows, m.cols});
    m.stride_row = m.owner.stride(0);
    m.stride_col = m.owner.stride(1);
  }
  const auto strides = matrix_strides(m.rows, m.cols, {m.stride_row, m.stride_col});
  if (!strides) m.owner = m.owner.contiguous();
  m.stride_row = strides ? strides->row : m.cols;
  m.stride_col = strides ? strides->col : 1;
  return m;
}

GemmParams gemm_params(const Matrix& a, const Matrix& b, const OptionalTensor& bias, Tensor& d) {
  GemmParams p{};
  const DType dtype = dtype_of(a.owner);
  p.m = a.rows;
  p.n = b.rows;
  p.k = a.cols;
  p.a = make_operand(a.data(), dtype, a.stride_row, a.stride_col);
  p.b = make_operand(b.data(), dtype, b.stride_row, b.stride_col);
  p.bias = bias.has_value() && bias->defined() ? bias->const_data_ptr() : nullptr;
  p.d = d.mutable_data_ptr();
  return p;
}

Tensor sum_of_linears(const Tensor& x, const Tensor& weight, const Tensor& x2,
                      const Tensor& weight2, const Tensor& bias, const Tensor& like) {
  const bool first = x.defined() && weight.defined();
  const bool second = x2.defined() && weight2.defined();
  const OptionalTensor b = optional_if_defined(bias);
  if (first && second) {
    return linear_ops::linear(x, weight, b).add(linear_ops::linear(x2, weight2, {}));
  }
  if (first) return linear_ops::linear(x, weight, b);
  if (second) return linear_ops::linear(x2, weight2, b);
  return bias.defined() ? bias.expand_symint(like.sym_sizes()) : Tensor();
}

}  // namespace warpwright
