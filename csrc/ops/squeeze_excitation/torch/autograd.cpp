// Autograd and Autocast of squeeze_excitation and its backward. Tangents, and whatever
// differentiates the backward, run the chain of ATen's operators.
#include <ATen/autocast_mode.h>

#include "ops/squeeze_excitation/torch/chain.h"
#include "ops/squeeze_excitation/torch/common.h"

namespace warpwright {
namespace {

using namespace squeeze_excitation;

// ---- Autograd ----

struct SqueezeExcitationBackward {  // saved: the five arguments, mean, hidden, scale
  static constexpr const char* kName = "WarpwrightSqueezeExcitationBackward";
  using Attributes = Functions;
  static variable_list backward(const Attributes& f, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    const Arguments a{saved[0], saved[1], saved[2], saved[3], saved[4]};
    auto [dx, dw1, db1, dw2, db2] =
        call::squeeze_excitation_backward(grads[0], a, {saved[5], saved[6], saved[7]}, f,
                                          {needs[0], needs[1], needs[2], needs[3], needs[4]});
    return {dx, dw1, db1, dw2, db2};
  }
};

bool is_any_differentiated(const Arguments& a) {
  bool found = is_differentiated(a.input);
  for (const Tensor* parameter : a.parameters()) found |= is_differentiated(*parameter);
  return found;
}

// All in the type of the sums, up to the output.
Tensors4 forward_by_chain(const Arguments& a, const Functions& f) {
  const auto type = sums_type(a.input);
  const Tensor x = a.input.to(type);
  const Excitation e = excite(x.mean(kSpatial), Layers(a), f, Differentiated::kYes);
  const Tensor output = (x * per_image(e.scale, x)).to(a.input.scalar_type());
  // Further derivatives compute the kept values from the arguments again.
  return {in_layout_of(output, a.input), e.mean.detach(), e.hidden.detach(), e.scale.detach()};
}

Tensors4 squeeze_excitation_autograd(const Tensor& input, const Tensor& fc1_weight,
                                     const OptionalTensor& fc1_bias, const Tensor& fc2_weight,
                                     const OptionalTensor& fc2_bias, std::string_view activation,
                                     std::string_view scale_activation) {
  const Functions f = find_functions(activation, scale_activation, "squeeze_excitation");
  const Arguments a{input, fc1_weight, value_or_undefined(fc1_bias), fc2_weight,
                    value_or_undefined(fc2_bias)};
  if (any_tangent(input, fc1_weight, a.fc1_bias, fc2_weight, a.fc2_bias)) {
    check_arguments(a, "squeeze_excitation");
    return forward_by_chain(a, f);
  }
  auto node = make_node<SqueezeExcitationBackward>(f, input, fc1_weight, a.fc1_bias, fc2_weight,
                                                   a.fc2_bias);
  Tensors4 results = below_autograd([&] { return call::squeeze_excitation(a, f); });
  const auto& [output, mean, hidden, scale] = results;
  if (node) {
    node->save(input);
    for (const Tensor* parameter : a.parameters()) node->save(*parameter);
    for (const Tensor* kept : {&mean, &hidden, &scale}) node->save(*kept);
    set_history(output, node);
  }
  return results;
}

Tensors5 squeeze_excitation_backward_autograd(
    const Tensor& grad_output, const Tensor& input, const Tensor& fc1_weight,
    const OptionalTensor& fc1_bias, const Tensor& fc2_weight, const OptionalTensor& fc2_bias,
    const Tensor& mean, const Tensor& hidden, const Tensor& scale, std::string_view activation,
    std::string_view scale_activation, Mask wanted) {
  constexpr const char* kOp = "squeeze_excitation_backward";
  const Functions f = find_functions(activation, scale_activation, kOp);
  const Arguments a{input, fc1_weight, value_or_undefined(fc1_bias), fc2_weight,
                    value_or_undefined(fc2_bias)};
  check_constant(mean, kOp, "mean");
  check_constant(hidden, kOp, "hidden");
  check_constant(scale, kOp, "scale");
  const Kept kept{mean, hidden, scale};
  if (!is_differentiated(grad_output) && !is_any_differentiated(a)) {
    return below_autograd(
        [&] { return call::squeeze_excitation_backward(grad_output, a, kept, f, wanted); });
  }
  check_backward(grad_output, a, kept);
  check_plain_storage(grad_output, "squeeze_excitation_backward: grad_output");
  check_plain_storage(input, "squeeze_excitation_backward: input");
  check_plain_storage(fc1_weight, "squeeze_excitation_backward: fc1_weight");
  check_plain_storage(a.fc1_bias, "squeeze_excitation_backward: fc1_bias");
  check_plain_storage(fc2_weight, "squeeze_excitation_backward: fc2_weight");
  check_plain_storage(a.fc2_bias, "squeeze_excitation_backward: fc2_bias");
  // The kept values again, as functions of the arguments.
  const auto type = sums_type(input);
  const Tensor x = input.to(type), dy = grad_output.to(type);
  const Layers layers(a);
  const Excitation e = excite(x.mean(kSpatial), layers, f, Differentiated::kYes);
  return chain_backward(dy, x, e, layers, a, f, wanted, Differentiated::kYes);
}

// ---- Autocast ----
//
// Native's chain promotes: its factors have the lower type, or that of a float64 input. Ours
// computes them in the type of the sums, from float32 parameters as they are, so no parameter is
// cast. The output has the type of native's product.

template <at::DeviceType kDevice, c10::DispatchKey kKey>
struct Autocast {
  static Tensor cast_input(const Tensor& input) {
    const auto lower = at::autocast::get_lower_precision_fp_from_device_type(kDevice);
    const auto type = input.scalar_type();
    const bool is_short = type == at::kBFloat16 || type == at::kHalf;
    return is_short && type != lower ? input.to(at::kFloat) : input;
  }

  static Tensors4 run(const Tensor& input, const Tensor& fc1_weight, const OptionalTensor& fc1_bias,
                      const Tensor& fc2_weight, const OptionalTensor& fc2_bias,
                      std::string_view activation, std::string_view scale_activation) {
    const c10::impl::ExcludeDispatchKeyGuard guard(kKey);
    const Functions f = find_functions(activation, scale_activation, "squeeze_excitation");
    const Tensor x = cast_input(input);
    const std::array<Tensor, 4> parameters{fc1_weight, value_or_undefined(fc1_bias), fc2_weight,
                                           value_or_undefined(fc2_bias)};
    bool are_alike = true;
    for (const Tensor& p : parameters) {
      are_alike &= !p.defined() || p.scalar_type() == fc1_weight.scalar_type();
    }
    const auto type = fc1_weight.scalar_type();
    const bool fits = are_alike && (type == x.scalar_type() || type == at::kFloat);
    const auto cast = [&](const Tensor& p) {
      const bool stays = fits || !p.defined() || !is_floating(p.scalar_type()) ||
                         p.scalar_type() == at::kDouble || x.scalar_type() == at::kDouble;
      return stays ? p : p.to(at::kFloat);
    };
    const Tensor w1 = cast(parameters[0]), w2 = cast(parameters[2]);
    return call::squeeze_excitation({x, w1, cast(parameters[1]), w2, cast(parameters[3])}, f);
  }
};
using AutocastCpu = Autocast<at::kCPU, c10::DispatchKey::AutocastCPU>;
using AutocastCuda = Autocast<at::kCUDA, c10::DispatchKey::Autocast>;

}  // namespace

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) {
  m.impl("squeeze_excitation", squeeze_excitation_autograd);
  m.impl("squeeze_excitation_backward", squeeze_excitation_backward_autograd);
}

TORCH_LIBRARY_IMPL(warpwright, AutocastCPU, m) {
  m.impl("squeeze_excitation", TORCH_FN(AutocastCpu::run));
}
TORCH_LIBRARY_IMPL(warpwright, AutocastCUDA, m) {
  m.impl("squeeze_excitation", TORCH_FN(AutocastCuda::run));
}

}  // namespace warpwright
