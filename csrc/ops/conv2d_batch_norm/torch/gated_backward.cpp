// gated_dgrad.h from tensors to the kernels.
#include "ops/conv2d_batch_norm/torch/gated_backward.h"
#include "ops/conv2d/torch/forward.h"
#include "ops/conv2d_batch_norm/gated_dgrad.h"
#include "torch/check_argument.h"
#include "torch/plain.h"

namespace warpwright::conv_norm {

#ifdef WARPWRIGHT_WITH_CUDA
namespace {

// The kernel's tensors are images in rows of channels, and vectors next to them.
bool has_layout(const GatedCall& c) {
  const Tensor& x = c.input;
  for (const Tensor* image : {&c.grad_output, &x, &c.weight, &c.addend, &c.norm_input}) {
    if (!is_plain(*image) || image->dim() != 4 || image->scalar_type() != x.scalar_type() ||
        image->device() != x.device() || !image->is_contiguous(at::MemoryFormat::ChannelsLast)) {
      return false;
    }
  }
  const int64_t bytes =
      batch_norm_mask_bytes(x.size(0), x.size(1), x.size(2) * x.size(3), /*rows=*/true, 8);
  return x.numel() > 0 && c.addend.sizes().equals(x.sizes()) &&
         c.norm_input.sizes().equals(x.sizes()) && c.mask.numel() == bytes &&
         c.mean.scalar_type() == at::kFloat && c.mean.numel() == x.size(1);
}

GatedDgradParams params_of(const GatedCall& c) {
  auto ints = [](const std::vector<SymInt>& values) { return C10_AS_INTARRAYREF_SLOW(values); };
  const Conv2dGeometry& g = c.geometry;
  const auto v = expand_windows<int64_t>(ints(g.stride), ints(g.padding), ints(g.dilation),
                                         g.groups.expect_int());
  const auto sizes = output_sizes<int64_t>(c.input, c.weight, std::nullopt, v, int_sizes);
  GatedDgradParams p{};
  p.conv.shape = shape_of(c.input, c.weight, sizes, v, at::MemoryFormat::ChannelsLast);
  p.conv.shape.allow_tf32 = allow_tf32();
  p.conv.shape.sm90 = sm90_path_available();
  p.conv.grad_output = c.grad_output.const_data_ptr();
  p.conv.weight = c.weight.const_data_ptr();
  p.conv.addend = c.addend.const_data_ptr();
  p.norm_input = c.norm_input.const_data_ptr();
  p.mask = c.mask.const_data_ptr();
  p.mean = c.mean.const_data_ptr();
  return p;
}

}  // namespace

std::optional<GatedGradient> gated_input_gradient(const GatedCall& c) {
  if (!c.input.is_cuda() || !has_layout(c)) return std::nullopt;
  const CudaCall cuda(c.input);
  GatedDgradParams p = params_of(c);
  const auto plan = choose_gated_dgrad(p, current_device_info()).plan;
  if (!plan) return std::nullopt;
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
std::optional<GatedGradient> gated_input_gradient(const GatedCall&) { return std::nullopt; }

Tensors3 batch_norm_backward_with_sums(const GatedGradient& grad_output, const Tensor& input,
                                       const OptionalTensor& weight, const Tensor& mean,
                                       const Tensor& rstd, std::array<bool, 3> output_mask) {
  return call_batch_norm_backward(grad_output.gradient, input, weight, mean, rstd,
                                  /*training=*/true, output_mask);
}
#endif

}  // namespace warpwright::conv_norm
