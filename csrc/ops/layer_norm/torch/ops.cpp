// layer_norm, rms_norm and their backwards: CPU, CUDA, Meta, Autocast and registration.
#include <ATen/autocast_mode.h>

#include "ops/layer_norm/torch/common.h"

namespace warpwright {
namespace {

using Mask2 = std::array<bool, 2>;
using Mask3 = std::array<bool, 3>;

LayerNormCall layer_norm_call(const Tensor& input, SymIntArrayRef shape,
                              const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                              OptionalType dtype) {
  return {input, shape, value_or_undefined(weight), value_or_undefined(bias), eps, true, dtype};
}
LayerNormCall rms_norm_call(const Tensor& input, SymIntArrayRef shape, const OptionalTensor& weight,
                            std::optional<double> eps, OptionalType dtype) {
  return {input, shape, value_or_undefined(weight), Tensor(), rms_eps(eps, input), false, dtype};
}
LayerNormBackwardCall layer_norm_backward_call(const Tensor& grad_output, const Tensor& input,
                                               SymIntArrayRef shape, const OptionalTensor& weight,
                                               const Tensor& mean, const Tensor& rstd,
                                               Mask3 wanted) {
  return {grad_output, input, shape, value_or_undefined(weight), mean, rstd, wanted, true};
}
LayerNormBackwardCall rms_norm_backward_call(const Tensor& grad_output, const Tensor& input,
                                             SymIntArrayRef shape, const OptionalTensor& weight,
                                             const Tensor& rstd, Mask2 wanted) {
  return {grad_output,
          input,
          shape,
          value_or_undefined(weight),
          Tensor(),
          rstd,
          {wanted[0], wanted[1], false},
          false};
}

Tensors2 first_and_last(Tensors3&& results) {
  return {std::move(std::get<0>(results)), std::move(std::get<2>(results))};
}
Tensors2 first_two(Tensors3&& results) {
  return {std::move(std::get<0>(results)), std::move(std::get<1>(results))};
}

// ---- CPU ----

Tensors3 layer_norm_cpu_kernel(const Tensor& input, SymIntArrayRef shape,
                               const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                               OptionalType dtype) {
  return forward_with(layer_norm_call(input, shape, weight, bias, eps, dtype), layer_norm_cpu);
}
Tensors2 rms_norm_cpu_kernel(const Tensor& input, SymIntArrayRef shape,
                             const OptionalTensor& weight, std::optional<double> eps,
                             OptionalType dtype) {
  return first_and_last(
      forward_with(rms_norm_call(input, shape, weight, eps, dtype), layer_norm_cpu));
}
Tensors3 layer_norm_backward_cpu_kernel(const Tensor& grad_output, const Tensor& input,
                                        SymIntArrayRef shape, const OptionalTensor& weight,
                                        const Tensor& mean, const Tensor& rstd, Mask3 wanted) {
  return backward_with(
      layer_norm_backward_call(grad_output, input, shape, weight, mean, rstd, wanted),
      layer_norm_backward_cpu);
}
Tensors2 rms_norm_backward_cpu_kernel(const Tensor& grad_output, const Tensor& input,
                                      SymIntArrayRef shape, const OptionalTensor& weight,
                                      const Tensor& rstd, Mask2 wanted) {
  return first_two(
      backward_with(rms_norm_backward_call(grad_output, input, shape, weight, rstd, wanted),
                    layer_norm_backward_cpu));
}

// ---- CUDA ----

#ifdef WARPWRIGHT_WITH_CUDA
Tensors3 forward_cuda(const LayerNormCall& call) {
  const CudaCall cuda(call.input);
  return forward_with(call, [&](const LayerNormParams& p) { run_forward_cuda(p, cuda.stream); });
}
Tensors3 backward_cuda(const LayerNormBackwardCall& call) {
  const CudaCall cuda(call.input);
  return backward_with(call, [&](const LayerNormBackwardParams& p) {
    run_backward_cuda(p, call.input, cuda.stream);
  });
}

Tensors3 layer_norm_cuda_kernel(const Tensor& input, SymIntArrayRef shape,
                                const OptionalTensor& weight, const OptionalTensor& bias,
                                double eps, OptionalType dtype) {
  return forward_cuda(layer_norm_call(input, shape, weight, bias, eps, dtype));
}
Tensors2 rms_norm_cuda_kernel(const Tensor& input, SymIntArrayRef shape,
                              const OptionalTensor& weight, std::optional<double> eps,
                              OptionalType dtype) {
  return first_and_last(forward_cuda(rms_norm_call(input, shape, weight, eps, dtype)));
}
Tensors3 layer_norm_backward_cuda_kernel(const Tensor& grad_output, const Tensor& input,
                                         SymIntArrayRef shape, const OptionalTensor& weight,
                                         const Tensor& mean, const Tensor& rstd, Mask3 wanted) {
  return backward_cuda(
      layer_norm_backward_call(grad_output, input, shape, weight, mean, rstd, wanted));
}
Tensors2 rms_norm_backward_cuda_kernel(const Tensor& grad_output, const Tensor& input,
                                       SymIntArrayRef shape, const OptionalTensor& weight,
                                       const Tensor& rstd, Mask2 wanted) {
  return first_two(
      backward_cuda(rms_norm_backward_call(grad_output, input, shape, weight, rstd, wanted)));
}
#endif

// ---- Meta ----

Tensors3 layer_norm_meta(const Tensor& input, SymIntArrayRef shape, const OptionalTensor& weight,
                         const OptionalTensor& bias, double eps, OptionalType dtype) {
  return forward_meta(layer_norm_call(input, shape, weight, bias, eps, dtype));
}
Tensors2 rms_norm_meta(const Tensor& input, SymIntArrayRef shape, const OptionalTensor& weight,
                       std::optional<double> eps, OptionalType dtype) {
  return first_and_last(forward_meta(rms_norm_call(input, shape, weight, eps, dtype)));
}
Tensors3 layer_norm_backward_meta(const Tensor& grad_output, const Tensor& input,
                                  SymIntArrayRef shape, const OptionalTensor& weight,
                                  const Tensor& mean, const Tensor& rstd, Mask3 wanted) {
  return backward_meta(
      layer_norm_backward_call(grad_output, input, shape, weight, mean, rstd, wanted));
}
Tensors2 rms_norm_backward_meta(const Tensor& grad_output, const Tensor& input,
                                SymIntArrayRef shape, const OptionalTensor& weight,
                                const Tensor& rstd, Mask2 wanted) {
  return first_two(
      backward_meta(rms_norm_backward_call(grad_output, input, shape, weight, rstd, wanted)));
}

// ---- Autocast: layer_norm in float32 on a GPU, in the types that come on the CPU, as native's
// ----

// An input that has the output's 16-bit type stays: the kernel computes in float32 either way.
Tensors3 layer_norm_autocast(const Tensor& input, SymIntArrayRef shape,
                             const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                             OptionalType dtype) {
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::AutocastCUDA);
  auto cast = [](const auto& value) { return at::autocast::cached_cast(at::kFloat, value); };
  const Tensor rows = dtype == input.scalar_type() ? input : cast(input);
  return call_layer_norm(rows, shape, cast(weight), cast(bias), eps, dtype);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def(
      "layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, "
      "float eps, ScalarType? dtype=None) -> (Tensor output, Tensor mean, Tensor rstd)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "rms_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight, float? eps, "
      "ScalarType? dtype=None) -> (Tensor output, Tensor rstd)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "layer_norm_backward(Tensor grad_output, Tensor input, SymInt[] normalized_shape, "
      "Tensor? weight, Tensor mean, Tensor rstd, bool[3] output_mask) "
      "-> (Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "rms_norm_backward(Tensor grad_output, Tensor input, SymInt[] normalized_shape, "
      "Tensor? weight, Tensor rstd, bool[2] output_mask) -> (Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) {
  m.impl("layer_norm", layer_norm_cpu_kernel);
  m.impl("rms_norm", rms_norm_cpu_kernel);
  m.impl("layer_norm_backward", layer_norm_backward_cpu_kernel);
  m.impl("rms_norm_backward", rms_norm_backward_cpu_kernel);
}

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) {
  m.impl("layer_norm", layer_norm_cuda_kernel);
  m.impl("rms_norm", rms_norm_cuda_kernel);
  m.impl("layer_norm_backward", layer_norm_backward_cuda_kernel);
  m.impl("rms_norm_backward", rms_norm_backward_cuda_kernel);
}
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) {
  m.impl("layer_norm", layer_norm_meta);
  m.impl("rms_norm", rms_norm_meta);
  m.impl("layer_norm_backward", layer_norm_backward_meta);
  m.impl("rms_norm_backward", rms_norm_backward_meta);
}

TORCH_LIBRARY_IMPL(warpwright, AutocastCPU, m) {
  m.impl("layer_norm", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(warpwright, AutocastCUDA, m) { m.impl("layer_norm", layer_norm_autocast); }

}  // namespace warpwright
