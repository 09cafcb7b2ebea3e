// global_avg_pool2d and its gradient on every dispatch key. Both are linear, and each is the
// gradient of the other.
#include <ATen/ops/adaptive_avg_pool2d.h>

#include "ops/reduction/global_avg_pool2d.h"
#include "ops/reduction/torch/common.h"
#include "torch/check_argument.h"

namespace warpwright {
namespace {

using c10::SymInt;

constexpr const char* kInput = "global_avg_pool2d: input";
constexpr const char* kGradOutput = "global_avg_pool2d_backward: grad_output";

namespace call {

Tensor global_avg_pool2d(const Tensor& input) {
  static const auto op = find_op<Tensor(const Tensor&)>("warpwright::global_avg_pool2d");
  return op.call(input);
}

Tensor global_avg_pool2d_backward(const Tensor& grad_output, const SymInt& height,
                                  const SymInt& width, bool channels_last) {
  static const auto op = find_op<Tensor(const Tensor&, SymInt, SymInt, bool)>(
      "warpwright::global_avg_pool2d_backward");
  return op.call(grad_output, height, width, channels_last);
}

}  // namespace call

Tensor native_pool(const Tensor& input) { return at::adaptive_avg_pool2d(input, {1, 1}); }

// ---- output shape and checks ----

bool is_channels_last(const Tensor& images) {
  return images.suggest_memory_format() == at::MemoryFormat::ChannelsLast;
}

at::MemoryFormat format_of(bool channels_last) {
  return channels_last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
}

void check_is_images(const Tensor& tensor, const char* name) {
  TORCH_CHECK(tensor.dim() == 3 || tensor.dim() == 4, name,
              ": expected shape (N, C, H, W) or (C, H, W), got ", tensor.sym_sizes());
}

void check_gradient(const Tensor& grad_output, const SymInt& height, const SymInt& width,
                    bool channels_last) {
  check_is_images(grad_output, kGradOutput);
  TORCH_CHECK(is_floating(grad_output.scalar_type()), kGradOutput,
              ": expected a floating point tensor, got ", grad_output.scalar_type());
  TORCH_CHECK(grad_output.sym_size(-1) == 1 && grad_output.sym_size(-2) == 1, kGradOutput,
              ": expected planes of one element, got shape ", grad_output.sym_sizes());
  TORCH_CHECK(height >= 0 && width >= 0,
              "global_avg_pool2d_backward: height, width: expected no negative number, got ",
              height, " and ", width);
  TORCH_CHECK(!channels_last || grad_output.dim() == 4,
              "global_avg_pool2d_backward: channels_last: expected four dimensions, got ",
              grad_output.dim());
}

// `tensor` with planes of height x width.
c10::SymDimVector with_planes(const Tensor& tensor, const SymInt& height, const SymInt& width) {
  c10::SymDimVector sizes(tensor.sym_sizes());
  sizes[sizes.size() - 2] = height;
  sizes[sizes.size() - 1] = width;
  return sizes;
}

Tensor empty_with_planes(const Tensor& like, const SymInt& height, const SymInt& width,
                         bool channels_last) {
  return at::empty_symint(with_planes(like, height, width), like.options(),
                          format_of(channels_last));
}

PlaneShape shape_of(const Tensor& images, bool channels_last) {
  return {.dtype = dtype_of(images),
          .images = images.dim() == 4 ? images.size(0) : 1,
          .channels = images.size(-3),
          .pixels = images.size(-2) * images.size(-1),
          .channels_last = channels_last};
}

// ---- CPU and CUDA ----

Tensor forward_kernel(const Tensor& input) {
  check_is_images(input, kInput);
  check_has_storage(input, kInput);
  if (!is_floating(input.scalar_type()) || input.numel() == 0) return native_pool(input);
  const bool channels_last = is_channels_last(input);
  if (input.is_cpu() && input.is_contiguous(format_of(channels_last))) {
    Tensor output = empty_with_planes(input, 1, 1, channels_last);
    plane_means_cpu({.shape = shape_of(input, channels_last),
                     .input = input.const_data_ptr(),
                     .output = output.mutable_data_ptr()});
    return output;
  }
  const int64_t planes[] = {-2, -1};
  return reduce_on_device(input, {.input_name = kInput,
                                  .kind = ReductionKind::kMean,
                                  .mask = reduced_dims(at::IntArrayRef(planes), input.dim()),
                                  .keepdim = true,
                                  .dtype = input.scalar_type(),
                                  .format = format_of(channels_last)});
}

Tensor backward_kernel(const Tensor& grad_output, SymInt height, SymInt width, bool channels_last) {
  check_gradient(grad_output, height, width, channels_last);
  check_has_storage(grad_output, kGradOutput);
  Tensor grad_input = empty_with_planes(grad_output, height, width, channels_last);
  if (grad_input.numel() == 0) return grad_input;
  const Tensor source = grad_output.contiguous();
  const RepeatMeansParams params{.shape = shape_of(grad_input, channels_last),
                                 .grad_output = source.const_data_ptr(),
                                 .grad_input = grad_input.mutable_data_ptr()};
#ifdef WARPWRIGHT_WITH_CUDA
  if (grad_output.is_cuda()) {
    const CudaCall cuda(grad_output);
    launch_repeat_means(params, choose_repeat_means(params), cuda.stream);
    return grad_input;
  }
#endif
  repeat_means_cpu(params);
  return grad_input;
}

// ---- Meta ----

Tensor forward_meta(const Tensor& input) {
  check_is_images(input, kInput);
  if (!is_floating(input.scalar_type())) return native_pool(input);
  return empty_with_planes(input, 1, 1, is_channels_last(input));
}

Tensor backward_meta(const Tensor& grad_output, SymInt height, SymInt width, bool channels_last) {
  check_gradient(grad_output, height, width, channels_last);
  return empty_with_planes(grad_output, height, width, channels_last);
}

// ---- Autograd ----

struct GlobalAvgPool2dBackward {
  static constexpr const char* kName = "WarpwrightGlobalAvgPool2dBackward";
  struct Attributes {
    SymInt height, width;
    bool channels_last;
  };
  static variable_list backward(const Attributes& a, const variable_list&,
                                const variable_list& grads, const NeedsGrad& needs) {
    if (!needs[0]) return {Tensor()};
    return {call::global_avg_pool2d_backward(grads[0], a.height, a.width, a.channels_last)};
  }
};

struct GlobalAvgPool2dBackwardBackward {
  static constexpr const char* kName = "WarpwrightGlobalAvgPool2dBackwardBackward";
  struct Attributes {};
  static variable_list backward(const Attributes&, const variable_list&, const variable_list& grads,
                                const NeedsGrad& needs) {
    return {needs[0] ? call::global_avg_pool2d(grads[0]) : Tensor()};
  }
};

Tensor forward_autograd(const Tensor& input) {
  check_is_images(input, kInput);
  if (!is_floating(input.scalar_type())) {
    check_plain_storage(input, kInput);
    return native_pool(input);
  }
  auto node = make_node<GlobalAvgPool2dBackward>(
      {input.sym_size(-2), input.sym_size(-1), is_channels_last(input)}, input);
  Tensor output = below_autograd([&] { return call::global_avg_pool2d(input); });
  if (node) set_history(output, node);
  if (has_tangent(input)) set_tangent(output, call::global_avg_pool2d(tangent(input)));
  return output;
}

Tensor backward_autograd(const Tensor& grad_output, SymInt height, SymInt width,
                         bool channels_last) {
  auto node = make_node<GlobalAvgPool2dBackwardBackward>({}, grad_output);
  const auto run = [&](const Tensor& grad) {
    return call::global_avg_pool2d_backward(grad, height, width, channels_last);
  };
  Tensor grad_input = below_autograd([&] { return run(grad_output); });
  if (node) set_history(grad_input, node);
  if (has_tangent(grad_output)) set_tangent(grad_input, run(tangent(grad_output)));
  return grad_input;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def("global_avg_pool2d(Tensor input) -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def(
      "global_avg_pool2d_backward(Tensor grad_output, SymInt height, SymInt width, "
      "bool channels_last) -> Tensor",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) {
  m.impl("global_avg_pool2d", forward_kernel);
  m.impl("global_avg_pool2d_backward", backward_kernel);
}

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) {
  m.impl("global_avg_pool2d", forward_kernel);
  m.impl("global_avg_pool2d_backward", backward_kernel);
}
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) {
  m.impl("global_avg_pool2d", forward_meta);
  m.impl("global_avg_pool2d_backward", backward_meta);
}

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) {
  m.impl("global_avg_pool2d", forward_autograd);
  m.impl("global_avg_pool2d_backward", backward_autograd);
}

}  // namespace warpwright
