// Autograd and Autocast of conv2d_batch_norm. backward.h has the backward. The convolution's output
// is an output of the node too: a second derivative that reaches it goes through the convolution.
// gate.h lets a node take a part of the backward of the node before it.
#include <algorithm>

#include "ops/conv2d/torch/autocast.h"
#include "ops/conv2d_batch_norm/torch/backward.h"
#include "ops/conv2d_batch_norm/torch/gate.h"
#include "ops/conv2d_batch_norm/torch/gated_backward.h"
#include "torch/skip.h"
#include "torch/traced.h"

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
    std::shared_ptr<NormGate> gate = nullptr;           // with a residual
    std::shared_ptr<SkipPixels> skip_pixels = nullptr;  // if strided shortcuts may leave theirs
  };
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    const Tensor &grad_output = grads[0], &grad_convolved = grads[1];
    const Tensor sums = take_sums(a, grad_output);
    BackwardCall call{
        .grad_output = grad_output,
        .sums = sums,
        .skip = needs[0] ? kConv2dBatchNormNode.gradient(grads) : Tensor(),
        .input = saved[0],
        .weight = saved[1],
        .norm_weight = saved[2],
        .norm_bias = saved[3],
        .mean = saved[4],
        .rstd = saved[5],
        .mask = saved[6],
        .convolved = saved[7],
        .gate = std::nullopt,
        .eps = a.eps,
        .activation = a.activation,
        .geometry = a.geometry,
        .needs = {needs[0], needs[1], needs[3] && !sums.defined(), needs[4], needs[5]}};
    if (a.skip_pixels) take_pixels(*a.skip_pixels, call);
    BackwardResults results;
    Tensor d_bias;
    if (!grad_output.defined() || grad_convolved.defined()) {
      std::tie(results, d_bias) = of_both_outputs(call, grad_convolved, needs[2]);
    } else if (at::GradMode::is_enabled()) {
      results = composed_backward(call);
    } else {
      const auto gate = call.skip.defined() ? gate_before(call) : nullptr;
      if (!gate) widen_skip(call);  // no other kernel adds the pixels alone
      SkipPixels* const place = place_for_pixels(call);
      call.only_read_pixels = place != nullptr;
      results = is_traced(grad_output) ? dispatch_backward(call) : backward_of(call);
      if (gate && results.gate_sums.defined()) gate->leave(results.input, results.gate_sums);
      if (place) results.input = leave_pixels(*place, results.input, call);
    }
    // The batch's mean takes the convolution's bias away: what a batch norm returns sums to zero.
    if (needs[2] && !d_bias.defined()) {
      const auto type = a.geometry.float32_parameters ? at::kFloat : saved[1].scalar_type();
      d_bias = saved[1].new_zeros_symint({saved[1].sym_size(0)}, type);
    }
    if (needs[3] && sums.defined()) results.residual = grad_output;
    return {results.input,    results.weight,      d_bias,
            results.residual, results.norm_weight, results.norm_bias};
  }

 private:
  // `convolved` has a gradient of its own, as in a second derivative, or is alone in having one.
  static std::pair<BackwardResults, Tensor> of_both_outputs(const BackwardCall& call,
                                                            const Tensor& grad_convolved,
                                                            bool needs_bias) {
    auto [d_convolved, results] = batch_norm_gradients(call);
    d_convolved = sum_of(d_convolved, grad_convolved);
    Tensor d_bias;
    std::tie(results.input, results.weight, d_bias) =
        call::joined_gradients(d_convolved, call.whole_skip(), call.input, call.weight,
                               call.geometry, {call.needs[0], call.needs[1], needs_bias});
    return {results, d_bias};
  }

  // Gives every pixel a gradient.
  static void widen_skip(BackwardCall& call) {
    call.skip = call.whole_skip();
    call.skip_strides = {1, 1};
  }

  // Adds what a strided shortcut left here to the gradient of the skip.
  static void take_pixels(SkipPixels& from, BackwardCall& call) {
    if (call.skip.defined() && call.skip._is_zerotensor()) call.skip = Tensor();
    const auto left = from.take();
    if (!left || !call.needs[0]) return;
    const Tensor others = std::exchange(call.skip, left->pixels);
    call.skip_strides = left->strides;
    if (!others.defined()) return;
    widen_skip(call);
    call.skip = call.skip + others;
  }

  // Where the running node may leave the gradient of the pixels that it reads, or null. The node
  // that owns the place can add them while it gates.
  static SkipPixels* place_for_pixels(const BackwardCall& call) {
    const auto node = torch::autograd::get_current_node();
    if (!node || !call.needs[0] || call.skip.defined() || !skips_pixels(call)) return nullptr;
    const auto& edge = node->next_edge(0);
    auto* writer = dynamic_cast<OpNode<Conv2dBatchNormBackward>*>(edge.function.get());
    if (writer == nullptr || edge.input_nr != kConv2dBatchNormNode.outputs) return nullptr;
    const bool is_alone =
        is_unseen(*node, *writer, /*traced=*/false) && !torch::autograd::AnomalyMode::is_enabled();
    if (!is_alone || writer->stream() != node->stream()) return nullptr;
    const auto& before = writer->next_edge(0);
    auto* gating = dynamic_cast<OpNode<Conv2dBatchNormBackward>*>(before.function.get());
    if (gating == nullptr || !gating->attributes.gate) return nullptr;
    const auto output = writer->input_metadata(0).shape_as_dim_vector();
    return has_gated_kernel(call.input, output[1].expect_int())
               ? writer->attributes.skip_pixels.get()
               : nullptr;
  }

  // Whether it is a 1x1 convolution that reads some of the pixels.
  static bool skips_pixels(const BackwardCall& call) {
    if (!is_1x1_in_memory(call.input, call.weight, call.geometry)) return false;
    const auto [h, w] = strides_of(call.geometry);
    return (h > 1 || w > 1) && h <= call.input.size(2) && w <= call.input.size(3);
  }

  // The gradient that autograd gets.
  static Tensor leave_pixels(SkipPixels& place, const Tensor& pixels, const BackwardCall& call) {
    const Strides strides = strides_of(call.geometry);
    if (place.leave(pixels, strides)) return zeros_without_memory(call.input);
    return with_zeros_between(pixels, strides, call.input);
  }

  // Returns the sums that the next block's node left for this gradient, or an undefined tensor.
  static Tensor take_sums(const Attributes& a, const Tensor& gradient) {
    if (!a.gate) return Tensor();
    if (!torch::autograd::get_current_graph_task_keep_graph()) a.gate->release();
    return a.gate->take(gradient);
  }

  // The gate of the node that wrote the input of the running node, if this one may use it. Its
  // values are then the call's.
  static std::shared_ptr<NormGate> gate_before(BackwardCall& call) {
    const auto node = torch::autograd::get_current_node();
    if (!node) return nullptr;
    const auto& edge = node->next_edge(0);
    auto* writer = dynamic_cast<OpNode<Conv2dBatchNormBackward>*>(edge.function.get());
    if (writer == nullptr || edge.input_nr != 0) return nullptr;
    if (!is_unseen(*node, *writer, is_traced(call.grad_output))) return nullptr;
    const auto gate = writer->attributes.gate;
    if (!gate || has_narrow_kernel(call)) return nullptr;
    call.gate = gate->values();
    if (call.gate && !has_gated_kernel(call)) call.gate.reset();
    return call.gate ? gate : nullptr;
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

// The op and its node. The node leads to `weight_source` and `bias_source`: weight and bias
// themselves, or under autocast their float32 sources.
Tensors5 differentiable(const Call& c, const Tensor& weight_source, const Tensor& bias_source) {
  check_no_gradient(c.running_mean, "conv2d_batch_norm", "running_mean");
  check_no_gradient(c.running_var, "conv2d_batch_norm", "running_var");
  auto node =
      make_node<Conv2dBatchNormBackward>({c.geometry, c.eps, c.activation}, c.input, weight_source,
                                         bias_source, c.residual, c.norm_weight, c.norm_bias);
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
    if (c.input.is_cuda() && is_1x1_in_memory(c.input, c.weight, c.geometry) &&
        strides_of(c.geometry) == Strides{1, 1}) {
      node->attributes.skip_pixels = std::make_shared<SkipPixels>();
    }
  }
  if (has_tangent(dual[0])) set_tangent(output, tangent(dual[0]));
  if (has_tangent(dual[1])) set_tangent(convolved, tangent(dual[1]));
  if (node) node->save_output(convolved);  // with its tangent
  if (c.updates()) bump_statistics(c.running_mean, c.running_var);
  return results;
}

Tensors5 forward_autograd(const Call& c) { return differentiable(c, c.weight, c.bias); }

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
  return forward_autograd(update_call_of(input, weight, bias, residual, norm_weight, norm_bias,
                                         running_mean, running_var, momentum, eps, activation,
                                         stride, padding, dilation, std::move(groups)));
}

// ---- Autocast: the convolution's rule. Batch norm has none. ----

// Whether no mode, subclass or transform watches the residual and batch norm's tensors.
bool are_unwatched(const Call& c) {
  const auto tensors = {&c.residual, &c.norm_weight, &c.norm_bias, &c.running_mean, &c.running_var};
  return std::all_of(tensors.begin(), tensors.end(), [](const Tensor* tensor) {
    return !tensor->defined() || is_plain_or_traced(*tensor);
  });
}

template <at::DeviceType kDevice>
struct Autocast {
  static Tensors5 run(const Call& c) {
    const ConvOperands cast(kDevice, c.input, c.weight, c.bias);
    Call call{.input = cast.input,
              .weight = cast.weight,
              .bias = cast.bias,
              .residual = c.residual,
              .norm_weight = c.norm_weight,
              .norm_bias = c.norm_bias,
              .running_mean = c.running_mean,
              .running_var = c.running_var,
              .momentum = c.momentum,
              .eps = c.eps,
              .activation = c.activation,
              .geometry = c.geometry};
    if (!cast.direct || !are_unwatched(c)) return dispatch(call);
    call.geometry.float32_parameters = true;
    return differentiable(call, c.weight, c.bias);
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
using AutocastCpu = Autocast<at::kCPU>;
using AutocastCuda = Autocast<at::kCUDA>;

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
