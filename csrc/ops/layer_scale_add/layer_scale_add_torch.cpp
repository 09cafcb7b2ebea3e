// layer_scale_add and layer_scale_add_backward on every dispatch key. CUDA has kernels for channels
// that are innermost in memory. Otherwise, and on CPU and Meta, one op runs after the other. Higher
// derivatives and tangents come from these ops, too.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "ops/layer_scale_add/layer_scale_add.h"
#include "torch/autograd.h"
#include "torch/check_argument.h"
#include "torch/checks.h"
#include "torch/dispatch.h"
#include "torch/plain.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include "torch/cuda.h"
#endif

namespace warpwright {
namespace {

using TensorPair = std::tuple<Tensor, Tensor>;
using Mask = std::array<bool, 2>;  // of input and scale

namespace call {

Tensor layer_scale_add(const Tensor& input, const Tensor& residual, const Tensor& scale,
                       const OptionalTensor& sample_scale) {
  static const auto op =
      find_op<Tensor(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&)>(
          "warpwright::layer_scale_add");
  return op.call(input, residual, scale, sample_scale);
}

TensorPair layer_scale_add_backward(const Tensor& grad_output, const Tensor& input,
                                    const Tensor& scale, const OptionalTensor& sample_scale,
                                    Mask wanted) {
  static const auto op =
      find_op<TensorPair(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, Mask)>(
          "warpwright::layer_scale_add_backward");
  return op.call(grad_output, input, scale, sample_scale, wanted);
}

}  // namespace call

// ---- checks ----

constexpr const char* kForward = "layer_scale_add";
constexpr const char* kBackward = "layer_scale_add_backward";

void check_floating(const Tensor& tensor, const char* op, const char* name) {
  TORCH_CHECK(is_floating(tensor.scalar_type()), op, ": ", name,
              ": expected a floating point tensor, got ", tensor.scalar_type());
}

// The dimension that `scale` has values for; -1 if it has a single one. Throws if it is not like
// that.
int64_t channel_dim(const Tensor& input, const Tensor& scale, const char* op) {
  const int64_t before = input.dim() - scale.dim();
  int64_t found = -1;
  bool fits = before >= 0;
  for (int64_t i = 0; fits && i < scale.dim(); ++i) {
    if (scale.sym_size(i) == 1) continue;
    fits = found < 0 && scale.sym_size(i) == input.sym_size(before + i);
    found = before + i;
  }
  TORCH_CHECK(fits, op, ": scale: expected one value per channel, in a shape that broadcasts to ",
              input.sym_sizes(), ", got ", scale.sym_sizes());
  return found;
}

// `other`: the residual or the gradient of the output, whose name is `name`.
void check_call(const Tensor& input, const Tensor& other, const Tensor& scale,
                const Tensor& sample_scale, const char* op, const char* name) {
  check_floating(input, op, "input");
  check_floating(other, op, name);
  check_floating(scale, op, "scale");
  TORCH_CHECK(other.sym_sizes().equals(input.sym_sizes()), op, ": ", name, ": expected shape ",
              input.sym_sizes(), ", got ", other.sym_sizes());
  channel_dim(input, scale, op);
  if (sample_scale.defined()) {
    check_floating(sample_scale, op, "sample_scale");
    std::vector<c10::SymInt> expected(static_cast<size_t>(input.dim()), 1);
    if (!expected.empty()) expected[0] = input.sym_size(0);
    TORCH_CHECK(sample_scale.sym_sizes().equals(expected), op, ": sample_scale: expected shape ",
                c10::SymIntArrayRef(expected), ", got ", sample_scale.sym_sizes());
  }
  const auto check_place = [&](const Tensor& tensor, const char* argument) {
    if (!tensor.defined()) return;
    const std::string full = std::string(op) + ": " + argument;
    check_same_device(tensor, input, full.c_str());
    check_plain_storage(tensor, full.c_str());
  };
  check_place(input, "input");
  check_place(other, name);
  check_place(scale, "scale");
  check_place(sample_scale, "sample_scale");
}

// ---- one op after the other ----

Tensor composed(const Tensor& input, const Tensor& residual, const Tensor& scale,
                const Tensor& sample_scale) {
  Tensor scaled = input * scale;
  if (sample_scale.defined()) scaled = scaled * sample_scale;
  return residual + scaled;
}

// The sum of `terms` over all dimensions but the channels, as `scale`.
Tensor sum_to_scale(const Tensor& terms, const Tensor& scale) {
  return terms.sum_to_size_symint(scale.sym_sizes()).to(scale.scalar_type());
}

TensorPair composed_backward(const Tensor& grad_output, const Tensor& input, const Tensor& scale,
                             const Tensor& sample_scale, Mask wanted) {
  const Tensor gradient = sample_scale.defined() ? grad_output * sample_scale : grad_output;
  Tensor grad_input, grad_scale;
  if (wanted[0]) grad_input = (gradient * scale).to(input.scalar_type());
  if (wanted[1]) grad_scale = sum_to_scale(gradient * input, scale);
  return {grad_input, grad_scale};
}

// ---- CPU and Meta ----

Tensor composed_forward_kernel(const Tensor& input, const Tensor& residual, const Tensor& scale,
                               const OptionalTensor& sample_scale) {
  const Tensor samples = value_or_undefined(sample_scale);
  check_call(input, residual, scale, samples, kForward, "residual");
  return composed(input, residual, scale, samples);
}

TensorPair composed_backward_kernel(const Tensor& grad_output, const Tensor& input,
                                    const Tensor& scale, const OptionalTensor& sample_scale,
                                    Mask wanted) {
  const Tensor samples = value_or_undefined(sample_scale);
  check_call(input, grad_output, scale, samples, kBackward, "grad_output");
  return composed_backward(grad_output, input, scale, samples, wanted);
}

// ---- CUDA ----

#ifdef WARPWRIGHT_WITH_CUDA

Tensor in_type(const Tensor& tensor, at::ScalarType type) {
  return tensor.defined() ? tensor.contiguous().to(type) : tensor;
}

// The shape of a call that the kernels take. `other`: the residual or the gradient of the output;
// `type`: that of the output.
std::optional<LayerScaleShape> kernel_shape(const Tensor& input, const Tensor& other,
                                            const Tensor& scale, const Tensor& sample_scale,
                                            at::ScalarType type, const char* op) {
  if (input.numel() == 0) return std::nullopt;
  const LayerScaleFit fit = fit_layer_scale({.dtype = dtype_of(input),
                                             .other_dtype = dtype_of(other),
                                             .output_dtype = *find_dtype(type),
                                             .dims = input.dim(),
                                             .sizes = input.sizes().data(),
                                             .strides = input.strides().data(),
                                             .other_strides = other.strides().data(),
                                             .channel = channel_dim(input, scale, op),
                                             .scales_samples = sample_scale.defined(),
                                             .is_backward = op == kBackward});
  return fit.why_not == nullptr ? std::optional(fit.shape) : std::nullopt;
}

at::ScalarType promoted(const Tensor& input, const Tensor& other, const Tensor& scale,
                        const Tensor& sample_scale) {
  auto type = at::promote_types(at::promote_types(input.scalar_type(), other.scalar_type()),
                                scale.scalar_type());
  return sample_scale.defined() ? at::promote_types(type, sample_scale.scalar_type()) : type;
}

const void* data_or_null(const Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}

// The output and, if `copies`, its copy in the input's type; nullopt: the kernels do not take the
// call.
std::optional<TensorPair> run_forward(const Tensor& input, const Tensor& residual,
                                      const Tensor& scale, const Tensor& samples, bool copies) {
  const CudaCall cuda(input);
  check_call(input, residual, scale, samples, kForward, "residual");
  const auto type = promoted(input, residual, scale, samples);
  const auto shape = kernel_shape(input, residual, scale, samples, type, kForward);
  if (!shape) return std::nullopt;
  const Tensor output = at::empty_like(input, input.options().dtype(type));
  const Tensor copy = copies ? at::empty_like(input) : Tensor();
  const Tensor factors = in_type(scale, type), of_samples = in_type(samples, type);
  const LayerScaleAddParams params{.shape = *shape,
                                   .input = input.const_data_ptr(),
                                   .residual = residual.const_data_ptr(),
                                   .residual_dtype = dtype_of(residual),
                                   .scale = factors.const_data_ptr(),
                                   .sample_scale = data_or_null(of_samples),
                                   .output = output.mutable_data_ptr(),
                                   .copy = copies ? copy.mutable_data_ptr() : nullptr};
  launch_layer_scale_add(params, choose_layer_scale_add(params), cuda.stream);
  return TensorPair(output, copy);
}

Tensor forward_cuda(const Tensor& input, const Tensor& residual, const Tensor& scale,
                    const OptionalTensor& sample_scale) {
  const Tensor samples = value_or_undefined(sample_scale);
  const auto results = run_forward(input, residual, scale, samples, false);
  return results ? std::get<0>(*results) : composed(input, residual, scale, samples);
}

TensorPair backward_cuda(const Tensor& grad_output, const Tensor& input, const Tensor& scale,
                         const OptionalTensor& sample_scale, Mask wanted) {
  const CudaCall cuda(input);
  const Tensor samples = value_or_undefined(sample_scale);
  check_call(input, grad_output, scale, samples, kBackward, "grad_output");
  if (!wanted[0] && !wanted[1]) return {};
  const auto type = promoted(input, grad_output, scale, samples);
  const auto shape = kernel_shape(input, grad_output, scale, samples, type, kBackward);
  if (!shape) return composed_backward(grad_output, input, scale, samples, wanted);
  Tensor grad_input, grad_scale;
  if (wanted[0]) grad_input = at::empty_like(input);
  if (wanted[1]) grad_scale = at::empty(scale.sizes(), scale.options().dtype(type));
  const Tensor factors = in_type(scale, type), of_samples = in_type(samples, type);
  const LayerScaleAddBackwardParams params{
      .shape = *shape,
      .grad_output = grad_output.const_data_ptr(),
      .input = input.const_data_ptr(),
      .scale = factors.const_data_ptr(),
      .sample_scale = data_or_null(of_samples),
      .grad_input = wanted[0] ? grad_input.mutable_data_ptr() : nullptr,
      .grad_scale = wanted[1] ? grad_scale.mutable_data_ptr() : nullptr};
  const ColumnSumPlan plan = choose_layer_scale_add_backward(params, current_device_info());
  const Workspace workspace(plan.workspace_bytes, input);
  launch_layer_scale_add_backward(params, plan, workspace.data(), cuda.stream);
  if (wanted[1]) grad_scale = grad_scale.to(scale.scalar_type());
  return {grad_input, grad_scale};
}

#endif

// ---- Autograd ----

struct LayerScaleAddBackward {  // saved: input, scale, sample_scale
  static constexpr const char* kName = "WarpwrightLayerScaleAddBackward";
  struct Attributes {
    at::ScalarType residual;
  };
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    auto [grad_input, grad_scale] = call::layer_scale_add_backward(
        grads[0], saved[0], saved[1], optional_if_defined(saved[2]), {needs[0], needs[2]});
    return {grad_input, needs[1] ? grads[0].to(a.residual) : Tensor(), grad_scale};
  }
};

template <class Node>
void record(const Node& node, const Tensor& output, const Tensor& input, const Tensor& scale,
            const Tensor& samples) {
  if (!node) return;
  for (const Tensor& tensor : {input, scale, samples}) node->save(tensor);
  set_history(output, node);
}

Tensor forward_autograd(const Tensor& input, const Tensor& residual, const Tensor& scale,
                        const OptionalTensor& sample_scale) {
  const Tensor samples = value_or_undefined(sample_scale);
  if (needs_gradient(samples) || any_tangent(input, residual, scale, samples)) {
    check_call(input, residual, scale, samples, kForward, "residual");
    return composed(input, residual, scale, samples);
  }
  auto node = make_node<LayerScaleAddBackward>({residual.scalar_type()}, input, residual, scale);
  Tensor output =
      below_autograd([&] { return call::layer_scale_add(input, residual, scale, sample_scale); });
  record(node, output, input, scale, samples);
  return output;
}

// On every key. `copy` is the output in `dtype`, a constant: the output has all of the gradient.
TensorPair with_copy(const Tensor& input, const Tensor& residual, const Tensor& scale,
                     const OptionalTensor& sample_scale, at::ScalarType dtype) {
  check_is_dtype(dtype, "layer_scale_add_with_copy: dtype");
  TORCH_CHECK(is_floating(dtype),
              "layer_scale_add_with_copy: dtype: expected a floating point type, got ", dtype);
#ifdef WARPWRIGHT_WITH_CUDA
  const Tensor samples = value_or_undefined(sample_scale);
  const bool plain = is_plain(input) && is_plain(residual) && is_plain(scale) &&
                     is_plain_or_none(samples) && !needs_gradient(samples);
  if (plain && input.is_cuda() && input.scalar_type() == dtype) {
    const auto results = below_autograd(
        [&] { return run_forward(input, residual, scale, samples, /*copies=*/true); });
    if (results) {
      auto node =
          make_node<LayerScaleAddBackward>({residual.scalar_type()}, input, residual, scale);
      record(node, std::get<0>(*results), input, scale, samples);
      return *results;
    }
  }
#endif
  const Tensor output = call::layer_scale_add(input, residual, scale, sample_scale);
  return {output, output.detach().to(dtype)};
}

TensorPair backward_autograd(const Tensor& grad_output, const Tensor& input, const Tensor& scale,
                             const OptionalTensor& sample_scale, Mask wanted) {
  const Tensor samples = value_or_undefined(sample_scale);
  for (const Tensor* tensor : {&grad_output, &input, &scale, &samples}) {
    if (!is_differentiated(*tensor)) continue;
    check_call(input, grad_output, scale, samples, kBackward, "grad_output");
    return composed_backward(grad_output, input, scale, samples, wanted);
  }
  return below_autograd([&] {
    return call::layer_scale_add_backward(grad_output, input, scale, sample_scale, wanted);
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def(
      "layer_scale_add(Tensor input, Tensor residual, Tensor scale, Tensor? sample_scale=None) "
      "-> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "layer_scale_add_with_copy(Tensor input, Tensor residual, Tensor scale, "
      "Tensor? sample_scale, ScalarType dtype) -> (Tensor output, Tensor copy)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "layer_scale_add_backward(Tensor grad_output, Tensor input, Tensor scale, "
      "Tensor? sample_scale, bool[2] output_mask) -> (Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) {
  m.impl("layer_scale_add", composed_forward_kernel);
  m.impl("layer_scale_add_backward", composed_backward_kernel);
}

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) {
  m.impl("layer_scale_add", forward_cuda);
  m.impl("layer_scale_add_backward", backward_cuda);
}
#endif

TORCH_LIBRARY_IMPL(warpwright, CompositeImplicitAutograd, m) {
  m.impl("layer_scale_add_with_copy", with_copy);
}

TORCH_LIBRARY_IMPL(warpwright, Meta, m) {
  m.impl("layer_scale_add", composed_forward_kernel);
  m.impl("layer_scale_add_backward", composed_backward_kernel);
}

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) {
  m.impl("layer_scale_add", forward_autograd);
  m.impl("layer_scale_add_backward", backward_autograd);
}

}  // namespace warpwright
