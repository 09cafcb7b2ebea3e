// The forward ops on every dispatch key: max_pool2d, max_pool2d_with_codes and
// max_pool2d_with_indices, and the first two with a relu before the pool. The codes say which tap
// won, if any. Both kinds therefore have the same derivatives, those of max_pool2d/torch/codes.cpp.
#include <ATen/ops/max_pool2d.h>
#include <ATen/ops/max_pool2d_with_indices.h>
#include <ATen/ops/relu.h>

#include <tuple>

#include "ops/max_pool2d/torch/common.h"

namespace warpwright {
namespace {

// The ops through the dispatcher.
namespace call {

template <bool kRelu>
Tensor max_pool2d(const Tensor& input, IntArrayRef kernel_size, IntArrayRef stride,
                  IntArrayRef padding, IntArrayRef dilation, bool ceil_mode) {
  static const auto op =
      find_op<Tensor(const Tensor&, IntArrayRef, IntArrayRef, IntArrayRef, IntArrayRef, bool)>(
          kRelu ? "warpwright::relu_max_pool2d" : "warpwright::max_pool2d");
  return op.call(input, kernel_size, stride, padding, dilation, ceil_mode);
}

template <bool kRelu>
std::tuple<Tensor, Tensor> max_pool2d_with_codes(const Tensor& input, IntArrayRef kernel_size,
                                                 IntArrayRef stride, IntArrayRef padding,
                                                 IntArrayRef dilation, bool ceil_mode) {
  static const auto op = find_op<std::tuple<Tensor, Tensor>(const Tensor&, IntArrayRef, IntArrayRef,
                                                            IntArrayRef, IntArrayRef, bool)>(
      kRelu ? "warpwright::relu_max_pool2d_with_codes" : "warpwright::max_pool2d_with_codes");
  return op.call(input, kernel_size, stride, padding, dilation, ceil_mode);
}

Tensor max_pool2d_indices(const Tensor& codes, SymIntArrayRef input_size, const PoolWindow& w,
                          bool channels_last) {
  static const auto op =
      find_op<Tensor(const Tensor&, SymIntArrayRef, IntArrayRef, IntArrayRef, IntArrayRef,
                     IntArrayRef, bool)>("warpwright::max_pool2d_indices");
  return op.call(codes, input_size, w.kernel, w.stride, w.padding, w.dilation, channels_last);
}

}  // namespace call

// ---- CPU and CUDA ----

template <class Run>
std::tuple<Tensor, Tensor> pool_with(const Tensor& input, const PoolWindow& w, bool ceil_mode,
                                     bool relu, bool want_codes, Run&& run) {
  const auto sizes = pooled_sizes(input, input.sizes(), w, ceil_mode);
  const bool channels_last = is_channels_last(input);
  const auto format = pool_format(channels_last);
  Tensor output = at::empty(sizes, input.options(), format);
  Tensor codes;
  if (want_codes) codes = at::empty(sizes, input.options().dtype(pool_code_type(w)), format);
  if (output.numel() > 0) {
    check_has_storage(input, "max_pool2d: input");
    const Tensor source = input.contiguous(format);
    const MaxPool2dGeometry geometry =
        want_codes ? code_geometry("max_pool2d", input.sizes(), sizes, w, channels_last)
                   : pool_geometry(input.sizes(), sizes, w, channels_last);
    run(MaxPool2dParams{
        .dtype = dtype_of(input),
        .geometry = geometry,
        .relu = relu,
        .input = source.const_data_ptr(),
        .output = output.mutable_data_ptr(),
        .codes = want_codes ? codes.mutable_data_ptr() : nullptr,
    });
  }
  return {output, codes};
}

template <bool kRelu>
Tensor max_pool2d_cpu_kernel(const Tensor& input, IntArrayRef kernel_size, IntArrayRef stride,
                             IntArrayRef padding, IntArrayRef dilation, bool ceil_mode) {
  return std::get<0>(pool_with(input, make_pool_window(kernel_size, stride, padding, dilation),
                               ceil_mode, kRelu, false, max_pool2d_cpu));
}
template <bool kRelu>
std::tuple<Tensor, Tensor> with_codes_cpu_kernel(const Tensor& input, IntArrayRef kernel_size,
                                                 IntArrayRef stride, IntArrayRef padding,
                                                 IntArrayRef dilation, bool ceil_mode) {
  return pool_with(input, make_pool_window(kernel_size, stride, padding, dilation), ceil_mode,
                   kRelu, true, max_pool2d_cpu);
}

#ifdef WARPWRIGHT_WITH_CUDA
template <bool kRelu>
Tensor max_pool2d_cuda_kernel(const Tensor& input, IntArrayRef kernel_size, IntArrayRef stride,
                              IntArrayRef padding, IntArrayRef dilation, bool ceil_mode) {
  check_pool_floating(input.scalar_type(), "max_pool2d");
  const CudaCall call(input);
  return std::get<0>(pool_with(
      input, make_pool_window(kernel_size, stride, padding, dilation), ceil_mode, kRelu, false,
      [&](const MaxPool2dParams& p) { launch_max_pool2d(p, choose_max_pool2d(p), call.stream); }));
}
template <bool kRelu>
std::tuple<Tensor, Tensor> with_codes_cuda_kernel(const Tensor& input, IntArrayRef kernel_size,
                                                  IntArrayRef stride, IntArrayRef padding,
                                                  IntArrayRef dilation, bool ceil_mode) {
  check_pool_floating(input.scalar_type(), "max_pool2d");
  const CudaCall call(input);
  return pool_with(
      input, make_pool_window(kernel_size, stride, padding, dilation), ceil_mode, kRelu, true,
      [&](const MaxPool2dParams& p) { launch_max_pool2d(p, choose_max_pool2d(p), call.stream); });
}
#endif

// ---- Meta ----

std::tuple<Tensor, Tensor> with_codes_meta(const Tensor& input, IntArrayRef kernel_size,
                                           IntArrayRef stride, IntArrayRef padding,
                                           IntArrayRef dilation, bool ceil_mode) {
  const PoolWindow w = make_pool_window(kernel_size, stride, padding, dilation);
  const auto sizes = pooled_sizes(input, input.sym_sizes(), w, ceil_mode);
  const auto format = pool_format(is_channels_last(input));
  return {at::empty_symint(sizes, input.options(), format),
          at::empty_symint(sizes, input.options().dtype(pool_code_type(w)), format)};
}
Tensor max_pool2d_meta(const Tensor& input, IntArrayRef kernel_size, IntArrayRef stride,
                       IntArrayRef padding, IntArrayRef dilation, bool ceil_mode) {
  return std::get<0>(with_codes_meta(input, kernel_size, stride, padding, dilation, ceil_mode));
}

// ---- Autograd ----

template <bool kRelu>
std::tuple<Tensor, Tensor> with_codes_autograd(const Tensor& input, IntArrayRef kernel_size,
                                               IntArrayRef stride, IntArrayRef padding,
                                               IntArrayRef dilation, bool ceil_mode) {
  const PoolWindow w = make_pool_window(kernel_size, stride, padding, dilation);
  const bool channels_last = is_channels_last(input);
  auto node = make_node<MaxPool2dBackward>({w, input.sym_sizes().vec(), channels_last}, input);
  auto [output, codes] = below_autograd([&] {
    return call::max_pool2d_with_codes<kRelu>(input, kernel_size, stride, padding, dilation,
                                              ceil_mode);
  });
  if (node) {
    node->save(codes);
    set_history(output, node);
  }
  if (has_tangent(input)) {
    const Tensor passed = call_max_pool2d_gather(tangent(input), codes, w, channels_last);
    set_tangent(output, kRelu ? tangent_with_zero_terms(passed, input) : passed);
  }
  return {output, codes};
}

template <bool kRelu>
Tensor max_pool2d_autograd(const Tensor& input, IntArrayRef kernel_size, IntArrayRef stride,
                           IntArrayRef padding, IntArrayRef dilation, bool ceil_mode) {
  const bool needs_codes =
      (at::GradMode::is_enabled() && input.requires_grad()) || has_tangent(input);
  if (needs_codes &&
      !fits_codes(make_pool_window(kernel_size, stride, padding, dilation), input.sym_sizes())) {
    return at::max_pool2d(kRelu ? at::relu(input) : input, kernel_size, stride, padding, dilation,
                          ceil_mode);
  }
  if (needs_codes) {
    return std::get<0>(
        with_codes_autograd<kRelu>(input, kernel_size, stride, padding, dilation, ceil_mode));
  }
  return below_autograd([&] {
    return call::max_pool2d<kRelu>(input, kernel_size, stride, padding, dilation, ceil_mode);
  });
}

// On every key. Codes take one byte, an index takes eight more.
std::tuple<Tensor, Tensor> with_indices(const Tensor& input, IntArrayRef kernel_size,
                                        IntArrayRef stride, IntArrayRef padding,
                                        IntArrayRef dilation, bool ceil_mode) {
  if (!fits_codes(make_pool_window(kernel_size, stride, padding, dilation), input.sym_sizes())) {
    return at::max_pool2d_with_indices(input, kernel_size, stride, padding, dilation, ceil_mode);
  }
  auto [output, codes] =
      call::max_pool2d_with_codes<false>(input, kernel_size, stride, padding, dilation, ceil_mode);
  return {output, call::max_pool2d_indices(codes, input.sym_sizes(),
                                           make_pool_window(kernel_size, stride, padding, dilation),
                                           is_channels_last(input))};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  for (const std::string name : {"max_pool2d", "relu_max_pool2d"}) {
    const std::string arguments =
        "(Tensor input, int[2] kernel_size, int[2] stride=[], int[2] padding=0, "
        "int[2] dilation=1, bool ceil_mode=False) -> ";
    m.def((name + arguments + "Tensor").c_str(), {at::Tag::pt2_compliant_tag});
    m.def((name + "_with_codes" + arguments + "(Tensor output, Tensor codes)").c_str(),
          {at::Tag::pt2_compliant_tag});
  }
  m.def(
      "max_pool2d_with_indices(Tensor input, int[2] kernel_size, int[2] stride=[], "
      "int[2] padding=0, int[2] dilation=1, bool ceil_mode=False) -> (Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) {
  m.impl("max_pool2d", max_pool2d_cpu_kernel<false>);
  m.impl("max_pool2d_with_codes", with_codes_cpu_kernel<false>);
  m.impl("relu_max_pool2d", max_pool2d_cpu_kernel<true>);
  m.impl("relu_max_pool2d_with_codes", with_codes_cpu_kernel<true>);
}

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) {
  m.impl("max_pool2d", max_pool2d_cuda_kernel<false>);
  m.impl("max_pool2d_with_codes", with_codes_cuda_kernel<false>);
  m.impl("relu_max_pool2d", max_pool2d_cuda_kernel<true>);
  m.impl("relu_max_pool2d_with_codes", with_codes_cuda_kernel<true>);
}
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) {
  m.impl("max_pool2d", max_pool2d_meta);
  m.impl("max_pool2d_with_codes", with_codes_meta);
  m.impl("relu_max_pool2d", max_pool2d_meta);
  m.impl("relu_max_pool2d_with_codes", with_codes_meta);
}

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) {
  m.impl("max_pool2d", max_pool2d_autograd<false>);
  m.impl("max_pool2d_with_codes", with_codes_autograd<false>);
  m.impl("relu_max_pool2d", max_pool2d_autograd<true>);
  m.impl("relu_max_pool2d_with_codes", with_codes_autograd<true>);
}

TORCH_LIBRARY_IMPL(warpwright, CompositeImplicitAutograd, m) {
  m.impl("max_pool2d_with_indices", with_indices);
}

}  // namespace warpwright
