// conv_transpose2d above its kernels: Autograd of both ops, Autocast.
#include <ATen/ops/conv_transpose2d.h>

#include "ops/conv2d/torch/bilinear.h"
#include "ops/conv_transpose2d/torch/common.h"

namespace warpwright {
namespace {

// ---- Autograd ----

// saved: input, weight.
struct ConvTranspose2dBackward {
  static constexpr const char* kName = "WarpwrightConvTranspose2dBackward";
  using Attributes = ConvTranspose2dGeometry;
  static variable_list backward(const Attributes& geometry, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    auto [grad_input, grad_weight, grad_bias] = call::conv_transpose2d_backward(
        grads[0], saved[0], saved[1], geometry, {needs[0], needs[1], needs[2]});
    return {grad_input, grad_weight, grad_bias};
  }
};

struct ConvTranspose2dOp {
  static constexpr const char* kSecondNode = "WarpwrightConvTranspose2dBackwardBackward";
  using Node = ConvTranspose2dBackward;
  static Tensor forward(const Tensor& input, const Tensor& weight, const Tensor& bias,
                        const ConvTranspose2dGeometry& geometry) {
    return call::conv_transpose2d(input, weight, bias, geometry);
  }
  static Tensors3 backward(const Tensor& grad_output, const Tensor& input, const Tensor& weight,
                           const ConvTranspose2dGeometry& geometry, Conv2dMask mask) {
    return call::conv_transpose2d_backward(grad_output, input, weight, geometry, mask);
  }
};

Tensor conv_transpose2d_autograd(const Tensor& input, const Tensor& weight,
                                 const OptionalTensor& bias, SymIntArrayRef stride,
                                 SymIntArrayRef padding, SymIntArrayRef output_padding,
                                 SymInt groups, SymIntArrayRef dilation) {
  if (!is_ours(input)) {
    return at::conv_transpose2d_symint(input, weight, bias, stride, padding, output_padding, groups,
                                       dilation);
  }
  return bilinear_autograd<ConvTranspose2dOp>(
      input, weight, value_or_undefined(bias),
      transposed_geometry(stride, padding, output_padding, std::move(groups), dilation));
}

Tensors3 conv_transpose2d_backward_autograd(const Tensor& grad_output, const Tensor& input,
                                            const Tensor& weight, SymIntArrayRef stride,
                                            SymIntArrayRef padding, SymIntArrayRef output_padding,
                                            SymInt groups, SymIntArrayRef dilation,
                                            Conv2dMask mask) {
  return bilinear_backward_autograd<ConvTranspose2dOp>(
      grad_output, input, weight,
      transposed_geometry(stride, padding, output_padding, std::move(groups), dilation), mask);
}

// ---- Autocast ----

template <at::DeviceType kDevice>
Tensor conv_transpose2d_autocast(const Tensor& input, const Tensor& weight,
                                 const OptionalTensor& bias, SymIntArrayRef stride,
                                 SymIntArrayRef padding, SymIntArrayRef output_padding,
                                 SymInt groups, SymIntArrayRef dilation) {
  return bilinear_autocast<ConvTranspose2dOp>(
      kDevice, input, weight, bias,
      transposed_geometry(stride, padding, output_padding, std::move(groups), dilation));
}

}  // namespace

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) {
  m.impl("conv_transpose2d", conv_transpose2d_autograd);
  m.impl("conv_transpose2d_backward", conv_transpose2d_backward_autograd);
}

TORCH_LIBRARY_IMPL(warpwright, AutocastCPU, m) {
  m.impl("conv_transpose2d", conv_transpose2d_autocast<at::kCPU>);
}

TORCH_LIBRARY_IMPL(warpwright, AutocastCUDA, m) {
  m.impl("conv_transpose2d", conv_transpose2d_autocast<at::kCUDA>);
}

}  // namespace warpwright
