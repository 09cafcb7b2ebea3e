// backward.h on tensors, and the operator conv2d_batch_norm_backward on every key.
#include "ops/conv2d_batch_norm/torch/backward.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/stack.h>

#include "ops/conv2d_batch_norm/torch/gated_backward.h"
#include "ops/conv2d_batch_norm/torch/narrow_backward.h"
#include "ops/conv2d_batch_norm/torch/rows.h"

namespace warpwright {
namespace conv_norm {
namespace {

// Whether grad_output has yet to pass the relu's mask.
bool is_masked(const BackwardCall& c) { return c.mask.sym_numel() > 0 && !c.sums.defined(); }

NarrowCall narrow_call(const BackwardCall& c) {
  return {.grad_output = c.grad_output,
          .sums = c.sums,
          .input = c.input,
          .weight = c.weight,
          .geometry = c.geometry,
          .addend = c.skip,
          .convolved = c.convolved,
          .norm_weight = c.norm_weight,
          .norm_bias = c.norm_bias,
          .mean = c.mean,
          .rstd = c.rstd,
          .activation = c.sums.defined() ? NormActivation::kNone : c.activation,
          .needs_norm_weight = c.needs[3],
          .needs_norm_bias = c.needs[4]};
}
bool may_be_narrow(const BackwardCall& c) {
  return c.needs[0] && c.needs[1] && !is_masked(c) && !c.only_read_pixels;
}

// `d_convolved`: the gradient of the convolution's output, or a tensor laid out like it.
GatedCall gated_call(const BackwardCall& c, const Tensor& d_convolved) {
  return {.grad_output = d_convolved,
          .input = c.input,
          .weight = c.weight,
          .geometry = c.geometry,
          .addend = c.skip,
          .addend_strides = c.skip_strides,
          .mask = c.gate->mask,
          .norm_input = c.gate->convolved,
          .mean = c.gate->mean};
}

// Whether batch norm's kernels read the sums. Without them they sum the gated gradient again.
bool takes_sums(const BackwardCall& c) {
  return c.sums.defined() && c.grad_output.is_cuda() && is_plain(c.grad_output) &&
         is_plain(c.convolved) && are_rows({&c.grad_output, &c.convolved});
}

// From the gradient of the convolution's output on.
void convolve(const BackwardCall& c, const Tensor& d_convolved, BackwardResults& results) {
  if (c.only_read_pixels) {
    const Conv2dGeometry dense{{1, 1}, {0, 0}, {1, 1}, 1};
    const Tensor rows = rows_like_pixels_of(c.input, strides_of(c.geometry));
    results.input = call::input_gradient(d_convolved, rows, c.weight, dense);
    if (!c.needs[1]) return;
    results.weight = call::weight_gradient(d_convolved, c.input, c.weight, c.geometry);
    return;
  }
  std::tie(results.input, results.weight, std::ignore) = call::joined_gradients(
      d_convolved, c.whole_skip(), c.input, c.weight, c.geometry, {c.needs[0], c.needs[1], false});
}

// What a gating kernel does, as passes of their own: gates results.input, and sums it and its
// product with convolved - mean.
void gate_apart(const GateValues& gate, BackwardResults& results) {
  constexpr Mask4 kGateOnly = {false, false, false, true};  // reads no statistics
  results.input = std::get<3>(call::batch_norm_relu_backward(results.input, gate.convolved, {}, {},
                                                             gate.mean, gate.mean, gate.mask,
                                                             /*training=*/true, kGateOnly));
  const auto type = gate.mean.scalar_type();
  const Tensor gradient = results.input.to(type);
  const Tensor centered = gate.convolved.to(type) - gate.mean.view({-1, 1, 1});
  constexpr int64_t kPixels[] = {0, 2, 3};
  results.gate_sums =
      at::stack({gradient.sum(kPixels), (gradient * centered).sum(kPixels)}, /*dim=*/1);
}

}  // namespace

bool has_narrow_kernel(const BackwardCall& c) {
  return may_be_narrow(c) && has_narrow_kernel(narrow_call(c));
}

bool has_gated_kernel(const BackwardCall& c) {
  return c.gate && c.skip.defined() && has_gated_kernel(gated_call(c, c.convolved));
}

std::pair<Tensor, BackwardResults> batch_norm_gradients(const BackwardCall& c) {
  const bool through_conv = c.needs[0] || c.needs[1];
  const auto weight = optional_if_defined(c.norm_weight), bias = optional_if_defined(c.norm_bias);
  const std::array<bool, 3> needs = {through_conv, c.needs[3], c.needs[4]};
  Tensor d_convolved;
  BackwardResults r;
  if (!c.grad_output.defined()) return {d_convolved, r};
  if (takes_sums(c)) {
    std::tie(d_convolved, r.norm_weight, r.norm_bias) = batch_norm_backward_with_sums(
        {c.grad_output, c.sums}, c.convolved, weight, c.mean, c.rstd, needs);
  } else if (c.sums.defined() || c.activation == NormActivation::kNone) {
    std::tie(d_convolved, r.norm_weight, r.norm_bias) = call_batch_norm_backward(
        c.grad_output, c.convolved, weight, c.mean, c.rstd, /*training=*/true, needs);
  } else if (c.activation == NormActivation::kRelu) {
    std::tie(d_convolved, r.norm_weight, r.norm_bias, r.residual) = call::batch_norm_relu_backward(
        c.grad_output, c.convolved, weight, bias, c.mean, c.rstd, c.mask, /*training=*/true,
        {needs[0], needs[1], needs[2], c.needs[2]});
  } else {
    std::tie(d_convolved, r.norm_weight, r.norm_bias) = call::batch_norm_activation_backward(
        c.grad_output, c.convolved, weight, bias, c.mean, c.rstd, /*training=*/true, c.eps,
        norm_activation_name(c.activation), needs);
  }
  return {d_convolved, r};
}

BackwardResults composed_backward(const BackwardCall& c) {
  auto [d_convolved, results] = batch_norm_gradients(c);
  convolve(c, d_convolved, results);
  if (c.gate) gate_apart(*c.gate, results);
  return results;
}

BackwardResults backward_of(const BackwardCall& c) {
  if (!c.gate && may_be_narrow(c)) {
    if (const auto all = narrow_gradients(narrow_call(c))) {
      return {all->input, all->weight, Tensor(), all->norm_weight, all->norm_bias, Tensor()};
    }
  }
  auto [d_convolved, results] = batch_norm_gradients(c);
  if (c.gate) {
    if (const auto gated = gated_input_gradient(gated_call(c, d_convolved))) {
      results.input = gated->gradient;
      results.gate_sums = gated->sums;
      if (c.needs[1]) {
        results.weight = call::weight_gradient(d_convolved, c.input, c.weight, c.geometry);
      }
      return results;
    }
  }
  convolve(c, d_convolved, results);
  return results;
}

// ---- the operator ----

namespace {

using Tensors6 = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using Signature = Tensors6(const Tensor&, const OptionalTensor&, const OptionalTensor&,
                           const Tensor&, const Tensor&, const OptionalTensor&,
                           const OptionalTensor&, const Tensor&, const Tensor&, const Tensor&,
                           const Tensor&, const OptionalTensor&, const OptionalTensor&,
                           const OptionalTensor&, double, std::string_view, SymIntArrayRef,
                           SymIntArrayRef, SymIntArrayRef, SymInt, BackwardCall::Needs, bool);

constexpr const char* kOp = "conv2d_batch_norm_backward";

void check_gate(const BackwardCall& c) {
  const Tensor &x = c.input, &mask = c.gate->mask;
  TORCH_CHECK(c.skip.defined(), kOp, ": gate_convolved: expected none without skip");
  const SymInt channels[] = {x.sym_size(1)};
  check_argument(c.gate->convolved, "conv2d_batch_norm_backward: gate_convolved", x.sym_sizes(),
                 x.scalar_type(), x);
  check_argument(c.gate->mean, "conv2d_batch_norm_backward: gate_mean", channels, stats_type(x), x);
  check_contiguous(c.gate->mean, "conv2d_batch_norm_backward: gate_mean");
  TORCH_CHECK(mask.dim() == 1 && mask.scalar_type() == at::kByte, kOp,
              ": gate_mask: expected 1 dimension of Byte, got ", mask.dim(), " of ",
              mask.scalar_type());
  check_same_device(mask, x, "conv2d_batch_norm_backward: gate_mask");
  check_contiguous(mask, "conv2d_batch_norm_backward: gate_mask");
}

// What neither batch norm's backward nor the convolution's checks.
void check_backward_call(const BackwardCall& c) {
  const Tensor& x = c.input;
  const Conv2dGeometry& g = c.geometry;
  TORCH_CHECK(x.dim() == 4, kOp, ": input: expected 4 dimensions, got ", x.dim());
  check_types(x, c.weight, std::nullopt);
  TORCH_CHECK(!g.float32_parameters || is_16bit(x.scalar_type()), kOp,
              ": float32_parameters: expected 16-bit operands, got ", x.scalar_type());
  const auto v = expand_windows<SymInt>(g.stride, g.padding, g.dilation, g.groups);
  const auto sizes = output_sizes<SymInt>(x, c.weight, std::nullopt, v, sym_sizes);
  check_argument(c.convolved, "conv2d_batch_norm_backward: convolved", sizes, x.scalar_type(), x);
  check_backward(c.grad_output, c.convolved, c.norm_weight, c.mean, c.rstd);
  check_vector(c.norm_bias, "bias", c.convolved);
  const bool is_relu = c.activation == NormActivation::kRelu;
  TORCH_CHECK(!c.needs[2] || (is_relu && !c.sums.defined()), kOp,
              ": output_mask: expected no gradient of a residual without relu or with sums");
  if (c.sums.defined()) {
    const SymInt pairs[] = {c.convolved.sym_size(1), 2};
    check_argument(c.sums, "conv2d_batch_norm_backward: sums", pairs, stats_type(x), x);
    check_contiguous(c.sums, "conv2d_batch_norm_backward: sums");
  }
  if (c.skip.defined()) {
    TORCH_CHECK(c.needs[0], kOp, ": skip: expected none without the gradient of the input");
    check_argument(c.skip, "conv2d_batch_norm_backward: skip", x.sym_sizes(), x.scalar_type(), x);
  }
  if (c.gate) check_gate(c);
}

// Before any of the kernels runs, fused or not.
void check_backward_storage(const BackwardCall& c) {
  check_has_storage(c.grad_output, "conv2d_batch_norm_backward: grad_output");
  check_has_storage(c.sums, "conv2d_batch_norm_backward: sums");
  check_has_storage(c.skip, "conv2d_batch_norm_backward: skip");
  check_has_storage(c.input, "conv2d_batch_norm_backward: input");
  check_has_storage(c.weight, "conv2d_batch_norm_backward: weight");
  check_has_storage(c.norm_weight, "conv2d_batch_norm_backward: norm_weight");
  check_has_storage(c.norm_bias, "conv2d_batch_norm_backward: norm_bias");
  check_has_storage(c.mean, "conv2d_batch_norm_backward: mean");
  check_has_storage(c.rstd, "conv2d_batch_norm_backward: rstd");
  check_has_storage(c.mask, "conv2d_batch_norm_backward: mask");
  check_has_storage(c.convolved, "conv2d_batch_norm_backward: convolved");
  if (!c.gate) return;
  check_has_storage(c.gate->convolved, "conv2d_batch_norm_backward: gate_convolved");
  check_has_storage(c.gate->mean, "conv2d_batch_norm_backward: gate_mean");
  check_has_storage(c.gate->mask, "conv2d_batch_norm_backward: gate_mask");
}

// `kRun`: from the call to the results.
template <BackwardResults (*kRun)(const BackwardCall&)>
Tensors6 backward_kernel(const Tensor& grad_output, const OptionalTensor& sums,
                         const OptionalTensor& skip, const Tensor& input, const Tensor& weight,
                         const OptionalTensor& norm_weight, const OptionalTensor& norm_bias,
                         const Tensor& mean, const Tensor& rstd, const Tensor& mask,
                         const Tensor& convolved, const OptionalTensor& gate_convolved,
                         const OptionalTensor& gate_mean, const OptionalTensor& gate_mask,
                         double eps, std::string_view activation, SymIntArrayRef stride,
                         SymIntArrayRef padding, SymIntArrayRef dilation, SymInt groups,
                         BackwardCall::Needs output_mask, bool float32_parameters) {
  BackwardCall c{
      .grad_output = grad_output,
      .sums = value_or_undefined(sums),
      .skip = value_or_undefined(skip),
      .input = input,
      .weight = weight,
      .norm_weight = value_or_undefined(norm_weight),
      .norm_bias = value_or_undefined(norm_bias),
      .mean = mean,
      .rstd = rstd,
      .mask = mask,
      .convolved = convolved,
      .gate = std::nullopt,
      .eps = eps,
      .activation = find_norm_activation(activation, kOp, kConvNormActivations),
      .geometry = geometry_of(stride, padding, dilation, std::move(groups), float32_parameters),
      .needs = output_mask};
  if (gate_convolved || gate_mean || gate_mask) {
    TORCH_CHECK(gate_convolved && gate_mean && gate_mask, kOp,
                ": gate_convolved, gate_mean, gate_mask: expected all of them or none");
    c.gate = GateValues{*gate_convolved, *gate_mean, *gate_mask};
  }
  check_backward_call(c);
  auto r = kRun(c);
  return {r.input, r.weight, r.residual, r.norm_weight, r.norm_bias, r.gate_sums};
}

// ---- CPU, CUDA and Meta ----

BackwardResults in_memory(const BackwardCall& c) {
  check_backward_storage(c);
  BackwardResults results = backward_of(c);
  if (c.gate && !results.gate_sums.defined()) gate_apart(*c.gate, results);
  return results;
}

// ---- Autograd ----

template <class... Tensors>
bool any_differentiated(const Tensors&... tensors) {
  return (is_differentiated(tensors) || ...);
}

BackwardResults autograd(const BackwardCall& c) {
  if (any_differentiated(c.grad_output, c.skip, c.input, c.weight, c.norm_weight, c.norm_bias,
                         c.convolved)) {
    return composed_backward(c);
  }
  return below_autograd([&] { return dispatch_backward(c); });
}

}  // namespace

BackwardResults dispatch_backward(const BackwardCall& c) {
  static const auto op = find_op<Signature>("warpwright::conv2d_batch_norm_backward");
  const Conv2dGeometry& g = c.geometry;
  auto of_gate = [&](Tensor GateValues::*tensor) {
    return c.gate ? OptionalTensor((*c.gate).*tensor) : std::nullopt;
  };
  auto [input, weight, residual, norm_weight, norm_bias, gate_sums] = op.call(
      c.grad_output, optional_if_defined(c.sums), optional_if_defined(c.skip), c.input, c.weight,
      optional_if_defined(c.norm_weight), optional_if_defined(c.norm_bias), c.mean, c.rstd, c.mask,
      c.convolved, of_gate(&GateValues::convolved), of_gate(&GateValues::mean),
      of_gate(&GateValues::mask), c.eps, norm_activation_name(c.activation), g.stride, g.padding,
      g.dilation, g.groups, c.needs, g.float32_parameters);
  return {input, weight, residual, norm_weight, norm_bias, gate_sums};
}

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def(
      "conv2d_batch_norm_backward(Tensor grad_output, Tensor? sums, Tensor? skip, Tensor input, "
      "Tensor weight, Tensor? norm_weight, Tensor? norm_bias, Tensor mean, Tensor rstd, "
      "Tensor mask, Tensor convolved, Tensor? gate_convolved, Tensor? gate_mean, "
      "Tensor? gate_mask, float eps, str activation, SymInt[2] stride, SymInt[2] padding, "
      "SymInt[2] dilation, SymInt groups, bool[5] output_mask, bool float32_parameters=False) "
      "-> (Tensor grad_input, Tensor grad_weight, Tensor grad_residual, Tensor grad_norm_weight, "
      "Tensor grad_norm_bias, Tensor gate_sums)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) {
  m.impl("conv2d_batch_norm_backward", backward_kernel<autograd>);
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) {
  m.impl("conv2d_batch_norm_backward", backward_kernel<in_memory>);
}

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) {
  m.impl("conv2d_batch_norm_backward", backward_kernel<in_memory>);
}
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) {
  m.impl("conv2d_batch_norm_backward", backward_kernel<composed_backward>);
}

}  // namespace conv_norm
}  // namespace warpwright
