// The readers of codes on every dispatch key: max_pool2d_indices, max_pool2d_backward and
// max_pool2d_gather. The last two are linear and each other's derivative, so every order of
// differentiation ends in them.
#include "ops/max_pool2d/torch/common.h"

namespace warpwright {

Tensor call_max_pool2d_backward(const Tensor& grad_output, const Tensor& codes,
                                SymIntArrayRef input_size, const PoolWindow& w,
                                bool channels_last) {
  static const auto op =
      find_op<Tensor(const Tensor&, const Tensor&, SymIntArrayRef, IntArrayRef, IntArrayRef,
                     IntArrayRef, IntArrayRef, bool)>("warpwright::max_pool2d_backward");
  return op.call(grad_output, codes, input_size, w.kernel, w.stride, w.padding, w.dilation,
                 channels_last);
}

Tensor call_max_pool2d_gather(const Tensor& source, const Tensor& codes, const PoolWindow& w,
                              bool channels_last) {
  static const auto op =
      find_op<Tensor(const Tensor&, const Tensor&, IntArrayRef, IntArrayRef, IntArrayRef,
                     IntArrayRef, bool)>("warpwright::max_pool2d_gather");
  return op.call(source, codes, w.kernel, w.stride, w.padding, w.dilation, channels_last);
}

namespace {

// ---- CPU and CUDA ----

template <class Run>
Tensor indices_with(const Tensor& codes, SymIntArrayRef input_size, const PoolWindow& w,
                    bool channels_last, Run&& run) {
  check_pool_codes("max_pool2d_indices", codes, input_size, w);
  const auto format = pool_format(channels_last);
  Tensor indices = at::empty(codes.sizes(), codes.options().dtype(at::kLong), format);
  if (indices.numel() > 0) {
    check_has_storage(codes, "max_pool2d_indices: codes");
    const Tensor code = codes.contiguous(format);
    run(MaxPool2dIndicesParams{
        code_geometry("max_pool2d_indices", C10_AS_INTARRAYREF_SLOW(input_size), codes.sizes(), w,
                      channels_last),
        code.const_data_ptr(), indices.mutable_data_ptr<int64_t>()});
  }
  return indices;
}

template <class Run>
Tensor backward_with(const Tensor& grad_output, const Tensor& codes, SymIntArrayRef input_size,
                     const PoolWindow& w, bool channels_last, Run&& run) {
  check_pool_codes("max_pool2d_backward", codes, input_size, w);
  check_pooled_shape("max_pool2d_backward", "grad_output", grad_output, codes);
  check_pool_floating(grad_output.scalar_type(), "max_pool2d_backward");
  const auto format = pool_format(channels_last);
  const IntArrayRef sizes = C10_AS_INTARRAYREF_SLOW(input_size);
  Tensor grad_input = at::empty(sizes, grad_output.options(), format);
  if (grad_input.numel() > 0) {
    check_has_storage(grad_output, "max_pool2d_backward: grad_output");
    check_has_storage(codes, "max_pool2d_backward: codes");
    const Tensor grad = grad_output.contiguous(format);
    const Tensor code = codes.contiguous(format);
    run(MaxPool2dBackwardParams{
        dtype_of(grad),
        code_geometry("max_pool2d_backward", sizes, codes.sizes(), w, channels_last),
        grad.const_data_ptr(), code.const_data_ptr(), grad_input.mutable_data_ptr()});
  }
  return grad_input;
}

template <class Run>
Tensor gather_with(const Tensor& source, const Tensor& codes, const PoolWindow& w,
                   bool channels_last, Run&& run) {
  check_pool_codes("max_pool2d_gather", codes, source.sym_sizes(), w);
  check_pool_floating(source.scalar_type(), "max_pool2d_gather");
  check_same_device(codes, source, "max_pool2d_gather: codes");
  const auto format = pool_format(channels_last);
  Tensor output = at::empty(codes.sizes(), source.options(), format);
  if (output.numel() > 0) {
    check_has_storage(source, "max_pool2d_gather: source");
    check_has_storage(codes, "max_pool2d_gather: codes");
    const Tensor from = source.contiguous(format);
    const Tensor code = codes.contiguous(format);
    run(MaxPool2dGatherParams{
        dtype_of(from),
        code_geometry("max_pool2d_gather", source.sizes(), codes.sizes(), w, channels_last),
        from.const_data_ptr(), code.const_data_ptr(), output.mutable_data_ptr()});
  }
  return output;
}

Tensor indices_cpu_kernel(const Tensor& codes, SymIntArrayRef input_size, IntArrayRef kernel_size,
                          IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                          bool channels_last) {
  return indices_with(codes, input_size, make_pool_window(kernel_size, stride, padding, dilation),
                      channels_last, max_pool2d_indices_cpu);
}
Tensor backward_cpu_kernel(const Tensor& grad_output, const Tensor& codes,
                           SymIntArrayRef input_size, IntArrayRef kernel_size, IntArrayRef stride,
                           IntArrayRef padding, IntArrayRef dilation, bool channels_last) {
  return backward_with(grad_output, codes, input_size,
                       make_pool_window(kernel_size, stride, padding, dilation), channels_last,
                       max_pool2d_backward_cpu);
}
Tensor gather_cpu_kernel(const Tensor& source, const Tensor& codes, IntArrayRef kernel_size,
                         IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                         bool channels_last) {
  return gather_with(source, codes, make_pool_window(kernel_size, stride, padding, dilation),
                     channels_last, max_pool2d_gather_cpu);
}

#ifdef WARPWRIGHT_WITH_CUDA
Tensor indices_cuda_kernel(const Tensor& codes, SymIntArrayRef input_size, IntArrayRef kernel_size,
                           IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                           bool channels_last) {
  const CudaCall call(codes);
  return indices_with(
      codes, input_size, make_pool_window(kernel_size, stride, padding, dilation), channels_last,
      [&](const MaxPool2dIndicesParams& p) { launch_max_pool2d_indices(p, call.stream); });
}
Tensor backward_cuda_kernel(const Tensor& grad_output, const Tensor& codes,
                            SymIntArrayRef input_size, IntArrayRef kernel_size, IntArrayRef stride,
                            IntArrayRef padding, IntArrayRef dilation, bool channels_last) {
  const CudaCall call(grad_output);
  return backward_with(grad_output, codes, input_size,
                       make_pool_window(kernel_size, stride, padding, dilation), channels_last,
                       [&](const MaxPool2dBackwardParams& p) {
                         launch_max_pool2d_backward(p, choose_max_pool2d_backward(p), call.stream);
                       });
}
Tensor gather_cuda_kernel(const Tensor& source, const Tensor& codes, IntArrayRef kernel_size,
                          IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                          bool channels_last) {
  const CudaCall call(source);
  return gather_with(
      source, codes, make_pool_window(kernel_size, stride, padding, dilation), channels_last,
      [&](const MaxPool2dGatherParams& p) { launch_max_pool2d_gather(p, call.stream); });
}
#endif

// ---- Meta ----

Tensor indices_meta(const Tensor& codes, SymIntArrayRef input_size, IntArrayRef kernel_size,
                    IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                    bool channels_last) {
  check_pool_codes("max_pool2d_indices", codes, input_size,
                   make_pool_window(kernel_size, stride, padding, dilation));
  return at::empty_symint(codes.sym_sizes(), codes.options().dtype(at::kLong),
                          pool_format(channels_last));
}
Tensor backward_meta(const Tensor& grad_output, const Tensor& codes, SymIntArrayRef input_size,
                     IntArrayRef kernel_size, IntArrayRef stride, IntArrayRef padding,
                     IntArrayRef dilation, bool channels_last) {
  check_pool_codes("max_pool2d_backward", codes, input_size,
                   make_pool_window(kernel_size, stride, padding, dilation));
  check_pooled_shape("max_pool2d_backward", "grad_output", grad_output, codes);
  check_pool_floating(grad_output.scalar_type(), "max_pool2d_backward");
  return at::empty_symint(input_size, grad_output.options(), pool_format(channels_last));
}
Tensor gather_meta(const Tensor& source, const Tensor& codes, IntArrayRef kernel_size,
                   IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                   bool channels_last) {
  check_pool_codes("max_pool2d_gather", codes, source.sym_sizes(),
                   make_pool_window(kernel_size, stride, padding, dilation));
  check_pool_floating(source.scalar_type(), "max_pool2d_gather");
  check_same_device(codes, source, "max_pool2d_gather: codes");
  return at::empty_symint(codes.sym_sizes(), source.options(), pool_format(channels_last));
}

// ---- Autograd ----

struct MaxPool2dBackwardBackward {  // saved: codes
  static constexpr const char* kName = "WarpwrightMaxPool2DBackwardBackward";
  using Attributes = MaxPool2dBackward::Attributes;
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    if (!needs[0]) return {Tensor()};
    return {call_max_pool2d_gather(grads[0], saved[0], a.window, a.channels_last)};
  }
};

struct MaxPool2dGatherBackward : MaxPool2dScatter {
  static constexpr const char* kName = "WarpwrightMaxPool2DGatherBackward";
};

Tensor backward_autograd(const Tensor& grad_output, const Tensor& codes, SymIntArrayRef input_size,
                         IntArrayRef kernel_size, IntArrayRef stride, IntArrayRef padding,
                         IntArrayRef dilation, bool channels_last) {
  const PoolWindow w = make_pool_window(kernel_size, stride, padding, dilation);
  auto node =
      make_node<MaxPool2dBackwardBackward>({w, input_size.vec(), channels_last}, grad_output);
  auto apply = [&](const Tensor& grad) {
    return call_max_pool2d_backward(grad, codes, input_size, w, channels_last);
  };
  Tensor grad_input = below_autograd([&] { return apply(grad_output); });
  if (node) {
    node->save(codes);
    set_history(grad_input, node);
  }
  if (has_tangent(grad_output)) set_tangent(grad_input, apply(tangent(grad_output)));
  return grad_input;
}

Tensor gather_autograd(const Tensor& source, const Tensor& codes, IntArrayRef kernel_size,
                       IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                       bool channels_last) {
  const PoolWindow w = make_pool_window(kernel_size, stride, padding, dilation);
  auto node =
      make_node<MaxPool2dGatherBackward>({w, source.sym_sizes().vec(), channels_last}, source);
  auto apply = [&](const Tensor& from) {
    return call_max_pool2d_gather(from, codes, w, channels_last);
  };
  Tensor output = below_autograd([&] { return apply(source); });
  if (node) {
    node->save(codes);
    set_history(output, node);
  }
  if (has_tangent(source)) set_tangent(output, apply(tangent(source)));
  return output;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def(
      "max_pool2d_indices(Tensor codes, SymInt[] input_size, int[2] kernel_size, int[2] stride, "
      "int[2] padding, int[2] dilation, bool channels_last) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "max_pool2d_backward(Tensor grad_output, Tensor codes, SymInt[] input_size, "
      "int[2] kernel_size, int[2] stride, int[2] padding, int[2] dilation, bool channels_last) "
      "-> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "max_pool2d_gather(Tensor source, Tensor codes, int[2] kernel_size, int[2] stride, "
      "int[2] padding, int[2] dilation, bool channels_last) -> Tensor",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) {
  m.impl("max_pool2d_indices", indices_cpu_kernel);
  m.impl("max_pool2d_backward", backward_cpu_kernel);
  m.impl("max_pool2d_gather", gather_cpu_kernel);
}

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) {
  m.impl("max_pool2d_indices", indices_cuda_kernel);
  m.impl("max_pool2d_backward", backward_cuda_kernel);
  m.impl("max_pool2d_gather", gather_cuda_kernel);
}
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) {
  m.impl("max_pool2d_indices", indices_meta);
  m.impl("max_pool2d_backward", backward_meta);
  m.impl("max_pool2d_gather", gather_meta);
}

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) {
  m.impl("max_pool2d_backward", backward_autograd);
  m.impl("max_pool2d_gather", gather_autograd);
}

}  // namespace warpwright
