// conv2d_batch_norm_relu_max_pool2d, its form that moves the running statistics, and their
// backward, from tensors to the kernels. On CUDA the kernels take the calls that
// choose_conv2d_batch_norm_relu_max_pool2d names. Otherwise, and on other keys, one op runs after
// the other. Results: output, mean, rstd, codes, moments. autograd.cpp has Autograd and Autocast.
#include "ops/conv2d_batch_norm_relu_max_pool2d/torch/common.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include "ops/conv2d/torch/forward.h"
#include "torch/check_argument.h"
#endif

namespace warpwright {
namespace {

using namespace conv_norm_pool;

#ifdef WARPWRIGHT_WITH_CUDA

// ---- CUDA ----

// A call that the kernels take.
struct Planned {
  ConvNormPoolShape shape;
  ConvNormPoolPlan plan;
  at::MemoryFormat format;  // of input, weight and output
};

// The output's extents of a pool that the kernels take, else zeros.
IntPair halves(const Conv2dShape& s, const PoolWindow& w, bool ceil_mode) {
  const bool drops = s.p % 2 == 0 || !ceil_mode, drops_columns = s.q % 2 == 0 || !ceil_mode;
  const bool fits = w.kernel == IntPair{2, 2} && w.padding == IntPair{0, 0};
  return fits && drops && drops_columns ? IntPair{s.p / 2, s.q / 2} : IntPair{0, 0};
}

// None: one op runs after the other, and checks its arguments.
std::optional<Planned> plan_call(const Tensor& input, const Tensor& weight, const Tensor& bias,
                                 const Conv2dGeometry& g, const PoolWindow& w,
                                 const IntPair* pooled, bool ceil_mode) {
  const bool is_float = input.scalar_type() == at::kFloat && input.dim() == 4 &&
                        weight.dim() == 4 && input.numel() > 0 && weight.numel() > 0;
  if (!is_float) return std::nullopt;
  auto ints = [](const std::vector<SymInt>& values) { return C10_AS_INTARRAYREF_SLOW(values); };
  check_types(input, weight, optional_if_defined(bias));
  const auto windows = expand_windows<int64_t>(ints(g.stride), ints(g.padding), ints(g.dilation),
                                               g.groups.expect_int());
  const auto sizes =
      output_sizes<int64_t>(input, weight, optional_if_defined(bias), windows, int_sizes);
  const auto format = memory_format_of(input, weight);
  Planned call{.shape = {.conv = shape_of(input, weight, sizes, windows, format), .pool = {}},
               .plan = {},
               .format = format};
  const IntPair out = pooled != nullptr ? *pooled : halves(call.shape.conv, w, ceil_mode);
  const int64_t channels = weight.size(0);
  const std::array<int64_t, 4> outputs{sizes[0], channels, out[0], out[1]};
  call.shape.pool = pool_geometry(sizes, outputs, w, call.shape.conv.channels_last);
  const auto choice = choose_conv2d_batch_norm_relu_max_pool2d(call.shape, current_device_info());
  if (!choice.plan) return std::nullopt;
  call.plan = *choice.plan;
  return call;
}

// A vector of the norm: one float per output channel.
ChannelVector norm_vector(const Tensor& tensor, const char* name, const Planned& call,
                          const Tensor& input, bool writable) {
  if (!tensor.defined()) return {};
  check_argument(tensor, name, {SymInt(call.shape.conv.k)}, at::kFloat, input);
  return channel_vector(tensor, name, writable);
}

// In `format` and at a multiple of 16 bytes.
Tensor vectors_of(const Tensor& tensor, at::MemoryFormat format) {
  const Tensor result = in_format(tensor, format);
  return address_of(result.const_data_ptr()) % 16 == 0 ? result : result.clone();
}

template <class T>
T* data_or_null(const Tensor& tensor) {
  return tensor.defined() ? static_cast<T*>(tensor.mutable_data_ptr()) : nullptr;
}

#define WARPWRIGHT_ARGUMENT(name) "conv2d_batch_norm_relu_max_pool2d: " name

Tensors5 forward_cuda(const Call& c) {
  const CudaCall cuda(c.input);
  const auto planned =
      plan_call(c.input, c.weight, c.bias, c.geometry, c.window, nullptr, c.ceil_mode);
  if (!planned) return composed(c);
  const Conv2dShape& s = planned->shape.conv;
  for (const auto& [tensor, name] : {std::pair(&c.input, WARPWRIGHT_ARGUMENT("input")),
                                     {&c.weight, WARPWRIGHT_ARGUMENT("weight")},
                                     {&c.bias, WARPWRIGHT_ARGUMENT("bias")}}) {
    check_has_storage(*tensor, name);
  }
  const auto vector = [&](const Tensor& tensor, const char* name, bool writable) {
    return norm_vector(tensor, name, *planned, c.input, writable);
  };
  const auto norm_weight = vector(c.norm_weight, WARPWRIGHT_ARGUMENT("norm_weight"), false);
  const auto norm_bias = vector(c.norm_bias, WARPWRIGHT_ARGUMENT("norm_bias"), false);
  const auto running_mean = vector(c.running_mean, WARPWRIGHT_ARGUMENT("running_mean"), true);
  const auto running_var = vector(c.running_var, WARPWRIGHT_ARGUMENT("running_var"), true);
  const std::array<int64_t, 4> outputs{s.n, s.k, planned->shape.pool.out_height,
                                       planned->shape.pool.out_width};
  const auto options = c.input.options();
  const Tensor output = at::empty(outputs, options.memory_format(planned->format));
  const auto bytes = options.dtype(at::kByte);
  const Tensor codes =
      c.save ? at::empty(outputs, bytes.memory_format(planned->format)) : at::empty({0}, bytes);
  const Tensor mean = at::empty({s.k}, options), rstd = at::empty({s.k}, options);
  const int64_t sums = kept_moments(c);
  const Tensor moments = at::empty({sums}, options.dtype(at::kDouble));
  const Tensor x = in_format(c.input, planned->format), w = in_format(c.weight, planned->format);
  const Tensor b = c.bias.defined() ? c.bias.contiguous() : Tensor();
  const Workspace workspace(planned->plan.workspace_bytes, c.input);
  launch_conv2d_batch_norm_relu_max_pool2d(
      {.shape = planned->shape,
       .input = x.const_data_ptr<float>(),
       .weight = w.const_data_ptr<float>(),
       .bias = b.defined() ? b.const_data_ptr<float>() : nullptr,
       .norm_weight = norm_weight,
       .norm_bias = norm_bias,
       .running_mean = running_mean,
       .running_var = running_var,
       .momentum = c.momentum,
       .eps = c.eps,
       .output = output.mutable_data_ptr<float>(),
       .codes = c.save ? codes.mutable_data_ptr<SmallCode>() : nullptr,
       .mean = mean.mutable_data_ptr<float>(),
       .rstd = rstd.mutable_data_ptr<float>(),
       .moments = sums > 0 ? moments.mutable_data_ptr<double>() : nullptr},
      planned->plan, workspace.data(), cuda.stream);
  return {output, mean, rstd, codes, moments};
}

#undef WARPWRIGHT_ARGUMENT
#define WARPWRIGHT_ARGUMENT(name) "conv2d_batch_norm_relu_max_pool2d_backward: " name

Tensors5 backward_cuda(const BackwardCall& b) {
  const auto& wanted = b.output_mask;
  const CudaCall cuda(b.input);
  if (wanted[0] || b.codes.dim() != 4) return composed(b);
  const IntPair pooled{b.codes.size(2), b.codes.size(3)};
  const auto planned = plan_call(b.input, b.weight, b.bias, b.geometry, b.window, &pooled, false);
  if (!planned) return composed(b);
  const Conv2dShape& s = planned->shape.conv;
  const SymInt outputs[] = {s.n, s.k, pooled[0], pooled[1]}, channels[] = {s.k};
  check_argument(b.grad_output, WARPWRIGHT_ARGUMENT("grad_output"), outputs, at::kFloat, b.input);
  check_argument(b.codes, WARPWRIGHT_ARGUMENT("codes"), outputs, at::kByte, b.input);
  check_argument(b.mean, WARPWRIGHT_ARGUMENT("mean"), channels, at::kFloat, b.input);
  check_argument(b.rstd, WARPWRIGHT_ARGUMENT("rstd"), channels, at::kFloat, b.input);
  const bool kept = b.moments.numel() > 0;  // a forward in shards, or under vmap, may have none
  const SymInt sums[] = {window_sums(planned->shape.elements())};
  if (kept) check_argument(b.moments, WARPWRIGHT_ARGUMENT("moments"), sums, at::kDouble, b.input);
  for (const auto& [tensor, name] : {std::pair(&b.grad_output, WARPWRIGHT_ARGUMENT("grad_output")),
                                     {&b.input, WARPWRIGHT_ARGUMENT("input")},
                                     {&b.weight, WARPWRIGHT_ARGUMENT("weight")},
                                     {&b.bias, WARPWRIGHT_ARGUMENT("bias")},
                                     {&b.mean, WARPWRIGHT_ARGUMENT("mean")},
                                     {&b.rstd, WARPWRIGHT_ARGUMENT("rstd")},
                                     {&b.codes, WARPWRIGHT_ARGUMENT("codes")}}) {
    check_has_storage(*tensor, name);
  }
  const auto norm_weight =
      norm_vector(b.norm_weight, WARPWRIGHT_ARGUMENT("norm_weight"), *planned, b.input, false);
  const Tensor dy = vectors_of(b.grad_output, planned->format);
  const Tensor codes = vectors_of(b.codes, planned->format);
  const Tensor x = in_format(b.input, planned->format), w = in_format(b.weight, planned->format);
  const Tensor rstd = b.rstd.contiguous(), moments = b.moments.contiguous();
  const auto options = b.input.options();
  Tensor dw, db, d_norm_weight, d_norm_bias;
  if (wanted[1]) dw = at::empty(b.weight.sizes(), options.memory_format(planned->format));
  if (wanted[2]) db = at::empty({s.k}, options);
  if (wanted[3]) d_norm_weight = at::empty({s.k}, options);
  if (wanted[4]) d_norm_bias = at::empty({s.k}, options);
  const Workspace workspace(planned->plan.backward_workspace_bytes, b.input);
  launch_conv2d_batch_norm_relu_max_pool2d_backward(
      {.shape = planned->shape,
       .grad_output = dy.const_data_ptr<float>(),
       .codes = codes.const_data_ptr<SmallCode>(),
       .input = x.const_data_ptr<float>(),
       .weight = w.const_data_ptr<float>(),
       .norm_weight = norm_weight,
       .rstd = rstd.const_data_ptr<float>(),
       .moments = kept ? moments.const_data_ptr<double>() : nullptr,
       .grad_weight = data_or_null<float>(dw),
       .grad_bias = data_or_null<float>(db),
       .grad_norm_weight = data_or_null<float>(d_norm_weight),
       .grad_norm_bias = data_or_null<float>(d_norm_bias)},
      planned->plan, workspace.data(), cuda.stream);
  return {Tensor(), dw, db, d_norm_weight, d_norm_bias};
}

#undef WARPWRIGHT_ARGUMENT
#endif

// ---- the registered forms ----

// Not every form reads the moments.
template <Tensors5 (*kRun)(const BackwardCall&)>
Tensors5 with_moments(const BackwardCall& b) {
  check_has_storage(b.moments, "conv2d_batch_norm_relu_max_pool2d_backward: moments");
  return kRun(b);
}

template <Tensors5 (*kRun)(const Call&)>
Tensors5 forward_kernel(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                        const OptionalTensor& norm_weight, const OptionalTensor& norm_bias,
                        double eps, SymIntArrayRef stride, SymIntArrayRef padding,
                        SymIntArrayRef dilation, SymInt groups, IntArrayRef pool_kernel,
                        IntArrayRef pool_stride, IntArrayRef pool_padding,
                        IntArrayRef pool_dilation, bool ceil_mode, bool save) {
  return kRun(call_of(input, weight, bias, norm_weight, norm_bias, eps, stride, padding, dilation,
                      std::move(groups), pool_kernel, pool_stride, pool_padding, pool_dilation,
                      ceil_mode, save));
}
template <Tensors5 (*kRun)(const Call&)>
Tensors5 update_kernel(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                       const OptionalTensor& norm_weight, const OptionalTensor& norm_bias,
                       Tensor running_mean, Tensor running_var, double momentum, double eps,
                       SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef dilation,
                       SymInt groups, IntArrayRef pool_kernel, IntArrayRef pool_stride,
                       IntArrayRef pool_padding, IntArrayRef pool_dilation, bool ceil_mode,
                       bool save) {
  return kRun(update_call_of(input, weight, bias, norm_weight, norm_bias, running_mean, running_var,
                             momentum, eps, stride, padding, dilation, std::move(groups),
                             pool_kernel, pool_stride, pool_padding, pool_dilation, ceil_mode,
                             save));
}
template <Tensors5 (*kRun)(const BackwardCall&)>
Tensors5 backward_kernel(const Tensor& grad_output, const Tensor& input, const Tensor& weight,
                         const OptionalTensor& bias, const OptionalTensor& norm_weight,
                         const Tensor& mean, const Tensor& rstd, const Tensor& codes,
                         const Tensor& moments, SymIntArrayRef stride, SymIntArrayRef padding,
                         SymIntArrayRef dilation, SymInt groups, IntArrayRef pool_kernel,
                         IntArrayRef pool_stride, IntArrayRef pool_padding,
                         IntArrayRef pool_dilation, Mask5 output_mask) {
  return kRun(backward_call_of(grad_output, input, weight, bias, norm_weight, mean, rstd, codes,
                               moments, stride, padding, dilation, std::move(groups), pool_kernel,
                               pool_stride, pool_padding, pool_dilation, output_mask));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def(
      "conv2d_batch_norm_relu_max_pool2d(Tensor input, Tensor weight, Tensor? bias, "
      "Tensor? norm_weight, Tensor? norm_bias, float eps, SymInt[2] stride, SymInt[2] padding, "
      "SymInt[2] dilation, SymInt groups, int[2] pool_kernel, int[2] pool_stride, "
      "int[2] pool_padding, int[2] pool_dilation, bool ceil_mode, bool save=False) "
      "-> (Tensor output, Tensor mean, Tensor rstd, Tensor codes, Tensor moments)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "conv2d_batch_norm_relu_max_pool2d_update(Tensor input, Tensor weight, Tensor? bias, "
      "Tensor? norm_weight, Tensor? norm_bias, Tensor(a!) running_mean, Tensor(b!) running_var, "
      "float momentum, float eps, SymInt[2] stride, SymInt[2] padding, SymInt[2] dilation, "
      "SymInt groups, int[2] pool_kernel, int[2] pool_stride, int[2] pool_padding, "
      "int[2] pool_dilation, bool ceil_mode, bool save=False) "
      "-> (Tensor output, Tensor mean, Tensor rstd, Tensor codes, Tensor moments)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "conv2d_batch_norm_relu_max_pool2d_backward(Tensor grad_output, Tensor input, "
      "Tensor weight, Tensor? bias, Tensor? norm_weight, Tensor mean, Tensor rstd, Tensor codes, "
      "Tensor moments, SymInt[2] stride, SymInt[2] padding, SymInt[2] dilation, SymInt groups, "
      "int[2] pool_kernel, int[2] pool_stride, int[2] pool_padding, int[2] pool_dilation, "
      "bool[5] output_mask) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) {
  m.impl("conv2d_batch_norm_relu_max_pool2d", forward_kernel<composed>);
  m.impl("conv2d_batch_norm_relu_max_pool2d_update", update_kernel<composed>);
  m.impl("conv2d_batch_norm_relu_max_pool2d_backward", backward_kernel<with_moments<composed>>);
}

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) {
  m.impl("conv2d_batch_norm_relu_max_pool2d", forward_kernel<forward_cuda>);
  m.impl("conv2d_batch_norm_relu_max_pool2d_update", update_kernel<forward_cuda>);
  m.impl("conv2d_batch_norm_relu_max_pool2d_backward",
         backward_kernel<with_moments<backward_cuda>>);
}
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) {
  m.impl("conv2d_batch_norm_relu_max_pool2d", forward_kernel<composed>);
  m.impl("conv2d_batch_norm_relu_max_pool2d_update", update_kernel<composed>);
  m.impl("conv2d_batch_norm_relu_max_pool2d_backward", backward_kernel<composed>);
}

}  // namespace warpwright
