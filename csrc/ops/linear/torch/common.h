// Shared by the files of torch/ (linear and its forms with an activation): checks, matrices, and
// the step from them to the kernels.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <array>
#include <optional>
#include <tuple>

#include "host/float32_precision.h"
#include "host/sm90.h"
#include "ops/linear/linear.h"
#include "torch/autograd.h"
#include "torch/check_argument.h"
#include "torch/dispatch.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include <ATen/Context.h>

#include "torch/cuda.h"
#endif

namespace warpwright {

// The ops through the dispatcher.
namespace linear_ops {

using Gradients = std::tuple<Tensor, Tensor, Tensor>;  // of input, weight, bias

Tensor linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias);

// The weight's gradient reads `input`, and the input's gradient reads `weight`. Either may be
// undefined if that gradient is not wanted. float32_mask: of 16-bit operands, the gradients in
// float32.
Gradients linear_backward(const Tensor& grad_output, const OptionalTensor& input,
                          const OptionalTensor& weight, std::array<bool, 3> output_mask,
                          std::array<bool, 3> float32_mask = {false, false, false});

}  // namespace linear_ops

// ---- output shape and checks ----

c10::SymDimVector with_last_size(const Tensor& tensor, const c10::SymInt& last);

inline Tensor empty_of(c10::SymIntArrayRef sizes, const Tensor& like) {
  return at::empty_symint(sizes, like.options());
}

// Whether the kernels support the call: a matrix of weights, and no bias or one value per output
// feature.
bool is_plain_linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias);

// The other calls that native supports: a vector of weights, and a bias that broadcasts to the
// output.
Tensor linear_composed(const Tensor& input, const Tensor& weight, const OptionalTensor& bias);

void check_same_type(const Tensor& input, const Tensor& other, const char* op, const char* name);
void check_linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias);

// ---- CPU and CUDA ----

// A tensor with its leading dimensions folded, in memory where one direction is contiguous.
struct Matrix {
  Tensor owner;
  int64_t rows;
  int64_t cols;
  int64_t stride_row;
  int64_t stride_col;

  const void* data() const { return owner.const_data_ptr(); }
  Matrix transposed() const { return {owner, cols, rows, stride_col, stride_row}; }
};

// Checks that the operands of a linear op are in memory; returns a contiguous bias.
OptionalTensor linear_operands(const Tensor& input, const Tensor& weight,
                               const OptionalTensor& bias);

// Copies only if neither direction is contiguous, or the leading dimensions do not fold.
Matrix as_matrix(const Tensor& tensor);

// d (rows of a, rows of b) = a b^T + bias
GemmParams gemm_params(const Matrix& a, const Matrix& b, const OptionalTensor& bias, Tensor& d);

struct LinearCpu {
  void gemm(const GemmParams& p) const { gemm_cpu(p); }
  void gradients(const LinearGradients& g) const {
    if (g.input) gemm_cpu(*g.input);
    if (g.weight) gemm_cpu(*g.weight);
    if (g.bias) column_sum_cpu(*g.bias);
  }
};

#ifdef WARPWRIGHT_WITH_CUDA
// Which roundings of float32 operands are allowed: by our own setting if there is one, else by
// torch's.
inline void allow_tf32(GemmParams& p) {
  switch (float32_precision()) {
    case Float32Precision::kTorch:
      p.tf32 = at::globalContext().float32Precision(
                   at::Float32Backend::CUDA, at::Float32Op::MATMUL) == at::Float32Precision::TF32;
      break;
    case Float32Precision::kHighest:
      break;
    case Float32Precision::kHigh:
      p.tf32x3 = true;
      break;
    case Float32Precision::kMedium:
      p.tf32 = true;
      break;
  }
}

struct LinearCuda {
  cudaStream_t stream;
  at::TensorOptions bytes;

  explicit LinearCuda(const CudaCall& call, const Tensor& tensor)
      : stream(call.stream), bytes(tensor.options().dtype(at::kByte)) {}

  // Freed on return. The caching allocator reuses it only for later work of the same stream.
  Tensor workspace(int64_t size) const { return size > 0 ? at::empty({size}, bytes) : Tensor(); }
  static void* data(const Tensor& parts) {
    return parts.defined() ? parts.mutable_data_ptr() : nullptr;
  }

  void gemm(GemmParams p) const {
    allow_kernels(p);
    const LinearPlan plan = choose_linear(p, current_device_info());
    const Tensor parts = workspace(plan.workspace_bytes());
    launch_linear(p, plan, data(parts), stream);
  }

  void gradients(LinearGradients g) const {
    if (!head_gradients(g)) {
      if (g.input) allow_kernels(*g.input);
      if (g.weight) allow_kernels(*g.weight);
    }
    const LinearGradientsPlan plan = choose_linear_gradients(g, current_device_info());
    const Tensor parts = workspace(plan.workspace_bytes());
    launch_linear_gradients(g, plan, data(parts), stream);
  }

 private:
  static void allow_kernels(GemmParams& p) {
    allow_tf32(p);
    p.sm90 = sm90_path_available();
  }
};
#endif

// ---- Autograd ----

// The tensors that a product's gradients go to: its operands, or under autocast the tensors that
// they were cast from.
struct Sources {
  const Tensor& input;
  const Tensor& weight;
  const Tensor& bias;

  // Whose gradients are float32, by operands of type `type`.
  std::array<bool, 3> in_float32(at::ScalarType type) const {
    auto is_wider = [&](const Tensor& source) {
      return source.defined() && source.scalar_type() == at::kFloat && is_16bit(type);
    };
    return {is_wider(input), is_wider(weight), is_wider(bias)};
  }
};

inline bool requires_grad(const Tensor& tensor) {
  return tensor.defined() && tensor.requires_grad();
}

// linear and its node.
Tensor differentiable_linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                             const Sources& sources);

// The value of a product x W^T + x' W'^T + b. A term exists if its factors do.
Tensor sum_of_linears(const Tensor& x, const Tensor& weight, const Tensor& x2,
                      const Tensor& weight2, const Tensor& bias, const Tensor& like);

inline Tensor tangent_or_none(const Tensor& tensor) {
  return has_tangent(tensor) ? tangent(tensor) : Tensor();
}

}  // namespace warpwright
