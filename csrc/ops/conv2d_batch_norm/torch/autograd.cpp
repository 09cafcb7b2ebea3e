// Autograd and Autocast of conv2d_batch_norm. The backward runs batch norm's backward, then the
// convolution's. The convolution's output is an output of the node too: a second derivative that
// reaches it goes through the convolution. gate.h lets a node take a part of the backward of the
// node before it.
#include <ATen/autocast_mode.h>

#include "ops/conv2d_batch_norm/torch/common.h"
#include "ops/conv2d_batch_norm/torch/gate.h"
#include "ops/conv2d_batch_norm/torch/gated_backward.h"
#include "ops/conv2d_batch_norm/torch/narrow_backward.h"
#include "torch/skip.h"
#include "torch/weight_copies.h"

namespace warpwright {
namespace {

using namespace conv_norm;

// ---- Autograd ----

// saved: input, weight, norm_weight, norm_bias, mean, rstd, mask, the convolution's output.
struct Conv2dBatchNormBackward {
  static constexpr const char* kName = kConv2dBatchNormNode.name;
  static constexpr bool kPiecewiseLinear = true;
  struct Attributes {
    Conv2dGeometry geometry;
    double eps;
    NormActivation activation;
    std::shared_ptr<NormGate> gate = nullptr;  // with a residual
  };
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    const Tensor &mean = saved[4], &rstd = saved[5], &mask = saved[6], &convolved = saved[7];
    const auto weight = optional_if_defined(saved[2]), bias = optional_if_defined(saved[3]);
    const bool through_conv = needs[0] || needs[1] || needs[2];
    const Tensor sums = take_sums(a, grads[0]);
    if (auto all = narrow(a, saved, grads, needs, sums)) {
      Tensor d_bias = needs[2] ? saved[1].new_zeros({saved[1].size(0)}) : Tensor();
      Tensor d_residual = needs[3] ? grads[0] : Tensor();
      return {all->input, all->weight, d_bias, d_residual, all->norm_weight, all->norm_bias};
    }
    Tensor d_convolved, d_residual, d_weight, d_bias;
    if (sums.defined()) {
      std::tie(d_convolved, d_weight, d_bias) = batch_norm_backward_with_sums(
          {grads[0], sums}, convolved, weight, mean, rstd, {through_conv, needs[4], needs[5]});
      if (needs[3]) d_residual = grads[0];
    } else if (grads[0].defined() && a.activation == NormActivation::kRelu) {
      std::tie(d_convolved, d_weight, d_bias, d_residual) = call::batch_norm_relu_backward(
          grads[0], convolved, weight, bias, mean, rstd, mask, /*training=*/true,
          {through_conv, needs[4], needs[5], needs[3]});
    } else if (grads[0].defined() && a.activation != NormActivation::kNone) {
      std::tie(d_convolved, d_weight, d_bias) = call::batch_norm_activation_backward(
          grads[0], convolved, weight, bias, mean, rstd, /*training=*/true, a.eps,
          norm_activation_name(a.activation), {through_conv, needs[4], needs[5]});
    } else if (grads[0].defined()) {
      std::tie(d_convolved, d_weight, d_bias) =
          call_batch_norm_backward(grads[0], convolved, weight, mean, rstd, /*training=*/true,
                                   {through_conv, needs[4], needs[5]});
    }
    if (grads[1].defined() && through_conv) {
      d_convolved = d_convolved.defined() ? d_convolved + grads[1] : grads[1];
    }
    // The batch's mean takes the convolution's bias away: what a batch norm returns sums to zero.
    const bool sums_bias = needs[2] && grads[1].defined();
    auto [dx, dw, db] = convolution_gradients(a, d_convolved, kConv2dBatchNormNode.gradient(grads),
                                              saved, {needs[0], needs[1], sums_bias});
    if (needs[2] && !sums_bias) db = saved[1].new_zeros_symint({saved[1].sym_size(0)});
    return {dx, dw, db, d_residual, d_weight, d_bias};
  }

 private:
  // All gradients, if one kernel computes both of the convolution.
  static std::optional<NarrowGradients> narrow(const Attributes& a, const variable_list& saved,
                                               const variable_list& grads, const NeedsGrad& needs,
                                               const Tensor& sums) {
    if (!needs[0] || !needs[1] || at::GradMode::is_enabled()) return std::nullopt;
    if (!grads[0].defined() || grads[1].defined() || !is_plain(grads[0])) return std::nullopt;
    const Tensor skip = kConv2dBatchNormNode.gradient(grads);
    const bool is_gated = sums.defined(), is_masked = saved[6].numel() > 0;
    if (is_masked && !is_gated) return std::nullopt;
    return narrow_gradients({.grad_output = grads[0],
                             .sums = sums,
                             .input = saved[0],
                             .weight = saved[1],
                             .geometry = a.geometry,
                             .addend = skip,
                             .convolved = saved[7],
                             .norm_weight = saved[2],
                             .norm_bias = saved[3],
                             .mean = saved[4],
                             .rstd = saved[5],
                             .activation = is_gated ? NormActivation::kNone : a.activation,
                             .needs_norm_weight = needs[4],
                             .needs_norm_bias = needs[5]});
  }

  // Returns the sums that the next block's node left for this gradient, or an undefined tensor.
  static Tensor take_sums(const Attributes& a, const Tensor& gradient) {
    if (!a.gate) return Tensor();
    if (!torch::autograd::get_current_graph_task_keep_graph()) a.gate->release();
    return a.gate->take(gradient);
  }

  // The gate of the node that wrote the input of the running node, if this one may use it.
  static std::shared_ptr<NormGate> gate_before() {
    const auto node = torch::autograd::get_current_node();
    if (!node || at::GradMode::is_enabled()) return nullptr;
    const auto& edge = node->next_edge(0);
    auto* writer = dynamic_cast<OpNode<Conv2dBatchNormBackward>*>(edge.function.get());
    if (writer == nullptr || edge.input_nr != 0 || !is_unseen(*node, *writer)) return nullptr;
    return writer->attributes.gate;
  }

  // `skip`: the gradient of a shortcut around the convolution, or undefined.
  static Tensors3 convolution_gradients(const Attributes& a, const Tensor& d_convolved,
                                        const Tensor& skip, const variable_list& saved,
                                        Conv2dMask mask) {
    const Tensor &input = saved[0], &weight = saved[1];
    const auto gate =
        mask[0] && !mask[2] && d_convolved.defined() && skip.defined() ? gate_before() : nullptr;
    const auto before = gate ? gate->values() : std::nullopt;
    if (before) {
      const auto gated = gated_input_gradient({d_convolved, input, weight, a.geometry, skip,
                                               before->mask, before->convolved, before->mean});
      if (gated) {
        gate->leave(*gated);
        Tensor dw;
        if (mask[1]) dw = call::weight_gradient(d_convolved, input, weight, a.geometry);
        return {gated->gradient, dw, Tensor()};
      }
    }
    return call::joined_gradients(d_convolved, skip, input, weight, a.geometry, mask);
  }
};

// The call without the running statistics, one op after the other, for its tangents.
std::array<Tensor, 2> with_tangents(const Call& c) {
  const Tensor convolved = call::conv2d(c.input, c.weight, c.bias, c.geometry);
  const auto weight = optional_if_defined(c.norm_weight), bias = optional_if_defined(c.norm_bias);
  if (c.activation == NormActivation::kNone) {
    return {std::get<0>(call_batch_norm(convolved, weight, bias, std::nullopt, std::nullopt,
                                        /*training=*/true, c.eps)),
            convolved};
  }
  if (c.activation != NormActivation::kRelu) {
    return {std::get<0>(call::batch_norm_activation(convolved, weight, bias, std::nullopt,
                                                    std::nullopt, /*training=*/true, c.eps,
                                                    norm_activation_name(c.activation))),
            convolved};
  }
  return {
      std::get<0>(call::batch_norm_relu(convolved, optional_if_defined(c.residual), weight, bias,
                                        std::nullopt, std::nullopt, /*training=*/true, c.eps)),
      convolved};
}

Tensors5 forward_autograd(const Call& c) {
  check_no_gradient(c.running_mean, "conv2d_batch_norm", "running_mean");
  check_no_gradient(c.running_var, "conv2d_batch_norm", "running_var");
  auto node =
      make_node<Conv2dBatchNormBackward>({c.geometry, c.eps, c.activation}, c.input, c.weight,
                                         c.bias, c.residual, c.norm_weight, c.norm_bias);
  const bool forward_mode =
      any_tangent(c.input, c.weight, c.bias, c.residual, c.norm_weight, c.norm_bias);
  std::array<Tensor, 2> dual;
  if (forward_mode) dual = with_tangents(c);
  auto results = below_autograd([&] { return dispatch(c); });
  const auto& [output, convolved, mean, rstd, mask] = results;
  if (node) {
    set_history(variable_list{output, convolved}, node);
    for (const Tensor* tensor :
         {&c.input, &c.weight, &c.norm_weight, &c.norm_bias, &mean, &rstd, &mask}) {
      node->save(*tensor);
    }
    if (c.residual.defined()) node->attributes.gate = make_gate(convolved, mean, mask);
  }
  if (has_tangent(dual[0])) set_tangent(output, tangent(dual[0]));
  if (has_tangent(dual[1])) set_tangent(convolved, tangent(dual[1]));
  if (node) node->save_output(convolved);  // with its tangent
  return results;
}

Tensors5 conv2d_batch_norm_autograd(const Tensor& input, const Tensor& weight,
                                    const OptionalTensor& bias, const OptionalTensor& residual,
                                    const OptionalTensor& norm_weight,
                                    const OptionalTensor& norm_bias, double eps,
                                    std::string_view activation, SymIntArrayRef stride,
                                    SymIntArrayRef padding, SymIntArrayRef dilation,
                                    SymInt groups) {
  return forward_autograd(call_of(input, weight, bias, residual, norm_weight, norm_bias, eps,
                                  activation, stride, padding, dilation, std::move(groups)));
}

Tensors5 conv2d_batch_norm_update_autograd(
    const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
    const OptionalTensor& residual, const OptionalTensor& norm_weight,
    const OptionalTensor& norm_bias, Tensor running_mean, Tensor running_var, double momentum,
    double eps, std::string_view activation, SymIntArrayRef stride, SymIntArrayRef padding,
    SymIntArrayRef dilation, SymInt groups) {
  auto results = forward_autograd(update_call_of(
      input, weight, bias, residual, norm_weight, norm_bias, running_mean, running_var, momentum,
      eps, activation, stride, padding, dilation, std::move(groups)));
  bump_statistics(running_mean, running_var);
  return results;
}

// ---- Autocast: the convolution's rule. Batch norm has none. ----

template <at::DeviceType kDevice, c10::DispatchKey kKey>
struct Autocast {
  static Tensors5 run(const Call& c) {
    c10::impl::ExcludeDispatchKeyGuard guard(kKey);
    const auto type = at::autocast::get_lower_precision_fp_from_device_type(kDevice);
    const Tensor input = at::autocast::cached_cast(type, c.input, kDevice);
    const Tensor weight = cast_weight(type, c.weight, kDevice);
    return dispatch({.input = input,
                     .weight = weight,
                     .bias = cast_weight(type, c.bias, kDevice),
                     .residual = c.residual,
                     .norm_weight = c.norm_weight,
                     .norm_bias = c.norm_bias,
                     .running_mean = c.running_mean,
                     .running_var = c.running_var,
                     .momentum = c.momentum,
                     .eps = c.eps,
                     .activation = c.activation,
                     .geometry = c.geometry});
  }
  static Tensors5 forward(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                          const OptionalTensor& residual, const OptionalTensor& norm_weight,
                          const OptionalTensor& norm_bias, double eps, std::string_view activation,
                          SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef dilation,
                          SymInt groups) {
    return run(call_of(input, weight, bias, residual, norm_weight, norm_bias, eps, activation,
                       stride, padding, dilation, std::move(groups)));
  }
  static Tensors5 update(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                         const OptionalTensor& residual, const OptionalTensor& norm_weight,
                         const OptionalTensor& norm_bias, Tensor running_mean, Tensor running_var,
                         double momentum, double eps, std::string_view activation,
                         SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef dilation,
                         SymInt groups) {
    return run(update_call_of(input, weight, bias, residual, norm_weight, norm_bias, running_mean,
                              running_var, momentum, eps, activation, stride, padding, dilation,
                              std::move(groups)));
  }
};
using AutocastCpu = Autocast<at::kCPU, c10::DispatchKey::AutocastCPU>;
using AutocastCuda = Autocast<at::kCUDA, c10::DispatchKey::Autocast>;

}  // namespace

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) {
  m.impl("conv2d_batch_norm", conv2d_batch_norm_autograd);
  m.impl("conv2d_batch_norm_update", conv2d_batch_norm_update_autograd);
}

TORCH_LIBRARY_IMPL(warpwright, AutocastCPU, m) {
  m.impl("conv2d_batch_norm", TORCH_FN(AutocastCpu::forward));
  m.impl("conv2d_batch_norm_update", TORCH_FN(AutocastCpu::update));
}

TORCH_LIBRARY_IMPL(warpwright, AutocastCUDA, m) {
  m.impl("conv2d_batch_norm", TORCH_FN(AutocastCuda::forward));
  m.impl("conv2d_batch_norm_update", TORCH_FN(AutocastCuda::update));
}

}  // namespace warpwright
