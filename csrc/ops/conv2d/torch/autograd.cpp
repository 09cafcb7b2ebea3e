// conv2d above its kernels: Autograd of both ops, padding given as a word, Autocast.
#include <ATen/ops/conv2d.h>

#include "ops/conv2d/torch/bilinear.h"
#include "ops/conv2d/torch/common.h"
#include "torch/skip.h"

namespace warpwright {
namespace {

// ---- Autograd ----

// saved: input, weight.
struct Conv2dBackward {
  static constexpr const char* kName = kConv2dNode.name;
  using Attributes = Conv2dGeometry;
  static variable_list backward(const Attributes& geometry, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    auto [grad_input, grad_weight, grad_bias] =
        call::joined_gradients(grads[0], kConv2dNode.gradient(grads), saved[0], saved[1], geometry,
                               {needs[0], needs[1], needs[2]});
    return {grad_input, grad_weight, grad_bias};
  }
};

struct Conv2dOp {
  static constexpr const char* kSecondNode = "WarpwrightConv2dBackwardBackward";
  using Node = Conv2dBackward;
  static Tensor forward(const Tensor& input, const Tensor& weight, const Tensor& bias,
                        const Conv2dGeometry& geometry) {
    return call::conv2d(input, weight, bias, geometry);
  }
  static Tensors3 backward(const Tensor& grad_output, const Tensor& input, const Tensor& weight,
                           const Conv2dGeometry& geometry, Conv2dMask mask,
                           const Tensor& addend = {}) {
    return call::conv2d_backward(grad_output, input, weight, geometry, mask, addend);
  }
};

Tensor conv2d_autograd(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                       SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef dilation,
                       SymInt groups) {
  if (!is_ours(input) && padding.size() <= 2) {
    return at::conv2d_symint(input, weight, bias, stride, padding, dilation, groups);
  }
  return bilinear_autograd<Conv2dOp>(input, weight, value_or_undefined(bias),
                                     geometry_of(stride, padding, dilation, std::move(groups)));
}

Tensors3 conv2d_backward_autograd(const Tensor& grad_output, const Tensor& input,
                                  const Tensor& weight, SymIntArrayRef stride,
                                  SymIntArrayRef padding, SymIntArrayRef dilation, SymInt groups,
                                  Conv2dMask mask, const OptionalTensor& addend,
                                  bool float32_parameters) {
  Conv2dGeometry geometry = geometry_of(stride, padding, dilation, std::move(groups));
  geometry.float32_parameters = float32_parameters;
  return bilinear_backward_autograd<Conv2dOp>(grad_output, input, weight, geometry, mask,
                                              value_or_undefined(addend));
}

// ---- padding='same' or 'valid' ----

// A composite op, so that the other kernels see only numbers.
Tensor conv2d_padding(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                      SymIntArrayRef stride, std::string_view padding, SymIntArrayRef dilation,
                      SymInt groups) {
  if (!is_ours(input) && weight.scalar_type() == input.scalar_type()) {
    return at::conv2d_symint(input, weight, bias, stride, padding, dilation, groups);
  }
  Conv2dGeometry g = geometry_of(stride, SymInt(0), dilation, groups);
  if (padding == "same") {
    TORCH_CHECK(input.dim() == 3 || input.dim() == 4,
                "Expected 3D (unbatched) or 4D (batched) input to conv2d, but got input of size: ",
                input.sym_sizes());
    TORCH_CHECK(weight.dim() == 4, "Expected ", weight.dim(), "-dimensional input for ",
                weight.dim(), "-dimensional weight", weight.sym_sizes(), ", but got 4-dimensional ",
                "input of size ", input.sym_sizes(), " instead");
    const auto v = expand_windows<SymInt>(stride, g.padding, dilation, groups);
    TORCH_CHECK(v.stride[0] == 1 && v.stride[1] == 1,
                "padding='same' is not supported for strided convolutions");
    g.padding.clear();
    std::vector<SymInt> after;
    for (int i = 0; i < 2; ++i) {
      const SymInt total = checked_mul(v.dilation[i], weight.sym_size(i + 2) - 1);
      g.padding.push_back(total / 2);
      after.push_back(total - total / 2);
    }
    g.padding.insert(g.padding.end(), after.begin(), after.end());
  } else {
    TORCH_CHECK(padding == "valid", "Invalid padding string: '", padding, "'");
  }
  return call::conv2d(input, weight, value_or_undefined(bias), g);
}

// ---- Autocast ----

template <at::DeviceType kDevice>
Tensor conv2d_autocast(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                       SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef dilation,
                       SymInt groups) {
  return bilinear_autocast<Conv2dOp>(kDevice, input, weight, bias,
                                     geometry_of(stride, padding, dilation, std::move(groups)));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def(
      "conv2d_padding(Tensor input, Tensor weight, Tensor? bias=None, SymInt[2] stride=1, "
      "str padding=\"valid\", SymInt[2] dilation=1, SymInt groups=1) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.impl("conv2d_padding", c10::DispatchKey::CompositeImplicitAutograd, TORCH_FN(conv2d_padding));
}

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) {
  m.impl("conv2d", conv2d_autograd);
  m.impl("conv2d_backward", conv2d_backward_autograd);
}

TORCH_LIBRARY_IMPL(warpwright, AutocastCPU, m) { m.impl("conv2d", conv2d_autocast<at::kCPU>); }

TORCH_LIBRARY_IMPL(warpwright, AutocastCUDA, m) { m.impl("conv2d", conv2d_autocast<at::kCUDA>); }

}  // namespace warpwright
