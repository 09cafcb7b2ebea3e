// conv2d, conv2d_padding and conv2d_backward on every dispatch key.
#include <ATen/autocast_mode.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/SymIntArrayRef.h>

#include <tuple>

#include "ops/conv2d/conv2d.h"
#include "ops/conv2d/conv2d_path.h"
#include "torch/autograd.h"
#include "torch/dispatch.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include <ATen/Context.h>

#include "torch/cuda.h"
#endif

namespace warpwright {
namespace {

using at::IntArrayRef;
using c10::SymInt;
using c10::SymIntArrayRef;
using Mask = std::array<bool, 3>;  // grad_input, grad_weight, grad_bias
using Gradients = std::tuple<Tensor, Tensor, Tensor>;
using OptionalTensor = std::optional<Tensor>;

// Arguments after the tensors. `padding` is (h, w), or (top, left, bottom, right) for the uneven
// padding of 'same' with an even kernel.
struct Geometry {
  std::vector<SymInt> stride, padding, dilation;
  SymInt groups;
};

// The ops through the dispatcher. Called qualified: at::conv2d would be found beside ours by ADL.
namespace call {

Tensor conv2d(const Tensor& input, const Tensor& weight, const Tensor& bias, const Geometry& g) {
  static const auto op =
      find_op<Tensor(const Tensor&, const Tensor&, const OptionalTensor&, SymIntArrayRef,
                     SymIntArrayRef, SymIntArrayRef, SymInt)>("warpwright::conv2d");
  return op.call(input, weight, optional_if_defined(bias), g.stride, g.padding, g.dilation,
                 g.groups);
}

Gradients conv2d_backward(const Tensor& grad_output, const Tensor& input, const Tensor& weight,
                          const Geometry& g, Mask mask) {
  static const auto op =
      find_op<Gradients(const Tensor&, const Tensor&, const Tensor&, SymIntArrayRef, SymIntArrayRef,
                        SymIntArrayRef, SymInt, Mask)>("warpwright::conv2d_backward");
  return op.call(grad_output, input, weight, g.stride, g.padding, g.dilation, g.groups, mask);
}

Tensor input_gradient(const Tensor& grad_output, const Tensor& input, const Tensor& weight,
                      const Geometry& g) {
  return std::get<0>(conv2d_backward(grad_output, input, weight, g, {true, false, false}));
}

Tensor weight_gradient(const Tensor& grad_output, const Tensor& input, const Tensor& weight,
                       const Geometry& g) {
  return std::get<1>(conv2d_backward(grad_output, input, weight, g, {false, true, false}));
}

}  // namespace call

// ---- checks and output shape: in native's order and words ----

template <class Int>
struct Windows {
  Int stride[2], pad_before[2], pad_after[2], dilation[2], groups;
};

// One value stands for both dimensions.
template <class Int>
void expand_pair(const char* name, c10::ArrayRef<Int> values, Int (&pair)[2]) {
  TORCH_CHECK(values.size() == 1 || values.size() == 2, "expected ", name,
              " to be a single integer value or a list of 2 values to match the convolution "
              "dimensions, but got ",
              name, "=", values);
  pair[0] = values[0];
  pair[1] = values[values.size() - 1];
}

template <class Int>
Windows<Int> expand_windows(c10::ArrayRef<Int> stride, c10::ArrayRef<Int> padding,
                            c10::ArrayRef<Int> dilation, Int groups) {
  Windows<Int> v;
  TORCH_CHECK(groups > 0, "non-positive groups is not supported");
  expand_pair("stride", stride, v.stride);
  expand_pair("dilation", dilation, v.dilation);
  if (padding.size() == 4) {
    for (int i = 0; i < 2; ++i) {
      v.pad_before[i] = padding[i];
      v.pad_after[i] = padding[i + 2];
    }
  } else {
    expand_pair("padding", padding, v.pad_before);
    for (int i = 0; i < 2; ++i) v.pad_after[i] = v.pad_before[i];
  }
  v.groups = groups;
  for (int i = 0; i < 2; ++i) {
    TORCH_CHECK(v.pad_before[i] >= 0 && v.pad_after[i] >= 0, "negative padding is not supported");
  }
  for (int i = 0; i < 2; ++i) {
    TORCH_CHECK(v.stride[i] > 0, "non-positive stride is not supported");
  }
  for (int i = 0; i < 2; ++i) {
    TORCH_CHECK(v.dilation[i] > 0, "dilation should be greater than zero");
  }
  return v;
}

void check_types(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  TORCH_CHECK(input.dim() == 3 || input.dim() == 4,
              "Expected 3D (unbatched) or 4D (batched) input to conv2d, but got input of size: ",
              input.sym_sizes());
  const bool biased = bias.has_value() && bias->defined();
  TORCH_CHECK(!biased || bias->dtype() == input.dtype(), "Input type (", input.dtype().name(),
              ") and bias type (", biased ? bias->dtype().name() : "", ") should be the same");
  TORCH_CHECK(weight.dim() >= 3, "weight should have at least three dimensions");
  TORCH_CHECK(weight.scalar_type() == input.scalar_type(), "Input type (", input.toString(),
              ") and weight type (", weight.toString(), ") should be the same");
  for (const Tensor* other : {&weight, biased ? &*bias : &weight}) {
    TORCH_CHECK(other->device() == input.device(),
                "Expected all tensors to be on the same device, ",
                "but found at least two devices, ", input.device(), " and ", other->device(), "!");
  }
}

// Sizes of the output of a batched convolution; throws where native does. `sizes` gives a tensor's
// extents as Int.
template <class Int, class Sizes>
std::array<Int, 4> output_sizes(const Tensor& input, const Tensor& weight,
                                const OptionalTensor& bias, const Windows<Int>& v, Sizes&& sizes) {
  const auto x = sizes(input);
  const auto w = sizes(weight);
  TORCH_CHECK(w.size() == 4, "expected stride to be a single integer value or a list of ",
              w.size() - 2, " values to match the convolution dimensions, but got stride=[",
              v.stride[0], ", ", v.stride[1], "]");
  TORCH_CHECK(w[0] >= v.groups, "Given groups=", v.groups, ", expected weight to be at least ",
              v.groups, " at dimension 0, but got weight of size ", w, " instead");
  TORCH_CHECK(w[0] % v.groups == 0, "Given groups=", v.groups,
              ", expected weight to be divisible by ", v.groups,
              " at dimension 0, but got weight of size [", w, "] instead");
  TORCH_CHECK(x[1] == w[1] * v.groups, "Given groups=", v.groups, ", weight of size ", w,
              ", expected input", x, " to have ", w[1] * v.groups, " channels, but got ", x[1],
              " channels instead");
  if (bias.has_value() && bias->defined()) {
    TORCH_CHECK(bias->dim() == 1 && sizes(*bias)[0] == w[0], "Given weight of size ", w,
                ", expected bias to be 1-dimensional with ", w[0],
                " elements, but got bias of size ", sizes(*bias), " instead");
  }
  TORCH_CHECK(w[2] > 0 && w[3] > 0, "weight: expected a kernel of at least one element, got (",
              w[2], " x ", w[3], ")");
  Int padded[2], kernel[2];
  for (int i = 0; i < 2; ++i) {
    padded[i] = x[i + 2] + v.pad_before[i] + v.pad_after[i];
    kernel[i] = v.dilation[i] * (w[i + 2] - 1) + 1;
  }
  TORCH_CHECK(padded[0] >= kernel[0] && padded[1] >= kernel[1],
              "Calculated padded input size per channel: (", padded[0], " x ", padded[1],
              "). Kernel size: (", kernel[0], " x ", kernel[1],
              "). Kernel size can't be greater than actual input size");
  if (x[0] != 0 && x[1] != 0) {
    TORCH_CHECK(x[2] != 0 && x[3] != 0,
                "Only zero batch or zero channel inputs are supported, but got input shape: ", x);
  }
  // Native's rule: without input channels there are no output channels either.
  return {x[0], x[1] == 0 ? Int(0) : w[0], (padded[0] - kernel[0]) / v.stride[0] + 1,
          (padded[1] - kernel[1]) / v.stride[1] + 1};
}

const auto int_sizes = [](const Tensor& tensor) { return tensor.sizes(); };
const auto sym_sizes = [](const Tensor& tensor) { return tensor.sym_sizes(); };

// Native's rule: channels_last as soon as the input or the weight is.
at::MemoryFormat memory_format_of(const Tensor& input, const Tensor& weight) {
  const bool last = input.suggest_memory_format() == at::MemoryFormat::ChannelsLast ||
                    weight.suggest_memory_format() == at::MemoryFormat::ChannelsLast;
  return last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
}

// What none of our kernels takes goes to native as a whole: integers (CPU only there), complex.
bool is_ours(const Tensor& input) { return is_floating(input.scalar_type()); }

Tensor batched(const Tensor& input) { return input.dim() == 3 ? input.unsqueeze(0) : input; }

// ---- CPU and CUDA ----

Conv2dShape shape_of(const Tensor& input, const Tensor& weight, const std::array<int64_t, 4>& out,
                     const Windows<int64_t>& v, at::MemoryFormat format) {
  Conv2dShape shape{};
  shape.dtype = dtype_of(input);
  shape.channels_last = format == at::MemoryFormat::ChannelsLast;
  shape.n = input.size(0);
  shape.c = input.size(1);
  shape.h = input.size(2);
  shape.w = input.size(3);
  shape.k = weight.size(0);
  shape.r = weight.size(2);
  shape.s = weight.size(3);
  shape.p = out[2];
  shape.q = out[3];
  shape.stride_h = v.stride[0];
  shape.stride_w = v.stride[1];
  shape.pad_h = v.pad_before[0];
  shape.pad_w = v.pad_before[1];
  shape.dilation_h = v.dilation[0];
  shape.dilation_w = v.dilation[1];
  shape.groups = v.groups;
  return shape;
}

template <class Run>
Tensor conv2d_with(const Tensor& input_, const Tensor& weight, const OptionalTensor& bias,
                   IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, int64_t groups,
                   Run&& run) {
  check_types(input_, weight, bias);
  if (!is_ours(input_)) {
    return at::conv2d(input_, weight, bias, stride, padding, dilation, groups);
  }
  const Tensor input = batched(input_);
  const auto v = expand_windows<int64_t>(stride, padding, dilation, groups);
  const auto sizes = output_sizes<int64_t>(input, weight, bias, v, int_sizes);
  const auto format = memory_format_of(input, weight);
  Tensor output = at::empty(sizes, input.options().memory_format(format));
  if (output.numel() != 0) {
    const Tensor x = input.contiguous(format);
    const Tensor w = weight.contiguous(format);
    const Tensor b = value_or_undefined(bias).defined() ? bias->contiguous() : Tensor();
    run(Conv2dParams{shape_of(x, w, sizes, v, format), x.const_data_ptr(), w.const_data_ptr(),
                     b.defined() ? b.const_data_ptr() : nullptr, output.mutable_data_ptr()});
  }
  return input_.dim() == 3 ? output.squeeze(0) : output;
}

template <class Int, class Sizes>
void check_conv2d_backward(const Tensor& grad_output, const Tensor& input, const Tensor& weight,
                           const std::array<Int, 4>& out, Sizes&& sizes) {
  TORCH_CHECK(sizes(grad_output).equals(c10::ArrayRef<Int>(out)),
              "conv2d_backward: grad_output: expected shape ", c10::ArrayRef<Int>(out), ", got ",
              sizes(grad_output));
  TORCH_CHECK(grad_output.scalar_type() == input.scalar_type(),
              "conv2d_backward: grad_output: expected ", input.scalar_type(), ", got ",
              grad_output.scalar_type());
  TORCH_CHECK_NOT_IMPLEMENTED(is_ours(input), "conv2d_backward: input: expected float32, float64, ",
                              "bfloat16 or float16, got ", input.scalar_type());
  (void)weight;
}

template <class Run>
Gradients conv2d_backward_with(const Tensor& grad_output_, const Tensor& input_,
                               const Tensor& weight, IntArrayRef stride, IntArrayRef padding,
                               IntArrayRef dilation, int64_t groups, Mask mask, Run&& run) {
  check_types(input_, weight, std::nullopt);
  const Tensor input = batched(input_);
  const Tensor grad_output = batched(grad_output_);
  const auto v = expand_windows<int64_t>(stride, padding, dilation, groups);
  const auto sizes = output_sizes<int64_t>(input, weight, std::nullopt, v, int_sizes);
  check_conv2d_backward<int64_t>(grad_output, input, weight, sizes, int_sizes);
  const auto format = memory_format_of(input, weight);
  const bool empty = grad_output.numel() == 0 || input.numel() == 0;
  auto make = [&](bool wanted, IntArrayRef shape, at::TensorOptions options) {
    if (!wanted) return Tensor();
    return empty ? at::zeros(shape, options) : at::empty(shape, options);
  };
  const auto options = input.options().memory_format(format);
  Tensor grad_input = make(mask[0], input.sizes(), options);
  Tensor grad_weight = make(mask[1], weight.sizes(), options);
  Tensor grad_bias = make(mask[2], weight.sizes().slice(0, 1), input.options());
  if (!empty && (mask[0] || mask[1] || mask[2])) {
    const Tensor dy = grad_output.contiguous(format);
    const Tensor x = mask[1] ? input.contiguous(format) : Tensor();
    const Tensor w = mask[0] ? weight.contiguous(format) : Tensor();
    auto in = [](const Tensor& t) { return t.defined() ? t.const_data_ptr() : nullptr; };
    auto out = [](const Tensor& t) { return t.defined() ? t.mutable_data_ptr() : nullptr; };
    run(Conv2dBackwardParams{shape_of(input, weight, sizes, v, format), dy.const_data_ptr(), in(x),
                             in(w), out(grad_input), out(grad_weight), out(grad_bias)});
  }
  if (mask[0] && input_.dim() == 3) grad_input = grad_input.squeeze(0);
  return {grad_input, grad_weight, grad_bias};
}

Tensor conv2d_cpu_kernel(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                         IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                         int64_t groups) {
  return conv2d_with(input, weight, bias, stride, padding, dilation, groups, conv2d_cpu);
}
Gradients conv2d_backward_cpu_kernel(const Tensor& grad_output, const Tensor& input,
                                     const Tensor& weight, IntArrayRef stride, IntArrayRef padding,
                                     IntArrayRef dilation, int64_t groups, Mask mask) {
  return conv2d_backward_with(grad_output, input, weight, stride, padding, dilation, groups, mask,
                              conv2d_backward_cpu);
}

#ifdef WARPWRIGHT_WITH_CUDA
// Or-ed together: all of them are aligned where the sum is.
template <class... Pointers>
uintptr_t addresses(Pointers... pointers) {
  return (reinterpret_cast<uintptr_t>(pointers) | ...);
}

// float32 on tensor cores as native: torch.backends.cudnn.conv.fp32_precision or allow_tf32.
bool allow_tf32() { return at::globalContext().allowTF32CuDNN(at::Float32Op::CONV); }

Tensor conv2d_cuda_kernel(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                          IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                          int64_t groups) {
  const CudaCall call(input);
  return conv2d_with(input, weight, bias, stride, padding, dilation, groups, [&](Conv2dParams p) {
    p.shape.allow_tf32 = allow_tf32();
    const DeviceInfo& device = current_device_info();
    const uintptr_t all = addresses(p.input, p.weight, p.output);
    switch (choose_conv2d_path(ConvDirection::kForward, p.shape, all, device)) {
      case Conv2dPath::kFewChannels:
        return launch_conv2d_few_channels_fwd(p, call.stream);
      case Conv2dPath::kDepthwise:
        return launch_conv2d_depthwise_fwd(p, call.stream);
      case Conv2dPath::kImplicitGemm:
        return launch_conv2d_forward(
            p, choose_conv2d_config(ConvDirection::kForward, p.shape, all, device), call.stream);
    }
  });
}

// Freed on return of the op: the caching allocator gives it to later work of this stream only.
struct Workspace {
  Tensor bytes;
  Workspace(int64_t size, const Tensor& like)
      : bytes(size > 0 ? at::empty({size}, like.options().dtype(at::kByte)) : Tensor()) {}
  void* data() const { return bytes.defined() ? bytes.mutable_data_ptr() : nullptr; }
};

void input_gradient_cuda(const Conv2dBackwardParams& p, cudaStream_t stream) {
  const DeviceInfo& device = current_device_info();
  const uintptr_t all = addresses(p.grad_output, p.weight, p.grad_input);
  switch (choose_conv2d_path(ConvDirection::kInputGradient, p.shape, all, device)) {
    case Conv2dPath::kFewChannels:
      return launch_conv2d_few_channels_dgrad(
          p, choose_few_channels_dgrad_config(p.shape, all, device), stream);
    case Conv2dPath::kDepthwise:
      return launch_conv2d_depthwise_dgrad(p, stream);
    case Conv2dPath::kImplicitGemm:
      return launch_conv2d_input_gradient(
          p, choose_conv2d_config(ConvDirection::kInputGradient, p.shape, all, device), stream);
  }
}

// The weight's and, where they are one kernel, the bias's; returns whether it was.
bool weight_gradient_cuda(Conv2dBackwardParams p, const Tensor& like, cudaStream_t stream) {
  const DeviceInfo& device = current_device_info();
  const uintptr_t all = addresses(p.grad_output, p.input, p.grad_weight);
  const Conv2dPath path = choose_conv2d_path(ConvDirection::kWeightGradient, p.shape, all, device);
  if (path == Conv2dPath::kFewChannels) {
    const Workspace parts(conv2d_few_channels_wgrad_workspace_bytes(p.shape, device), like);
    launch_conv2d_few_channels_wgrad(p, parts.data(), stream);
    return true;
  }
  if (path == Conv2dPath::kDepthwise) {
    const Workspace parts(conv2d_depthwise_wgrad_workspace_bytes(p.shape, device), like);
    launch_conv2d_depthwise_wgrad(p, parts.data(), stream);
    return true;
  }
  const Conv2dConfig config =
      choose_conv2d_config(ConvDirection::kWeightGradient, p.shape, all, device);
  const Workspace parts(conv2d_workspace_bytes(p.shape, config), like);
  p.workspace = parts.data();
  launch_conv2d_weight_gradient(p, config, stream);
  return false;
}

Gradients conv2d_backward_cuda_kernel(const Tensor& grad_output, const Tensor& input,
                                      const Tensor& weight, IntArrayRef stride, IntArrayRef padding,
                                      IntArrayRef dilation, int64_t groups, Mask mask) {
  const CudaCall call(input);
  const auto run = [&](Conv2dBackwardParams p) {
    p.shape.allow_tf32 = allow_tf32();
    if (p.grad_input != nullptr) input_gradient_cuda(p, call.stream);
    const bool with_bias = p.grad_weight != nullptr && weight_gradient_cuda(p, input, call.stream);
    if (p.grad_bias != nullptr && !with_bias) {
      const Workspace parts(conv2d_bias_grad_workspace_bytes(p.shape, current_device_info()),
                            input);
      launch_conv2d_bias_grad(p, parts.data(), call.stream);
    }
  };
  return conv2d_backward_with(grad_output, input, weight, stride, padding, dilation, groups, mask,
                              run);
}
#endif

// ---- Meta ----

Tensor conv2d_meta(const Tensor& input_, const Tensor& weight, const OptionalTensor& bias,
                   SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef dilation,
                   SymInt groups) {
  check_types(input_, weight, bias);
  if (!is_ours(input_)) {
    return at::conv2d_symint(input_, weight, bias, stride, padding, dilation, groups);
  }
  const Tensor input = batched(input_);
  const auto v = expand_windows<SymInt>(stride, padding, dilation, groups);
  const auto sizes = output_sizes<SymInt>(input, weight, bias, v, sym_sizes);
  Tensor output =
      at::empty_symint(sizes, input.options().memory_format(memory_format_of(input, weight)));
  return input_.dim() == 3 ? output.squeeze(0) : output;
}

Gradients conv2d_backward_meta(const Tensor& grad_output_, const Tensor& input_,
                               const Tensor& weight, SymIntArrayRef stride, SymIntArrayRef padding,
                               SymIntArrayRef dilation, SymInt groups, Mask mask) {
  check_types(input_, weight, std::nullopt);
  const Tensor input = batched(input_);
  const auto v = expand_windows<SymInt>(stride, padding, dilation, groups);
  const auto sizes = output_sizes<SymInt>(input, weight, std::nullopt, v, sym_sizes);
  check_conv2d_backward<SymInt>(batched(grad_output_), input, weight, sizes, sym_sizes);
  const auto options = input.options().memory_format(memory_format_of(input, weight));
  Gradients gradients;
  if (mask[0]) {
    const Tensor grad_input = at::empty_symint(input.sym_sizes(), options);
    std::get<0>(gradients) = input_.dim() == 3 ? grad_input.squeeze(0) : grad_input;
  }
  if (mask[1]) std::get<1>(gradients) = at::empty_symint(weight.sym_sizes(), options);
  if (mask[2]) {
    std::get<2>(gradients) = at::empty_symint({weight.sym_size(0)}, input.options());
  }
  return gradients;
}

// ---- Autograd ----

// saved: input, weight.
struct Conv2dBackward {
  static constexpr const char* kName = "WarpwrightConv2dBackward";
  using Attributes = Geometry;
  static variable_list backward(const Attributes& geometry, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    auto [grad_input, grad_weight, grad_bias] = call::conv2d_backward(
        grads[0], saved[0], saved[1], geometry, {needs[0], needs[1], needs[2]});
    return {grad_input, grad_weight, grad_bias};
  }
};

Tensor sum_of(const Tensor& a, const Tensor& b) {
  if (!a.defined()) return b;
  return b.defined() ? a + b : a;
}

// Each gradient is bilinear, so its derivatives are convolutions again. saved: grad_output, input,
// weight; grads: of grad_input, grad_weight, grad_bias.
struct Conv2dBackwardBackward {
  static constexpr const char* kName = "WarpwrightConv2dBackwardBackward";
  using Attributes = Geometry;
  static variable_list backward(const Attributes& geometry, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    const Tensor &grad_output = saved[0], &input = saved[1], &weight = saved[2];
    const Tensor &gg_input = grads[0], &gg_weight = grads[1], &gg_bias = grads[2];
    Tensor d_grad_output, d_input, d_weight;
    if (needs[0]) {
      Tensor bias = gg_bias;  // rides on the first convolution
      if (gg_input.defined()) {
        d_grad_output = call::conv2d(gg_input, weight, bias, geometry);
        bias = Tensor();
      }
      if (gg_weight.defined()) {
        d_grad_output = sum_of(d_grad_output, call::conv2d(input, gg_weight, bias, geometry));
        bias = Tensor();
      }
      if (bias.defined()) {
        d_grad_output = bias.view({-1, 1, 1}).expand_symint(grad_output.sym_sizes()).contiguous();
      }
    }
    if (needs[1] && gg_weight.defined()) {
      d_input = call::input_gradient(grad_output, input, gg_weight, geometry);
    }
    if (needs[2] && gg_input.defined()) {
      d_weight = call::weight_gradient(grad_output, gg_input, weight, geometry);
    }
    return {d_grad_output, d_input, d_weight};
  }
};

Geometry geometry_of(SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef dilation,
                     SymInt groups) {
  return {stride.vec(), padding.vec(), dilation.vec(), std::move(groups)};
}

Tensor conv2d_autograd(const Tensor& input, const Tensor& weight, const OptionalTensor& bias_,
                       SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef dilation,
                       SymInt groups) {
  if (!is_ours(input) && padding.size() <= 2) {
    return at::conv2d_symint(input, weight, bias_, stride, padding, dilation, groups);
  }
  const Tensor bias = value_or_undefined(bias_);
  const Geometry geometry = geometry_of(stride, padding, dilation, groups);
  auto node = make_node<Conv2dBackward>(geometry, input, weight, bias);
  Tensor output = below_autograd([&] { return call::conv2d(input, weight, bias, geometry); });
  if (node) {
    node->save(input);
    node->save(weight);
    set_history(output, node);
  }
  if (any_tangent(input, weight, bias)) {
    const Tensor x = primal(input), w = primal(weight);
    Tensor b = has_tangent(bias) ? tangent(bias) : Tensor();
    Tensor result;
    if (has_tangent(input)) {
      result = call::conv2d(tangent(input), w, b, geometry);
      b = Tensor();
    }
    if (has_tangent(weight)) {
      result = sum_of(result, call::conv2d(x, tangent(weight), b, geometry));
      b = Tensor();
    }
    if (b.defined()) result = b.view({-1, 1, 1}).expand_symint(output.sym_sizes()).contiguous();
    set_tangent(output, result);
  }
  return output;
}

Gradients conv2d_backward_autograd(const Tensor& grad_output, const Tensor& input,
                                   const Tensor& weight, SymIntArrayRef stride,
                                   SymIntArrayRef padding, SymIntArrayRef dilation, SymInt groups,
                                   Mask mask) {
  const Geometry geometry = geometry_of(stride, padding, dilation, groups);
  auto node = make_node<Conv2dBackwardBackward>(geometry, grad_output, input, weight);
  Gradients gradients = below_autograd(
      [&] { return call::conv2d_backward(grad_output, input, weight, geometry, mask); });
  auto& [grad_input, grad_weight, grad_bias] = gradients;
  if (node) {
    node->save(grad_output);
    node->save(input);
    node->save(weight);
    set_history(variable_list{grad_input, grad_weight, grad_bias}, node);
  }
  if (any_tangent(grad_output, input, weight)) {
    const Tensor dy = primal(grad_output), x = primal(input), w = primal(weight);
    Tensor t_input, t_weight, t_bias;
    if (has_tangent(grad_output)) {
      std::tie(t_input, t_weight, t_bias) =
          call::conv2d_backward(tangent(grad_output), x, w, geometry, mask);
    }
    if (mask[0] && has_tangent(weight)) {
      t_input = sum_of(t_input, call::input_gradient(dy, x, tangent(weight), geometry));
    }
    if (mask[1] && has_tangent(input)) {
      t_weight = sum_of(t_weight, call::weight_gradient(dy, tangent(input), w, geometry));
    }
    if (t_input.defined()) set_tangent(grad_input, t_input);
    if (t_weight.defined()) set_tangent(grad_weight, t_weight);
    if (t_bias.defined()) set_tangent(grad_bias, t_bias);
  }
  return gradients;
}

// padding='same' or 'valid': a composite, so that one set of kernels sees numbers only.
Tensor conv2d_padding(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                      SymIntArrayRef stride, std::string_view padding, SymIntArrayRef dilation,
                      SymInt groups) {
  if (!is_ours(input) && weight.scalar_type() == input.scalar_type()) {
    return at::conv2d_symint(input, weight, bias, stride, padding, dilation, groups);
  }
  Geometry g = geometry_of(stride, SymInt(0), dilation, groups);
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
      const SymInt total = v.dilation[i] * (weight.sym_size(i + 2) - 1);
      g.padding.push_back(total / 2);
      after.push_back(total - total / 2);
    }
    g.padding.insert(g.padding.end(), after.begin(), after.end());
  } else {
    TORCH_CHECK(padding == "valid", "Invalid padding string: '", padding, "'");
  }
  return call::conv2d(input, weight, value_or_undefined(bias), g);
}

// ---- Autocast: ATen's lower_precision_fp list ----

template <at::DeviceType kDevice, c10::DispatchKey kKey>
Tensor conv2d_autocast(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                       SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef dilation,
                       SymInt groups) {
  c10::impl::ExcludeDispatchKeyGuard guard(kKey);
  const auto type = at::autocast::get_lower_precision_fp_from_device_type(kDevice);
  auto cast = [&](const Tensor& t) { return at::autocast::cached_cast(type, t, kDevice); };
  const Tensor b = value_or_undefined(bias);
  return call::conv2d(cast(input), cast(weight), b.defined() ? cast(b) : b,
                      geometry_of(stride, padding, dilation, std::move(groups)));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def(
      "conv2d(Tensor input, Tensor weight, Tensor? bias=None, SymInt[2] stride=1, "
      "SymInt[2] padding=0, SymInt[2] dilation=1, SymInt groups=1) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "conv2d_padding(Tensor input, Tensor weight, Tensor? bias=None, SymInt[2] stride=1, "
      "str padding=\"valid\", SymInt[2] dilation=1, SymInt groups=1) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "conv2d_backward(Tensor grad_output, Tensor input, Tensor weight, SymInt[2] stride, "
      "SymInt[2] padding, SymInt[2] dilation, SymInt groups, bool[3] output_mask) -> "
      "(Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  m.impl("conv2d_padding", c10::DispatchKey::CompositeImplicitAutograd, TORCH_FN(conv2d_padding));
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) {
  m.impl("conv2d", conv2d_cpu_kernel);
  m.impl("conv2d_backward", conv2d_backward_cpu_kernel);
}

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) {
  m.impl("conv2d", conv2d_cuda_kernel);
  m.impl("conv2d_backward", conv2d_backward_cuda_kernel);
}
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) {
  m.impl("conv2d", conv2d_meta);
  m.impl("conv2d_backward", conv2d_backward_meta);
}

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) {
  m.impl("conv2d", conv2d_autograd);
  m.impl("conv2d_backward", conv2d_backward_autograd);
}

TORCH_LIBRARY_IMPL(warpwright, AutocastCPU, m) {
  m.impl("conv2d", TORCH_FN((conv2d_autocast<at::kCPU, c10::DispatchKey::AutocastCPU>)));
}

TORCH_LIBRARY_IMPL(warpwright, AutocastCUDA, m) {
  m.impl("conv2d", TORCH_FN((conv2d_autocast<at::kCUDA, c10::DispatchKey::Autocast>)));
}

}  // namespace warpwright
