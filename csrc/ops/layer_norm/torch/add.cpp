// add_layer_norm, add_rms_norm and their backwards: a residual addition and the norm that reads its
// sum. CPU, CUDA, Meta and registration.
#include <ATen/ops/add.h>

#include "ops/layer_norm/torch/common.h"

namespace warpwright {
namespace {

using Tensors4 = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Mask3 = std::array<bool, 3>;
using Mask4 = std::array<bool, 4>;

// `residual` has the type of the sum; `input` has it too, or 16 bits next to float32.
struct AddNormCall {
  const Tensor &input, &residual;
  SymIntArrayRef shape;
  Tensor weight, bias;
  double eps;
  bool centered;
  OptionalType dtype;

  const char* name_of_input() const {
    return centered ? "add_layer_norm: input" : "add_rms_norm: input";
  }
  LayerNormCall norm(const Tensor& branch, const Tensor& sum) const {
    return {residual, shape, weight, bias, eps, centered, dtype, branch, sum};
  }
};

struct AddNormBackwardCall {
  const Tensor &grad_sum, &grad_output, &sum;
  SymIntArrayRef shape;
  Tensor weight, mean, rstd;
  at::ScalarType dtype;  // of the forward's input
  Mask4 wanted;          // residual, input, weight, bias
  bool centered;

  const char* name_of_grad_sum() const {
    return centered ? "add_layer_norm_backward: grad_sum" : "add_rms_norm_backward: grad_sum";
  }
  bool has_copy() const { return wanted[1] && dtype != sum.scalar_type(); }
  LayerNormBackwardCall norm() const {
    return {
        grad_output, sum, shape, weight, mean, rstd, {wanted[0] || wanted[1], wanted[2], wanted[3]},
        centered};
  }
};

// ---- checks ----

void check_add(const AddNormCall& call) {
  const Tensor &input = call.input, &residual = call.residual;
  const char* name = call.name_of_input();
  check_norm_input(residual, call.centered);
  TORCH_CHECK(is_type_beside(input.scalar_type(), residual.scalar_type()), name, ": expected ",
              residual.scalar_type(),
              residual.scalar_type() == at::kFloat ? ", BFloat16 or Half" : ", the residual's",
              ", got ", input.scalar_type());
  check_argument(input, name, residual.sym_sizes(), input.scalar_type(), residual);
  check_forward(call.norm(Tensor(), Tensor()));
}

void check_add_backward(const AddNormBackwardCall& call) {
  const Tensor& sum = call.sum;
  check_backward(call.norm());
  check_argument(call.grad_sum, call.name_of_grad_sum(), sum.sym_sizes(), sum.scalar_type(), sum);
  check_branch_type(call.dtype, sum, call.centered);
}

// ---- calls ----

// Sum, output, mean and rstd; the mean of add_rms_norm is undefined. `branch` returns the input as
// `run` reads it, which gets the parameters and the sum. Both are called after the checks.
template <class Branch, class Run>
Tensors4 add_forward_with(const AddNormCall& call, Branch&& branch, Run&& run) {
  check_add(call);
  check_has_storage(call.input, call.name_of_input());
  check_has_storage(call.residual,
                    call.centered ? "add_layer_norm: residual" : "add_rms_norm: residual");
  Tensor sum = at::empty(call.residual.sizes(), call.residual.options());
  auto [output, mean, rstd] =
      forward_with(call.norm(branch(), sum), [&](const LayerNormParams& p) { run(p, sum); });
  return {sum, output, mean, rstd};
}

// The gradient of the sum, its copy in the type of `input` if that differs, and the gradients of
// weight and bias.
template <class Run>
Tensors4 add_backward_with(const AddNormBackwardCall& call, Run&& run) {
  check_add_backward(call);
  check_has_storage(call.grad_sum, call.name_of_grad_sum());
  LayerNormBackwardCall norm = call.norm();
  if (norm.wanted[0]) norm.grad_sum = call.grad_sum;
  if (call.has_copy()) {
    norm.grad_branch = at::empty(call.sum.sizes(), call.sum.options().dtype(call.dtype));
  }
  auto [dx, dw, db] = backward_with(norm, run);
  return {dx, norm.grad_branch, dw, db};
}

AddNormCall add_layer_norm_call(const Tensor& input, const Tensor& residual, SymIntArrayRef shape,
                                const OptionalTensor& weight, const OptionalTensor& bias,
                                double eps, OptionalType dtype) {
  return {input, residual, shape, value_or_undefined(weight), value_or_undefined(bias),
          eps,   true,     dtype};
}
AddNormCall add_rms_norm_call(const Tensor& input, const Tensor& residual, SymIntArrayRef shape,
                              const OptionalTensor& weight, std::optional<double> eps,
                              OptionalType dtype) {
  return {input, residual, shape, value_or_undefined(weight), Tensor(), rms_eps(eps, residual),
          false, dtype};
}
AddNormBackwardCall add_layer_norm_backward_call(const Tensor& grad_sum, const Tensor& grad_output,
                                                 const Tensor& sum, SymIntArrayRef shape,
                                                 const OptionalTensor& weight, const Tensor& mean,
                                                 const Tensor& rstd, at::ScalarType dtype,
                                                 Mask4 wanted) {
  return {grad_sum, grad_output, sum,   shape,  value_or_undefined(weight),
          mean,     rstd,        dtype, wanted, true};
}
AddNormBackwardCall add_rms_norm_backward_call(const Tensor& grad_sum, const Tensor& grad_output,
                                               const Tensor& sum, SymIntArrayRef shape,
                                               const OptionalTensor& weight, const Tensor& rstd,
                                               at::ScalarType dtype, Mask3 wanted) {
  return {grad_sum,
          grad_output,
          sum,
          shape,
          value_or_undefined(weight),
          Tensor(),
          rstd,
          dtype,
          {wanted[0], wanted[1], wanted[2], false},
          false};
}

Tensors3 without_mean(Tensors4&& results) {
  return {std::get<0>(results), std::get<1>(results), std::get<3>(results)};
}
Tensors3 without_bias(Tensors4&& results) {
  return {std::get<0>(results), std::get<1>(results), std::get<2>(results)};
}

// ---- CPU ----

Tensors4 add_forward_cpu(const AddNormCall& call) {
  return add_forward_with(
      call, [&] { return call.input.to(call.residual.scalar_type()); },
      [](const LayerNormParams& p, const Tensor&) { layer_norm_cpu(p); });
}
Tensors4 add_backward_cpu(const AddNormBackwardCall& call) {
  auto results = add_backward_with(call, layer_norm_backward_cpu);
  if (call.has_copy()) std::get<1>(results).copy_(std::get<0>(results));
  return results;
}

// ---- CUDA ----

#ifdef WARPWRIGHT_WITH_CUDA
// The kernels know one 16-bit type next to the sum's.
bool have_one_type(DType sum, DType first, DType second) {
  return first == sum || second == sum || first == second;
}

// Rows that the fused kernel does not take are added by ATen first.
Tensors4 add_forward_cuda(const AddNormCall& call) {
  const CudaCall cuda(call.residual);
  const auto branch = [&]() -> const Tensor& { return call.input; };
  return add_forward_with(call, branch, [&](const LayerNormParams& given, Tensor& sum) {
    LayerNormParams p = given;
    if (adds_in_kernel(p, current_device_info()) &&
        have_one_type(p.dtype, p.output_dtype, p.branch_dtype)) {
      return launch_add_layer_norm(p, choose_add_layer_norm(p, current_device_info()), cuda.stream);
    }
    at::add_out(sum, call.residual, call.input);
    p.input = p.sum;
    p.input_stride = p.cols;
    p.branch = nullptr;
    run_forward_cuda(p, cuda.stream);
  });
}

Tensors4 add_backward_cuda(const AddNormBackwardCall& call) {
  const CudaCall cuda(call.sum);
  bool is_added = false;
  auto results = add_backward_with(call, [&](const LayerNormBackwardParams& given) {
    LayerNormBackwardParams p = given;
    is_added = p.grad_sum != nullptr && adds_in_kernel(p, current_device_info()) &&
               have_one_type(p.dtype, p.grad_dtype, p.branch_dtype);
    if (!is_added) {
      p.grad_sum = nullptr;
      return run_backward_cuda(p, call.sum, cuda.stream);
    }
    const LayerNormBackwardPlan plan = choose_add_layer_norm_backward(p, current_device_info());
    const Tensor workspace =
        at::empty({plan.workspace_bytes(p)}, call.sum.options().dtype(at::kByte));
    launch_add_layer_norm_backward(p, plan, workspace.mutable_data_ptr(), cuda.stream);
  });
  Tensor& grad = std::get<0>(results);
  if (!is_added && grad.defined()) {
    grad.add_(call.grad_sum);
    if (call.has_copy()) std::get<1>(results).copy_(grad);
  }
  return results;
}
#endif

// ---- Meta ----

Tensors4 add_forward_meta(const AddNormCall& call) {
  check_add(call);
  const Tensor& residual = call.residual;
  auto [output, mean, rstd] = forward_meta(call.norm(Tensor(), Tensor()));
  return {at::empty_symint(residual.sym_sizes(), residual.options()),
          at::empty_symint(residual.sym_sizes(), output.options()), mean, rstd};
}
Tensors4 add_backward_meta(const AddNormBackwardCall& call) {
  check_add_backward(call);
  auto [dx, dw, db] = backward_meta(call.norm());
  const Tensor copy =
      call.has_copy() ? at::empty_symint(call.sum.sym_sizes(), call.sum.options().dtype(call.dtype))
                      : Tensor();
  return {dx, copy, dw, db};
}

// ---- the operators of one key, from its forward and backward ----

template <auto kForward, auto kBackward>
struct AddNorm {
  static Tensors4 layer_norm(const Tensor& input, const Tensor& residual, SymIntArrayRef shape,
                             const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                             OptionalType dtype) {
    return kForward(add_layer_norm_call(input, residual, shape, weight, bias, eps, dtype));
  }
  static Tensors3 rms_norm(const Tensor& input, const Tensor& residual, SymIntArrayRef shape,
                           const OptionalTensor& weight, std::optional<double> eps,
                           OptionalType dtype) {
    return without_mean(kForward(add_rms_norm_call(input, residual, shape, weight, eps, dtype)));
  }
  static Tensors4 layer_norm_backward(const Tensor& grad_sum, const Tensor& grad_output,
                                      const Tensor& sum, SymIntArrayRef shape,
                                      const OptionalTensor& weight, const Tensor& mean,
                                      const Tensor& rstd, at::ScalarType dtype, Mask4 wanted) {
    return kBackward(add_layer_norm_backward_call(grad_sum, grad_output, sum, shape, weight, mean,
                                                  rstd, dtype, wanted));
  }
  static Tensors3 rms_norm_backward(const Tensor& grad_sum, const Tensor& grad_output,
                                    const Tensor& sum, SymIntArrayRef shape,
                                    const OptionalTensor& weight, const Tensor& rstd,
                                    at::ScalarType dtype, Mask3 wanted) {
    return without_bias(kBackward(add_rms_norm_backward_call(grad_sum, grad_output, sum, shape,
                                                             weight, rstd, dtype, wanted)));
  }

  static void add_to(torch::Library& m) {
    m.impl("add_layer_norm", layer_norm);
    m.impl("add_rms_norm", rms_norm);
    m.impl("add_layer_norm_backward", layer_norm_backward);
    m.impl("add_rms_norm_backward", rms_norm_backward);
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def(
      "add_layer_norm(Tensor input, Tensor residual, SymInt[] normalized_shape, Tensor? weight, "
      "Tensor? bias, float eps, ScalarType? dtype=None) "
      "-> (Tensor sum, Tensor output, Tensor mean, Tensor rstd)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "add_rms_norm(Tensor input, Tensor residual, SymInt[] normalized_shape, Tensor? weight, "
      "float? eps, ScalarType? dtype=None) -> (Tensor sum, Tensor output, Tensor rstd)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "add_layer_norm_backward(Tensor grad_sum, Tensor grad_output, Tensor sum, "
      "SymInt[] normalized_shape, Tensor? weight, Tensor mean, Tensor rstd, ScalarType dtype, "
      "bool[4] output_mask) -> (Tensor, Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "add_rms_norm_backward(Tensor grad_sum, Tensor grad_output, Tensor sum, "
      "SymInt[] normalized_shape, Tensor? weight, Tensor rstd, ScalarType dtype, "
      "bool[3] output_mask) -> (Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) { AddNorm<add_forward_cpu, add_backward_cpu>::add_to(m); }
#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) { AddNorm<add_forward_cuda, add_backward_cuda>::add_to(m); }
#endif
TORCH_LIBRARY_IMPL(warpwright, Meta, m) { AddNorm<add_forward_meta, add_backward_meta>::add_to(m); }

}  // namespace warpwright
