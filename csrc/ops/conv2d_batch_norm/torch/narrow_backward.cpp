// narrow_backward.h from tensors to the kernels.
#include "ops/conv2d_batch_norm/narrow_backward.h"

#include <ATen/record_function.h>

#include "ops/conv2d/torch/forward.h"
#include "ops/conv2d_batch_norm/torch/narrow_backward.h"
#include "ops/conv2d_batch_norm/torch/rows.h"

namespace warpwright::conv_norm {

#ifdef WARPWRIGHT_WITH_CUDA
namespace {

bool has_layout(const NarrowCall& c) {
  if (!c.input.is_cuda()) return false;
  if (!are_rows({&c.input, &c.weight, &c.convolved, &c.grad_output})) return false;
  if (c.addend.defined() && !are_rows({&c.input, &c.addend})) return false;
  return c.convolved.sizes().equals(c.grad_output.sizes()) &&
         (!c.addend.defined() || c.addend.sizes().equals(c.input.sizes())) &&
         c.mean.scalar_type() == at::kFloat;
}

NarrowBackwardParams params_of(const NarrowCall& c) {
  NarrowBackwardParams p{};
  p.shape = shape_in_rows(c.input, c.weight, c.geometry);
  p.grad_output = address_if_plain(c.grad_output);
  p.convolved = address_if_plain(c.convolved);
  p.input = address_if_plain(c.input);
  p.weight = address_if_plain(c.weight);
  p.addend = address_if_plain(c.addend);
  p.activation = c.activation;
  return p;
}

bool is_in_memory(const NarrowCall& c) {
  return are_plain(
      {&c.grad_output, &c.sums, &c.input, &c.weight, &c.addend, &c.convolved, &c.mean, &c.rstd});
}

}  // namespace

bool has_narrow_kernel(const NarrowCall& c) {
  if (!has_layout(c)) return false;
  const CudaCall cuda(c.input);
  return choose_narrow_backward(params_of(c), current_device_info()).plan.has_value();
}

std::optional<NarrowGradients> narrow_gradients(const NarrowCall& c) {
  if (!has_layout(c) || !is_in_memory(c)) return std::nullopt;
  const CudaCall cuda(c.input);
  NarrowBackwardParams p = params_of(c);
  const auto plan = choose_narrow_backward(p, current_device_info()).plan;
  if (!plan) return std::nullopt;
  RECORD_FUNCTION("warpwright::conv2d_backward",
                  std::vector<c10::IValue>({c.grad_output, c.input, c.weight}));
  const Tensor coefficients =
      at::empty({kBackwardCoefficients, c.convolved.size(1)}, c.mean.options());
  auto [unused, norm_weight, norm_bias, none] =
      backward_with({.grad_output = c.grad_output,
                     .input = c.convolved,
                     .weight = c.norm_weight,
                     .mean = c.mean,
                     .rstd = c.rstd,
                     .training = true,
                     .output_mask = {false, c.needs_norm_weight, c.needs_norm_bias, false},
                     .activation = c.activation,
                     .bias = c.norm_bias,
                     .coefficients = coefficients.mutable_data_ptr()},
                    [&](BatchNormBackwardParams& norm) {
                      if (c.sums.defined()) norm.sums = c.sums.const_data_ptr();
                      run_backward_cuda(norm, c.convolved, cuda.stream);
                    });
  const auto of_weight =
      c.geometry.float32_parameters ? c.weight.options().dtype(at::kFloat) : c.weight.options();
  const NarrowGradients result{at::empty_like(c.input), at::empty_like(c.weight, of_weight),
                               norm_weight, norm_bias};
  p.norm_bias = channel_vector(c.norm_bias, "batch_norm_backward: bias", false);
  p.coefficients = coefficients.const_data_ptr();
  p.grad_input = result.input.mutable_data_ptr();
  p.grad_weight = result.weight.mutable_data_ptr();
  p.float32_weight = c.geometry.float32_parameters;
  const Workspace workspace(plan->workspace_bytes, c.input);
  launch_narrow_backward(p, *plan, workspace.data(), cuda.stream);
  return result;
}
#else
bool has_narrow_kernel(const NarrowCall&) { return false; }

std::optional<NarrowGradients> narrow_gradients(const NarrowCall&) { return std::nullopt; }
#endif

}  // namespace warpwright::conv_norm
