// linear and linear_backward on every dispatch key.
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>

#include "ops/linear/torch/autocast.h"
#include "ops/linear/torch/common.h"

namespace warpwright {

namespace linear_ops {

Tensor linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  static const auto op =
      find_op<Tensor(const Tensor&, const Tensor&, const OptionalTensor&)>("warpwright::linear");
  return op.call(input, weight, bias);
}

Gradients linear_backward(const Tensor& grad_output, const OptionalTensor& input,
                          const OptionalTensor& weight, std::array<bool, 3> output_mask,
                          std::array<bool, 3> float32_mask) {
  static const auto op =
      find_op<Gradients(const Tensor&, const OptionalTensor&, const OptionalTensor&,
                        std::array<bool, 3>, std::array<bool, 3>)>("warpwright::linear_backward");
  return op.call(grad_output, input, weight, output_mask, float32_mask);
}

}  // namespace linear_ops

// ---- output shape and checks ----

c10::SymDimVector with_last_size(const Tensor& tensor, const c10::SymInt& last) {
  const auto sizes = tensor.sym_sizes();
  c10::SymDimVector result(sizes.begin(), sizes.end());
  result.back() = last;
  return result;
}

// Native adds the bias in a separate step if the input does not fold into a matrix. The bias is
// then cast to the product's type.
static bool native_adds_bias(const Tensor& input, const Tensor& bias) {
  return bias.scalar_type() != input.scalar_type() && input.dim() > 2 && !input.is_contiguous();
}

bool is_plain_linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  return input.dim() >= 1 && weight.dim() == 2 &&
         (!bias.has_value() || !bias->defined() ||
          (bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0) &&
           !native_adds_bias(input, *bias)));
}

Tensor linear_composed(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  TORCH_CHECK(input.dim() >= 1 && weight.dim() >= 1,
              "linear: both arguments to linear need to be at least 1D, but they are ", input.dim(),
              "D and ", weight.dim(), "D");
  TORCH_CHECK(weight.dim() <= 2, "linear: weight: t() expects a tensor with <= 2 dimensions, got ",
              weight.dim(), "D");
  const bool has_bias = bias.has_value() && bias->defined();
  if (has_bias) check_plain_storage(*bias, "linear: bias");
  if (has_bias && native_adds_bias(input, *bias)) return at::linear(input, weight, bias);
  if (weight.dim() == 1) {
    TORCH_CHECK(!has_bias, "linear: weight: mat2 must be a matrix when there is a bias, got 1-D");
    return linear_ops::linear(input, weight.unsqueeze(0), {}).squeeze(-1);
  }
  if (bias->sym_numel() == 1 && bias->dim() <= 1) {
    return linear_ops::linear(input, weight,
                              bias->reshape({1}).expand_symint({weight.sym_size(0)}));
  }
  const Tensor output = linear_ops::linear(input, weight, {});
  return output.add(bias->expand_symint(output.sym_sizes()));
}

void check_same_type(const Tensor& input, const Tensor& other, const char* op, const char* name) {
  TORCH_CHECK(input.scalar_type() == other.scalar_type(), op, ": ", name,
              ": expected the same dtype as the other operands, but got ", input.scalar_type(),
              " and ", other.scalar_type());
  TORCH_CHECK(input.device() == other.device(), op, ": ", name,
              ": Expected all tensors to be on the same device, but got ", other.device(),
              " beside ", input.device());
}

void check_linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  check_same_type(input, weight, "linear", "weight");
  if (bias.has_value() && bias->defined()) check_same_type(input, *bias, "linear", "bias");
  const auto features = input.sym_size(-1);
  TORCH_CHECK(features == weight.sym_size(1), "linear: input: expected ", weight.sym_size(1),
              " features, got ", features, ": mat1 and mat2 shapes cannot be multiplied (",
              input.dim() == 1 ? c10::SymInt(1)
                               : input.sym_numel() / (features == 0 ? c10::SymInt(1) : features),
              "x", features, " and ", weight.sym_size(1), "x", weight.sym_size(0), ")");
}

namespace {

using linear_ops::Gradients;
using OutputMask = std::array<bool, 3>;

void check_linear_backward(const Tensor& grad_output, const OptionalTensor& input,
                           const OptionalTensor& weight, OutputMask mask, OutputMask float32_mask) {
  TORCH_CHECK(grad_output.dim() >= 1, "linear_backward: grad_output: expected at least 1D, got 0D");
  TORCH_CHECK(float32_mask == OutputMask{} || is_16bit(grad_output.scalar_type()),
              "linear_backward: float32_mask: expected 16-bit operands, got ",
              grad_output.scalar_type());
  if (mask[0]) {
    TORCH_CHECK(weight.has_value() && weight->dim() == 2,
                "linear_backward: weight: expected a matrix for the gradient of input");
    check_same_type(grad_output, *weight, "linear_backward", "weight");
    TORCH_CHECK(weight->sym_size(0) == grad_output.sym_size(-1),
                "linear_backward: weight: expected ", grad_output.sym_size(-1), " rows, got ",
                weight->sym_size(0));
  }
  if (mask[1]) {
    TORCH_CHECK(input.has_value() && input->dim() == grad_output.dim(),
                "linear_backward: input: expected as many dimensions as grad_output has");
    check_same_type(grad_output, *input, "linear_backward", "input");
    TORCH_CHECK(with_last_size(*input, 0) == with_last_size(grad_output, 0),
                "linear_backward: input: expected leading sizes of ", grad_output.sym_sizes(),
                ", got ", input->sym_sizes());
  }
}

// A weight may be the transpose of the layer's parameter, as in transformers' Conv1D. The gradient
// then gets the weight's layout, so that autograd does not copy it. A 16-bit gradient keeps its
// rows: otherwise its product could not sum the bias gradient.
bool wants_transposed_gradient(const Tensor& grad_output, const OptionalTensor& weight,
                               bool float32) {
  if (!weight.has_value() || !weight->defined()) return false;
  if (!float32 && is_16bit(grad_output.scalar_type())) return false;
  return weight->dim() == 2 && !weight->is_contiguous() && weight->t().is_contiguous();
}

Gradients empty_gradients(const Tensor& grad_output, const OptionalTensor& input,
                          const OptionalTensor& weight, OutputMask mask, OutputMask float32_mask) {
  auto empty = [&](c10::SymIntArrayRef sizes, bool float32) {
    const auto options = grad_output.options();
    return at::empty_symint(sizes, float32 ? options.dtype(at::kFloat) : options);
  };
  const auto out = grad_output.sym_size(-1);
  Gradients result;
  if (mask[0]) {
    std::get<0>(result) = empty(with_last_size(grad_output, weight->sym_size(1)), float32_mask[0]);
  }
  if (mask[1]) {
    const auto in = input->sym_size(-1);
    std::get<1>(result) = wants_transposed_gradient(grad_output, weight, float32_mask[1])
                              ? empty({in, out}, float32_mask[1]).t()
                              : empty({out, in}, float32_mask[1]);
  }
  if (mask[2]) std::get<2>(result) = empty({out}, float32_mask[2]);
  return result;
}

// ---- CPU and CUDA ----

template <class Runner>
Tensor linear_with(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                   const Runner& runner) {
  if (!is_plain_linear(input, weight, bias)) return linear_composed(input, weight, bias);
  check_linear(input, weight, bias);
  // Integers and complex numbers have no kernel of ours.
  if (!is_floating(input.scalar_type())) return at::linear(input, weight, bias);
  const OptionalTensor dense_bias = linear_operands(input, weight, bias);
  Tensor output = empty_of(with_last_size(input, weight.sym_size(0)), input);
  runner.gemm(gemm_params(as_matrix(input), as_matrix(weight), dense_bias, output));
  return output;
}

Gradients native_linear_backward(const Tensor& grad_output, const OptionalTensor& input,
                                 const OptionalTensor& weight, OutputMask mask) {
  const Matrix dy = as_matrix(grad_output);
  const Tensor dy_matrix = grad_output.reshape({dy.rows, dy.cols});
  Gradients result;
  if (mask[0]) {
    std::get<0>(result) = at::mm(dy_matrix, weight->conj())
                              .view_symint(with_last_size(grad_output, weight->sym_size(1)));
  }
  if (mask[1]) {
    const Tensor x = input->reshape({dy.rows, input->size(-1)});
    std::get<1>(result) = at::mm(dy_matrix.t(), x.conj());
  }
  if (mask[2]) std::get<2>(result) = dy_matrix.sum(0, /*keepdim=*/false, grad_output.scalar_type());
  return result;
}

template <class Runner>
Gradients linear_backward_with(const Tensor& grad_output, const OptionalTensor& input,
                               const OptionalTensor& weight, OutputMask mask,
                               OutputMask float32_mask, const Runner& runner) {
  check_has_storage(grad_output, "linear_backward: grad_output");
  if (mask[0]) check_has_storage(*weight, "linear_backward: weight");
  if (mask[1]) check_has_storage(*input, "linear_backward: input");
  if (!is_floating(grad_output.scalar_type())) {
    return native_linear_backward(grad_output, input, weight, mask);
  }
  Gradients result = empty_gradients(grad_output, input, weight, mask, float32_mask);
  auto& [dx, dw, db] = result;
  // The matrices own any copies.
  const Matrix dy = as_matrix(grad_output);
  Matrix w, x;
  LinearGradients gradients;
  if (mask[0]) {
    w = as_matrix(*weight).transposed();
    gradients.input = gemm_params(dy, w, {}, dx);
    gradients.input->accum_d = float32_mask[0];
  }
  if (mask[1]) {
    x = as_matrix(*input).transposed();
    gradients.weight = gemm_params(dy.transposed(), x, {}, dw);
    gradients.weight->accum_d = float32_mask[1];
    gradients.weight->transposed_d = !dw.is_contiguous();
  }
  if (mask[2]) {
    gradients.bias = ColumnSumParams{.dtype = dtype_of(grad_output),
                                     .rows = dy.rows,
                                     .cols = dy.cols,
                                     .matrix = dy.data(),
                                     .stride_row = dy.stride_row,
                                     .stride_col = dy.stride_col,
                                     .sum = db.mutable_data_ptr(),
                                     .wide_sum = float32_mask[2]};
  }
  runner.gradients(gradients);
  return result;
}

// ATen's product takes the tensors themselves: pointers and strides would have to become tensors
// again, half of the time of a small product.
Tensor linear_cpu_kernel(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  if (!is_plain_linear(input, weight, bias)) return linear_composed(input, weight, bias);
  check_linear(input, weight, bias);
  if (!is_floating(input.scalar_type())) return at::linear(input, weight, bias);
  linear_operands(input, weight, bias);
  const bool has_bias = bias.has_value() && bias->defined();
  const bool is_matrix = input.dim() == 2;
  const Tensor rows = is_matrix ? input : input.reshape({as_matrix(input).rows, input.size(-1)});
  Tensor output = has_bias ? at::addmm(*bias, rows, weight.t()) : at::mm(rows, weight.t());
  return is_matrix ? output : output.view_symint(with_last_size(input, weight.sym_size(0)));
}
// ATen has no 16-bit product with a float32 result: the gradients are widened after it.
Gradients linear_backward_cpu_kernel(const Tensor& grad_output, const OptionalTensor& input,
                                     const OptionalTensor& weight, OutputMask mask,
                                     OutputMask float32_mask) {
  check_linear_backward(grad_output, input, weight, mask, float32_mask);
  auto [dx, dw, db] = linear_backward_with(grad_output, input, weight, mask, {}, LinearCpu{});
  auto widened = [](const Tensor& narrow, bool wanted) {
    if (!wanted || !narrow.defined()) return narrow;
    return at::empty_like(narrow, narrow.options().dtype(at::kFloat)).copy_(narrow);
  };
  if (mask[1] && float32_mask[1] && wants_transposed_gradient(grad_output, weight, true)) {
    dw = widened(dw.t().contiguous(), true).t();
  } else {
    dw = widened(dw, float32_mask[1]);
  }
  return {widened(dx, float32_mask[0]), dw, widened(db, float32_mask[2])};
}

#ifdef WARPWRIGHT_WITH_CUDA
Tensor linear_cuda_kernel(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  check_same_type(input, weight, "linear", "weight");
  const CudaCall call(input);
  return linear_with(input, weight, bias, LinearCuda(call, input));
}
Gradients linear_backward_cuda_kernel(const Tensor& grad_output, const OptionalTensor& input,
                                      const OptionalTensor& weight, OutputMask mask,
                                      OutputMask float32_mask) {
  check_linear_backward(grad_output, input, weight, mask, float32_mask);
  const CudaCall call(grad_output);
  return linear_backward_with(grad_output, input, weight, mask, float32_mask,
                              LinearCuda(call, grad_output));
}
#endif

// ---- Meta ----

Tensor linear_meta(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  if (!is_plain_linear(input, weight, bias)) return linear_composed(input, weight, bias);
  check_linear(input, weight, bias);
  return empty_of(with_last_size(input, weight.sym_size(0)), input);
}
Gradients linear_backward_meta(const Tensor& grad_output, const OptionalTensor& input,
                               const OptionalTensor& weight, OutputMask mask,
                               OutputMask float32_mask) {
  check_linear_backward(grad_output, input, weight, mask, float32_mask);
  return empty_gradients(grad_output, input, weight, mask, float32_mask);
}

// ---- Autograd ----

Tensor input_gradient(const Tensor& grad_output, const Tensor& weight, OutputMask float32 = {}) {
  if (!grad_output.defined() || !weight.defined()) return {};
  return std::get<0>(
      linear_ops::linear_backward(grad_output, {}, weight, {true, false, false}, float32));
}
Tensor weight_gradient(const Tensor& grad_output, const Tensor& input, OutputMask float32 = {}) {
  if (!grad_output.defined() || !input.defined()) return {};
  return std::get<1>(
      linear_ops::linear_backward(grad_output, input, {}, {false, true, false}, float32));
}
Tensor bias_gradient(const Tensor& grad_output, OutputMask float32) {
  if (!grad_output.defined()) return {};
  return std::get<2>(
      linear_ops::linear_backward(grad_output, {}, {}, {false, false, true}, float32));
}

struct LinearBackward {  // saved: input, weight
  static constexpr const char* kName = "WarpwrightLinearBackward";
  struct Attributes {
    OutputMask float32;
  };
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    auto [dx, dw, db] = linear_ops::linear_backward(grads[0], optional_if_defined(saved[0]),
                                                    optional_if_defined(saved[1]),
                                                    {needs[0], needs[1], needs[2]}, a.float32);
    return {dx, dw, db};
  }
};

// dx = dy W, dW = dy^T x, db = sum of dy: each is linear in both of its factors.
struct LinearBackwardBackward {
  static constexpr const char* kName = "WarpwrightLinearBackwardBackward";
  struct Attributes {};
  static variable_list backward(const Attributes&, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    const Tensor &dy = saved[0], &x = saved[1], &weight = saved[2];
    // By a gradient in float32: float32.
    auto of_grad = [&](size_t i) {
      return grads[i].defined() ? grads[i].to(dy.scalar_type()) : grads[i];
    };
    const Tensor ddx = of_grad(0), ddw = of_grad(1), ddb = of_grad(2);
    variable_list result(3);
    if (needs[0]) result[0] = sum_of_linears(ddx, weight, x, ddw, ddb, dy);
    if (needs[1]) result[1] = input_gradient(dy, ddw);
    if (needs[2]) result[2] = weight_gradient(dy, ddx);
    return result;
  }
};

}  // namespace

Tensor differentiable_linear(const Tensor& input, const Tensor& weight,
                             const OptionalTensor& optional_bias, const Sources& sources) {
  auto node = make_node<LinearBackward>({sources.in_float32(input.scalar_type())}, sources.input,
                                        sources.weight, sources.bias);
  Tensor output = below_autograd([&] { return linear_ops::linear(input, weight, optional_bias); });
  if (node) {
    // A frozen operand needs no gradient, so its partner need not be saved.
    node->save(requires_grad(sources.weight) ? input : Tensor());
    node->save(requires_grad(sources.input) ? weight : Tensor());
    set_history(output, node);
  }
  return output;
}

namespace {

Tensor linear_autograd(const Tensor& input, const Tensor& weight,
                       const OptionalTensor& optional_bias) {
  if (!is_plain_linear(input, weight, optional_bias)) {
    return linear_composed(input, weight, optional_bias);
  }
  const Tensor bias = value_or_undefined(optional_bias);
  Tensor output = differentiable_linear(input, weight, optional_bias, {input, weight, bias});
  if (any_tangent(input, weight, bias)) {
    const Tensor direction = sum_of_linears(tangent_or_none(input), primal(weight), primal(input),
                                            tangent_or_none(weight), tangent_or_none(bias), output);
    set_tangent(output, tangent_with_zero_terms(direction, input, weight));
  }
  return output;
}

Gradients linear_backward_autograd(const Tensor& grad_output, const OptionalTensor& optional_input,
                                   const OptionalTensor& optional_weight, OutputMask mask,
                                   OutputMask float32_mask) {
  const Tensor input = value_or_undefined(optional_input);
  const Tensor weight = value_or_undefined(optional_weight);
  auto node = make_node<LinearBackwardBackward>({}, grad_output, input, weight);
  Gradients result = below_autograd([&] {
    return linear_ops::linear_backward(grad_output, optional_input, optional_weight, mask,
                                       float32_mask);
  });
  auto& [dx, dw, db] = result;
  if (node) {
    node->save(grad_output);
    node->save(input);
    node->save(weight);
    set_history(dx, node);
    set_history(dw, node);
    set_history(db, node);
  }
  if (any_tangent(grad_output, input, weight)) {
    const Tensor dy = primal(grad_output);
    const Tensor dy_tangent = tangent_or_none(grad_output);
    auto set = [](const Tensor& value, const Tensor& value_tangent) {
      if (value_tangent.defined()) set_tangent(value, value_tangent);
    };
    if (mask[0]) {
      set(dx, sum_of(input_gradient(dy_tangent, primal(weight), float32_mask),
                     input_gradient(dy, tangent_or_none(weight), float32_mask)));
    }
    if (mask[1]) {
      set(dw, sum_of(weight_gradient(dy_tangent, primal(input), float32_mask),
                     weight_gradient(dy, tangent_or_none(input), float32_mask)));
    }
    if (mask[2]) set(db, bias_gradient(dy_tangent, float32_mask));
  }
  return result;
}

// ---- Autocast: to the low-precision type, as native linear ----

template <c10::DeviceType kDevice>
Tensor linear_autocast(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  const AutocastOperands cast(kDevice, input, weight, bias);
  if (!cast.direct) return linear_ops::linear(cast.input, cast.weight, cast.bias);
  return differentiable_linear(cast.input, cast.weight, cast.bias,
                               {cast.source, weight, value_or_undefined(bias)});
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def("linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor",
        {at::Tag::pt2_compliant_tag});
  m.def(
      "linear_backward(Tensor grad_output, Tensor? input, Tensor? weight, bool[3] output_mask, "
      "bool[3] float32_mask=[False, False, False]) -> (Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) {
  m.impl("linear", linear_cpu_kernel);
  m.impl("linear_backward", linear_backward_cpu_kernel);
}

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) {
  m.impl("linear", linear_cuda_kernel);
  m.impl("linear_backward", linear_backward_cuda_kernel);
}
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) {
  m.impl("linear", linear_meta);
  m.impl("linear_backward", linear_backward_meta);
}

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) {
  m.impl("linear", linear_autograd);
  m.impl("linear_backward", linear_backward_autograd);
}

TORCH_LIBRARY_IMPL(warpwright, AutocastCPU, m) { m.impl("linear", linear_autocast<at::kCPU>); }
TORCH_LIBRARY_IMPL(warpwright, AutocastCUDA, m) { m.impl("linear", linear_autocast<at::kCUDA>); }

}  // namespace warpwright
