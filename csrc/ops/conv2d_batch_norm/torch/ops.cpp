// conv2d_batch_norm and its form that moves the running statistics, from tensors to the kernels:
// activation(batch_norm(conv2d(input, weight)) + residual) in training. On CUDA the convolution
// takes the batch norm's statistics if it can. Otherwise, and on other keys, one op runs after the
// other. autograd.cpp has Autograd and Autocast.
#include "ops/conv2d_batch_norm/torch/common.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include "ops/conv2d/torch/forward.h"
#include "ops/conv2d_batch_norm/conv2d_batch_norm.h"
#endif

namespace warpwright {
namespace {

using namespace conv_norm;

// ---- checks ----

// One value per output channel, in the input's type, or in float next to a 16-bit input.
void check_channels(const Tensor& vector, const char* name, const Call& c) {
  if (!vector.defined()) return;
  TORCH_CHECK(vector.sym_numel() == c.weight.sym_size(0), "conv2d_batch_norm: ", name,
              ": expected ", c.weight.sym_size(0), " elements, got ", vector.sym_numel());
  TORCH_CHECK(vector.device() == c.input.device(), "conv2d_batch_norm: ", name,
              ": expected device ", c.input.device(), ", got ", vector.device());
  const auto type = vector.scalar_type(), input_type = c.input.scalar_type();
  const bool is_short = input_type == at::kHalf || input_type == at::kBFloat16;
  TORCH_CHECK(type == input_type || (is_short && type == at::kFloat), "conv2d_batch_norm: ", name,
              ": expected ", input_type, is_short ? " or Float" : "", ", got ", type);
}

void check_call(const Call& c) {
  TORCH_CHECK(c.input.dim() == 4, "conv2d_batch_norm: input: expected 4 dimensions, got ",
              c.input.dim());
  TORCH_CHECK(c.weight.dim() == 4, "conv2d_batch_norm: weight: expected 4 dimensions, got ",
              c.weight.dim());
  TORCH_CHECK_NOT_IMPLEMENTED(is_floating(c.input.scalar_type()), "conv2d_batch_norm: input: ",
                              "expected float32, float64, bfloat16 or float16, got ",
                              c.input.scalar_type());
  TORCH_CHECK(c.activation == NormActivation::kRelu || !c.residual.defined(),
              "conv2d_batch_norm: residual: expected none without relu");
  check_channels(c.norm_weight, "norm_weight", c);
  check_channels(c.norm_bias, "norm_bias", c);
  check_channels(c.running_mean, "running_mean", c);
  check_channels(c.running_var, "running_var", c);
}

// ---- one op after the other ----

Tensor no_mask(const Call& c) { return at::empty({0}, c.input.options().dtype(at::kByte)); }

Tensors5 composed(const Call& c) {
  check_call(c);
  const Tensor convolved = call::conv2d(c.input, c.weight, c.bias, c.geometry);
  const auto weight = optional_if_defined(c.norm_weight), bias = optional_if_defined(c.norm_bias);
  if (c.activation == NormActivation::kRelu) {
    const auto residual = optional_if_defined(c.residual);
    auto [output, mean, rstd, mask] =
        c.updates() ? call::batch_norm_relu_update(convolved, residual, weight, bias,
                                                   c.running_mean, c.running_var, c.momentum, c.eps)
                    : call::batch_norm_relu(convolved, residual, weight, bias, std::nullopt,
                                            std::nullopt, /*training=*/true, c.eps);
    return {output, convolved, mean, rstd, mask};
  }
  if (c.activation != NormActivation::kNone) {
    const auto name = norm_activation_name(c.activation);
    auto [output, mean, rstd] =
        c.updates() ? call::batch_norm_activation_update(convolved, weight, bias, c.running_mean,
                                                         c.running_var, c.momentum, c.eps, name)
                    : call::batch_norm_activation(convolved, weight, bias, std::nullopt,
                                                  std::nullopt, /*training=*/true, c.eps, name);
    return {output, convolved, mean, rstd, no_mask(c)};
  }
  auto [output, mean, rstd] =
      c.updates() ? call_batch_norm_update(convolved, weight, bias, c.running_mean, c.running_var,
                                           c.momentum, c.eps)
                  : call_batch_norm(convolved, weight, bias, std::nullopt, std::nullopt,
                                    /*training=*/true, c.eps);
  return {output, convolved, mean, rstd, no_mask(c)};
}

// ---- CUDA ----

#ifdef WARPWRIGHT_WITH_CUDA
void check_residual(const Call& c, const Conv2dShape& s) {
  const Tensor& residual = c.residual;
  if (!residual.defined()) return;
  const std::array<int64_t, 4> shape = {s.n, s.k, s.p, s.q};
  TORCH_CHECK(residual.sizes().equals(shape), "conv2d_batch_norm: residual: expected shape ",
              IntArrayRef(shape), ", got ", residual.sizes());
  TORCH_CHECK(residual.scalar_type() == c.input.scalar_type(),
              "conv2d_batch_norm: residual: expected ", c.input.scalar_type(), ", got ",
              residual.scalar_type());
  check_same_device(residual, c.input, "conv2d_batch_norm: residual");
}

// The batch norm of `convolved`. `moments`: its statistics, or undefined.
Tensors5 normalized(const Call& c, const Tensor& convolved, const Tensor& moments,
                    cudaStream_t stream) {
  BatchNormCall norm = batch_norm_call(convolved, optional_if_defined(c.norm_weight),
                                       optional_if_defined(c.norm_bias), std::nullopt, std::nullopt,
                                       /*training=*/true, c.eps);
  norm.update = c.updates();
  norm.running_mean = c.running_mean;
  norm.running_var = c.running_var;
  norm.momentum = c.momentum;
  norm.activation = c.activation;
  norm.residual = c.residual;
  auto [output, mean, rstd, mask] = forward_with(norm, [&](BatchNormParams& p) {
    if (moments.defined()) p.moments = moments.const_data_ptr();
    run_forward_cuda(p, convolved, stream);
  });
  if (!mask.defined()) mask = no_mask(c);
  return {output, convolved, mean, rstd, mask};
}

Tensors5 fused(const Call& c) {
  check_call(c);
  for (const auto& [tensor, name] : {std::pair(&c.residual, "conv2d_batch_norm: residual"),
                                     {&c.norm_weight, "conv2d_batch_norm: norm_weight"},
                                     {&c.norm_bias, "conv2d_batch_norm: norm_bias"},
                                     {&c.running_mean, "conv2d_batch_norm: running_mean"},
                                     {&c.running_var, "conv2d_batch_norm: running_var"}}) {
    check_has_storage(*tensor, name);
  }
  const CudaCall cuda(c.input);
  auto ints = [](const std::vector<SymInt>& values) { return C10_AS_INTARRAYREF_SLOW(values); };
  const Conv2dGeometry& g = c.geometry;
  const int operands = c.residual.defined() ? 2 : 1;
  Tensor moments;
  const Tensor convolved =
      conv2d_with(c.input, c.weight, optional_if_defined(c.bias), ints(g.stride), ints(g.padding),
                  ints(g.dilation), g.groups.expect_int(), [&](Conv2dParams p) {
                    check_residual(c, p.shape);
                    p.shape.allow_tf32 = allow_tf32();
                    p.shape.sm90 = sm90_path_available();
                    const DeviceInfo& device = current_device_info();
                    if (const auto plan = choose_conv2d_moments(p, operands, device).plan) {
                      const Workspace workspace(plan->workspace_bytes(), c.input);
                      moments = at::empty({p.shape.k, 2}, c.input.options().dtype(at::kFloat));
                      return launch_conv2d_moments(p, *plan, workspace.data(),
                                                   moments.mutable_data_ptr(), cuda.stream);
                    }
                    const Conv2dFpropPlan plan = choose_conv2d(p, device);
                    const Workspace workspace(plan.workspace_bytes, c.input);
                    launch_conv2d(p, plan, workspace.data(), cuda.stream);
                  });
  return normalized(c, convolved, moments, cuda.stream);
}
#endif

template <Tensors5 (*kRun)(const Call&)>
Tensors5 forward_kernel(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                        const OptionalTensor& residual, const OptionalTensor& norm_weight,
                        const OptionalTensor& norm_bias, double eps, std::string_view activation,
                        SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef dilation,
                        SymInt groups) {
  return kRun(call_of(input, weight, bias, residual, norm_weight, norm_bias, eps, activation,
                      stride, padding, dilation, std::move(groups)));
}
template <Tensors5 (*kRun)(const Call&)>
Tensors5 update_kernel(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                       const OptionalTensor& residual, const OptionalTensor& norm_weight,
                       const OptionalTensor& norm_bias, Tensor running_mean, Tensor running_var,
                       double momentum, double eps, std::string_view activation,
                       SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef dilation,
                       SymInt groups) {
  return kRun(update_call_of(input, weight, bias, residual, norm_weight, norm_bias, running_mean,
                             running_var, momentum, eps, activation, stride, padding, dilation,
                             std::move(groups)));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def(
      "conv2d_batch_norm(Tensor input, Tensor weight, Tensor? bias, Tensor? residual, "
      "Tensor? norm_weight, Tensor? norm_bias, float eps, str activation, SymInt[2] stride, "
      "SymInt[2] padding, SymInt[2] dilation, SymInt groups) "
      "-> (Tensor output, Tensor convolved, Tensor mean, Tensor rstd, Tensor mask)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "conv2d_batch_norm_update(Tensor input, Tensor weight, Tensor? bias, Tensor? residual, "
      "Tensor? norm_weight, Tensor? norm_bias, Tensor(a!) running_mean, Tensor(b!) running_var, "
      "float momentum, float eps, str activation, SymInt[2] stride, SymInt[2] padding, "
      "SymInt[2] dilation, SymInt groups) "
      "-> (Tensor output, Tensor convolved, Tensor mean, Tensor rstd, Tensor mask)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) {
  m.impl("conv2d_batch_norm", forward_kernel<composed>);
  m.impl("conv2d_batch_norm_update", update_kernel<composed>);
}

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) {
  m.impl("conv2d_batch_norm", forward_kernel<fused>);
  m.impl("conv2d_batch_norm_update", update_kernel<fused>);
}
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) {
  m.impl("conv2d_batch_norm", forward_kernel<composed>);
  m.impl("conv2d_batch_norm_update", update_kernel<composed>);
}

}  // namespace warpwright
