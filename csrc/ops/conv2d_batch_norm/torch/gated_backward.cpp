// gated_dgrad.h from tensors to the kernels.
#include "ops/conv2d_batch_norm/gated_dgrad.h"

#include <ATen/record_function.h>

#include "ops/conv2d_batch_norm/torch/gated_backward.h"
#include "ops/conv2d_batch_norm/torch/rows.h"

namespace warpwright::conv_norm {

#ifdef WARPWRIGHT_WITH_CUDA
namespace {

bool has_layout(const GatedCall& c) {
  const Tensor& x = c.input;
  if (!x.is_cuda() || c.mask.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) return false;
  if (!are_rows({&x, &c.weight, &c.grad_output, &c.addend, &c.norm_input})) return false;
  const int64_t bytes =
      batch_norm_mask_bytes(x.size(0), x.size(1), x.size(2) * x.size(3), /*rows=*/true, 8);
  const auto [stride_h, stride_w] = c.addend_strides;
  const int64_t pixels[] = {x.size(0), x.size(1), ceil_div(x.size(2), stride_h),
                            ceil_div(x.size(3), stride_w)};
  return c.addend.sizes().equals(pixels) && c.norm_input.sizes().equals(x.sizes()) &&
         c.mask.numel() == bytes && c.mean.scalar_type() == at::kFloat &&
         c.mean.numel() == x.size(1);
}

GatedDgradParams params_of(const GatedCall& c) {
  GatedDgradParams p{};
  p.conv.shape = shape_in_rows(c.input, c.weight, c.geometry);
  p.conv.grad_output = address_if_plain(c.grad_output);
  p.conv.weight = address_if_plain(c.weight);
  p.conv.addend = address_if_plain(c.addend);
  std::copy(c.addend_strides.begin(), c.addend_strides.end(), p.addend_stride);
  p.norm_input = address_if_plain(c.norm_input);
  p.mask = address_if_plain(c.mask);
  p.mean = address_if_plain(c.mean);
  return p;
}

bool is_in_memory(const GatedCall& c) {
  return are_plain(
      {&c.grad_output, &c.input, &c.weight, &c.addend, &c.mask, &c.norm_input, &c.mean});
}

}  // namespace

bool has_gated_kernel(const GatedCall& c) {
  if (!has_layout(c)) return false;
  const CudaCall cuda(c.input);
  return choose_gated_dgrad(params_of(c), current_device_info()).plan.has_value();
}

bool has_gated_kernel(const Tensor& x, int64_t k) {
  if (!x.is_cuda() || !are_plain({&x}) || !are_rows({&x})) return false;
  const CudaCall cuda(x);
  GatedDgradParams p{};
  p.conv.shape = {.dtype = dtype_of(x),
                  .channels_last = true,
                  .sm90 = sm90_path_available(),
                  .allow_tf32 = allow_tf32(),
                  .n = x.size(0),
                  .c = x.size(1),
                  .h = x.size(2),
                  .w = x.size(3),
                  .k = k,
                  .r = 1,
                  .s = 1,
                  .p = x.size(2),
                  .q = x.size(3),
                  .stride_h = 1,
                  .stride_w = 1,
                  .pad_h = 0,
                  .pad_w = 0,
                  .dilation_h = 1,
                  .dilation_w = 1,
                  .groups = 1};
  return choose_gated_dgrad(p, current_device_info()).plan.has_value();
}

std::optional<GatedGradient> gated_input_gradient(const GatedCall& c) {
  if (!has_layout(c) || !is_in_memory(c)) return std::nullopt;
  const CudaCall cuda(c.input);
  GatedDgradParams p = params_of(c);
  const auto plan = choose_gated_dgrad(p, current_device_info()).plan;
  if (!plan) return std::nullopt;
  RECORD_FUNCTION("warpwright::conv2d_backward",
                  std::vector<c10::IValue>({c.grad_output, c.input, c.weight}));
  const GatedGradient result{at::empty_like(c.input),
                             at::empty({c.input.size(1), 2}, c.mean.options())};
  p.conv.grad_input = result.gradient.mutable_data_ptr();
  p.sums = result.sums.mutable_data_ptr();
  const Workspace workspace(plan->workspace_bytes(), c.input);
  launch_gated_dgrad(p, *plan, workspace.data(), cuda.stream);
  return result;
}

Tensors3 batch_norm_backward_with_sums(const GatedGradient& grad_output, const Tensor& input,
                                       const OptionalTensor& weight, const Tensor& mean,
                                       const Tensor& rstd, std::array<bool, 3> output_mask) {
  const CudaCall cuda(input);
  RECORD_FUNCTION("warpwright::batch_norm_backward",
                  std::vector<c10::IValue>({grad_output.gradient, input}));
  auto [dx, dw, db, unused] =
      backward_with({.grad_output = grad_output.gradient,
                     .input = input,
                     .weight = value_or_undefined(weight),
                     .mean = mean,
                     .rstd = rstd,
                     .training = true,
                     .output_mask = {output_mask[0], output_mask[1], output_mask[2], false}},
                    [&](BatchNormBackwardParams& p) {
                      p.sums = grad_output.sums.const_data_ptr();
                      run_backward_cuda(p, input, cuda.stream);
                    });
  return {dx, dw, db};
}
#else
bool has_gated_kernel(const GatedCall&) { return false; }
bool has_gated_kernel(const Tensor&, int64_t) { return false; }

std::optional<GatedGradient> gated_input_gradient(const GatedCall&) { return std::nullopt; }

Tensors3 batch_norm_backward_with_sums(const GatedGradient& grad_output, const Tensor& input,
                                       const OptionalTensor& weight, const Tensor& mean,
                                       const Tensor& rstd, std::array<bool, 3> output_mask) {
  return call_batch_norm_backward(grad_output.gradient, input, weight, mean, rstd,
                                  /*training=*/true, output_mask);
}
#endif

}  // namespace warpwright::conv_norm
