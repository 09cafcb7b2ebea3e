// fft_conv above its kernels: Autograd and Autocast. The operator is linear in both tensors and
// returns the third tensor of one trilinear form, so each of its derivatives is the operator
// itself.
#include <ATen/autocast_mode.h>
#include <ATen/ops/zeros_like.h>

#include "ops/fft_conv/torch/common.h"
#include "torch/missing_terms.h"

namespace warpwright {
namespace {

using Wanted = FftConvWanted;

// ---- Autograd ----

// The gradients of `first` and `second`.
Tensor gradient_of_first(const FftConvGeometry& g, const Tensor& grad, const Tensor& second) {
  switch (g.wanted) {
    case Wanted::kOutput:
      return call::fft_conv(grad, second, Tensor(), g, Wanted::kInput);
    case Wanted::kInput:
      return call::fft_conv(grad, second, Tensor(), g, Wanted::kOutput);
    default:  // the gradient of the weight's gradient is a weight
      return call::fft_conv(second, grad, Tensor(), g, Wanted::kInput);
  }
}

Tensor gradient_of_second(const FftConvGeometry& g, const Tensor& grad, const Tensor& first) {
  switch (g.wanted) {
    case Wanted::kOutput:
      return call::fft_conv(first, grad, Tensor(), g, Wanted::kWeight);
    case Wanted::kInput:
      return call::fft_conv(grad, first, Tensor(), g, Wanted::kWeight);
    default:
      return call::fft_conv(first, grad, Tensor(), g, Wanted::kOutput);
  }
}

std::vector<int64_t> dims_of_bias_sum(const Tensor& output) {
  return output.dim() == 3 ? std::vector<int64_t>{0, 2} : std::vector<int64_t>{0, 2, 3};
}

Tensor bias_planes(const Tensor& bias, const Tensor& output) {
  std::vector<int64_t> sizes(static_cast<size_t>(output.dim() - 1), 1);
  sizes[0] = -1;
  return bias.view(sizes).expand_symint(output.sym_sizes()).contiguous();
}

struct FftConvBackward {  // saved: first, second
  static constexpr const char* kName = "WarpwrightFftConvBackward";
  using Attributes = FftConvGeometry;
  static variable_list backward(const Attributes& g, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    variable_list results(3);
    if (needs[0]) results[0] = gradient_of_first(g, grads[0], saved[1]);
    if (needs[1]) results[1] = gradient_of_second(g, grads[0], saved[0]);
    if (needs[2]) results[2] = grads[0].sum(dims_of_bias_sum(grads[0]));
    // Native's gradients are in the graph of both operands, with None where the form is linear.
    const auto edges = torch::autograd::collect_next_edges(saved[0], saved[1]);
    for (Tensor& result : results) result = with_missing_terms(result, edges);
    return results;
  }
};

Tensor fft_conv_tangent(const Tensor& first, const Tensor& second, const Tensor& bias,
                        const Tensor& result, const FftConvGeometry& g) {
  Tensor moved;
  Tensor b = has_tangent(bias) ? tangent(bias) : Tensor();  // added by the first convolution
  if (has_tangent(first)) {
    moved = call::fft_conv(tangent(first), primal(second), b, g, g.wanted);
    b = Tensor();
  }
  if (has_tangent(second)) {
    moved = sum_of(moved, call::fft_conv(primal(first), tangent(second), b, g, g.wanted));
    b = Tensor();
  }
  return b.defined() ? bias_planes(b, result) : moved;
}

Tensor fft_conv_autograd(const Tensor& first, const Tensor& second,
                         const OptionalTensor& optional_bias, SymIntArrayRef padding, SymInt groups,
                         std::string_view wanted) {
  const Tensor bias = value_or_undefined(optional_bias);
  const FftConvGeometry g{padding.vec(), std::move(groups), fft_conv_wanted(wanted)};
  auto node = make_node<FftConvBackward>(g, first, second, bias);
  Tensor result = below_autograd([&] { return call::fft_conv(first, second, bias, g, g.wanted); });
  if (node) {
    node->save(first);
    node->save(second);
    set_history(result, node);
  }
  if (any_tangent(first, second, bias)) {
    const Tensor moved = fft_conv_tangent(first, second, bias, result, g);
    set_tangent(result, tangent_with_zero_terms(moved, first, second));
  }
  return result;
}

// ---- Autocast: as conv1d and conv2d. Between the casts everything is float32 ----

template <at::DeviceType kDevice, c10::DispatchKey kKey>
Tensor fft_conv_autocast(const Tensor& first, const Tensor& second, const OptionalTensor& bias,
                         SymIntArrayRef padding, SymInt groups, std::string_view wanted) {
  c10::impl::ExcludeDispatchKeyGuard guard(kKey);
  const auto type = at::autocast::get_lower_precision_fp_from_device_type(kDevice);
  const auto cast = [&](const Tensor& t) { return at::autocast::cached_cast(type, t, kDevice); };
  const Tensor b = value_or_undefined(bias);
  const FftConvGeometry g{padding.vec(), std::move(groups), fft_conv_wanted(wanted)};
  return call::fft_conv(cast(first), cast(second), b.defined() ? cast(b) : b, g, g.wanted);
}

}  // namespace

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) { m.impl("fft_conv", fft_conv_autograd); }

TORCH_LIBRARY_IMPL(warpwright, AutocastCPU, m) {
  m.impl("fft_conv", TORCH_FN((fft_conv_autocast<at::kCPU, c10::DispatchKey::AutocastCPU>)));
}

TORCH_LIBRARY_IMPL(warpwright, AutocastCUDA, m) {
  m.impl("fft_conv", TORCH_FN((fft_conv_autocast<at::kCUDA, c10::DispatchKey::Autocast>)));
}

}  // namespace warpwright
