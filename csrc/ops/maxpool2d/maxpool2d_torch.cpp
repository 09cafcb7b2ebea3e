// max_pool2d, max_pool2d_with_indices and what their derivatives are made of, on every dispatch
// key. With S(x) = the winners of x, as recorded in `codes`: with_codes computes S(x) and codes,
// gather computes S(x) from codes, backward is its transpose. The last two are linear and each
// other's derivative, so every order of differentiation ends in these.
#include <ATen/ops/empty.h>

#include <array>
#include <limits>
#include <tuple>

#include "ops/maxpool2d/maxpool2d.h"
#include "torch/autograd.h"
#include "torch/dispatch.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include "torch/cuda.h"
#endif

namespace warpwright {
namespace {

using at::IntArrayRef;
using c10::SymInt;
using c10::SymIntArrayRef;

// The ops through the dispatcher.
namespace call {

Tensor max_pool2d(const Tensor& input, IntArrayRef kernel_size, IntArrayRef stride,
                  IntArrayRef padding, IntArrayRef dilation, bool ceil_mode) {
  static const auto op =
      find_op<Tensor(const Tensor&, IntArrayRef, IntArrayRef, IntArrayRef, IntArrayRef, bool)>(
          "warpwright::max_pool2d");
  return op.call(input, kernel_size, stride, padding, dilation, ceil_mode);
}

std::tuple<Tensor, Tensor> max_pool2d_with_codes(const Tensor& input, IntArrayRef kernel_size,
                                                 IntArrayRef stride, IntArrayRef padding,
                                                 IntArrayRef dilation, bool ceil_mode) {
  static const auto op =
      find_op<std::tuple<Tensor, Tensor>(const Tensor&, IntArrayRef, IntArrayRef, IntArrayRef,
                                         IntArrayRef, bool)>("warpwright::max_pool2d_with_codes");
  return op.call(input, kernel_size, stride, padding, dilation, ceil_mode);
}

Tensor max_pool2d_indices(const Tensor& codes, SymIntArrayRef input_size, IntArrayRef kernel_size,
                          IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                          bool channels_last) {
  static const auto op =
      find_op<Tensor(const Tensor&, SymIntArrayRef, IntArrayRef, IntArrayRef, IntArrayRef,
                     IntArrayRef, bool)>("warpwright::max_pool2d_indices");
  return op.call(codes, input_size, kernel_size, stride, padding, dilation, channels_last);
}

Tensor max_pool2d_backward(const Tensor& grad_output, const Tensor& codes,
                           SymIntArrayRef input_size, IntArrayRef kernel_size, IntArrayRef stride,
                           IntArrayRef padding, IntArrayRef dilation, bool channels_last) {
  static const auto op =
      find_op<Tensor(const Tensor&, const Tensor&, SymIntArrayRef, IntArrayRef, IntArrayRef,
                     IntArrayRef, IntArrayRef, bool)>("warpwright::max_pool2d_backward");
  return op.call(grad_output, codes, input_size, kernel_size, stride, padding, dilation,
                 channels_last);
}

Tensor max_pool2d_gather(const Tensor& source, const Tensor& codes, IntArrayRef kernel_size,
                         IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                         bool channels_last) {
  static const auto op =
      find_op<Tensor(const Tensor&, const Tensor&, IntArrayRef, IntArrayRef, IntArrayRef,
                     IntArrayRef, bool)>("warpwright::max_pool2d_gather");
  return op.call(source, codes, kernel_size, stride, padding, dilation, channels_last);
}

}  // namespace call

// ---- window, output shape and checks ----

using Pair = std::array<int64_t, 2>;  // vertical, horizontal

struct Window {
  Pair kernel, stride, padding, dilation;
};

Pair pair_of(IntArrayRef values, const char* expectation) {
  TORCH_CHECK(values.size() == 1 || values.size() == 2, "max_pool2d: ", expectation);
  return {values[0], values[values.size() - 1]};
}

Window make_window(IntArrayRef kernel_size, IntArrayRef stride, IntArrayRef padding,
                   IntArrayRef dilation) {
  Window w;
  w.kernel =
      pair_of(kernel_size, "kernel_size must either be a single int, or a tuple of two ints");
  w.stride = stride.empty() ? w.kernel
                            : pair_of(stride,
                                      "stride must either be omitted, a single int, or a tuple of "
                                      "two ints");
  w.padding = pair_of(padding, "padding must either be a single int, or a tuple of two ints");
  w.dilation = pair_of(dilation, "dilation must be either a single int, or a tuple of two ints");
  for (const Pair& values : {w.kernel, w.stride, w.padding, w.dilation}) {
    for (int64_t value : values) {
      TORCH_CHECK(std::abs(value) <= std::numeric_limits<int>::max(), "integer out of range");
    }
  }
  return w;
}

// Extent is int64_t or SymInt. Rounds down also for a negative numerator (an image smaller than
// the window); the caller then reports an output that is too small.
template <class Extent>
Extent output_extent(const Extent& extent, const Window& w, int axis, bool ceil_mode) {
  const int64_t kernel = w.kernel[axis], stride = w.stride[axis], pad = w.padding[axis],
                dilation = w.dilation[axis];
  TORCH_CHECK(stride != 0, "stride should not be zero");
  TORCH_CHECK(pad >= 0, "pad must be non-negative, but got pad: ", pad);
  TORCH_CHECK(pad <= ((kernel - 1) * dilation + 1) / 2,
              "pad should be at most half of effective kernel size, but got pad=", pad,
              ", kernel_size=", kernel, " and dilation=", dilation);
  // The rest of the checks on these three needs no extent and belongs before the division.
  TORCH_CHECK(kernel > 0, "kernel size should be greater than zero, but got kH: ", w.kernel[0],
              " kW: ", w.kernel[1]);
  TORCH_CHECK(stride > 0, "stride should be greater than zero, but got dH: ", w.stride[0],
              " dW: ", w.stride[1]);
  TORCH_CHECK(dilation > 0,
              "dilation should be greater than zero, but got dilationH: ", w.dilation[0],
              " dilationW: ", w.dilation[1]);
  const Extent room = extent + 2 * pad - dilation * (kernel - 1) - 1 + (ceil_mode ? stride - 1 : 0);
  if (room < 0) return Extent(0);
  Extent result = room / stride + 1;
  // The last window must start inside the image or its left padding.
  if (ceil_mode && (result - 1) * stride >= extent + pad) result = result - 1;
  return result;
}

bool is_channels_last(const Tensor& input) {
  return input.suggest_memory_format() == at::MemoryFormat::ChannelsLast;
}
at::MemoryFormat format_of(bool channels_last) {
  return channels_last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
}

template <class Extent>
using Sizes = c10::SmallVector<Extent, 4>;

void check_dtype(at::ScalarType type) {
  TORCH_CHECK_NOT_IMPLEMENTED(find_dtype(type).has_value(), "\"max_pool2d\" not implemented for '",
                              type, "'");
}
void check_floating(at::ScalarType type, const char* name) {
  TORCH_CHECK_NOT_IMPLEMENTED(is_floating(type), "\"", name, "\" not implemented for '", type, "'");
}

// Checks the call in native's order and returns the output's sizes.
template <class Extent>
Sizes<Extent> output_sizes(const Tensor& input, c10::ArrayRef<Extent> sizes, const Window& w,
                           bool ceil_mode) {
  check_dtype(input.scalar_type());
  const size_t dims = sizes.size();
  TORCH_CHECK(dims == 3 || dims == 4,
              "non-empty 3D or 4D (batch mode) tensor expected for input, but got: ", input.dim(),
              "D");
  const Extent height = output_extent(sizes[dims - 2], w, 0, ceil_mode);
  const Extent width = output_extent(sizes[dims - 1], w, 1, ceil_mode);
  // Only a batch may be empty.
  for (size_t i = dims - 3; i < dims; ++i) {
    TORCH_CHECK(sizes[i] != 0,
                "Expected 3D or 4D (batch mode) tensor with optional 0 dim batch size for input, "
                "but got:",
                input.sym_sizes());
  }
  for (int axis : {0, 1}) {
    TORCH_CHECK(
        w.kernel[axis] / 2 >= w.padding[axis],
        "pad should be smaller than or equal to half of kernel size, but got padW = ", w.padding[1],
        ", padH = ", w.padding[0], ", kW = ", w.kernel[1], ", kH = ", w.kernel[0]);
  }
  TORCH_CHECK(height >= 1 && width >= 1, "Given input size: (", sizes[dims - 3], "x",
              sizes[dims - 2], "x", sizes[dims - 1], "). Calculated output size: (",
              sizes[dims - 3], "x", height, "x", width, "). Output size is too small");
  Sizes<Extent> result(sizes.begin(), sizes.end());
  result[dims - 2] = height;
  result[dims - 1] = width;
  return result;
}

at::ScalarType code_type(const Window& w) {
  return w.kernel[0] * w.kernel[1] <= kMaxSmallTaps ? at::kByte : at::kInt;
}

// What the readers of codes have in common.
void check_codes(const char* op, const Tensor& codes, SymIntArrayRef input_size, const Window& w) {
  TORCH_CHECK(codes.scalar_type() == code_type(w), op, ": codes: expected ", code_type(w),
              " for this kernel_size, got ", codes.scalar_type());
  TORCH_CHECK(codes.dim() == static_cast<int64_t>(input_size.size()) &&
                  (codes.dim() == 3 || codes.dim() == 4),
              op, ": codes: expected as many dimensions as the input (3 or 4), got ", codes.dim(),
              " and ", input_size.size());
  for (int64_t i = 0; i + 2 < codes.dim(); ++i) {
    TORCH_CHECK(codes.sym_size(i) == input_size[i], op, ": codes: expected size ", input_size[i],
                " in dimension ", i, ", got ", codes.sym_size(i));
  }
}
void check_pooled(const char* op, const char* name, const Tensor& tensor, const Tensor& codes) {
  TORCH_CHECK(tensor.sym_sizes() == codes.sym_sizes(), op, ": ", name, ": expected shape ",
              codes.sym_sizes(), ", got ", tensor.sym_sizes());
}

MaxPool2dGeometry make_geometry(IntArrayRef input, IntArrayRef output, const Window& w,
                                bool channels_last) {
  const size_t dims = input.size();
  for (size_t i = dims - 2; i < dims; ++i) {
    TORCH_CHECK(input[i] <= std::numeric_limits<int>::max(), "integer out of range");
  }
  const int64_t batch = dims == 4 ? input[0] : 1;
  MaxPool2dGeometry g;
  g.images = channels_last ? batch : batch * input[dims - 3];
  g.channels = channels_last ? input[dims - 3] : 1;
  g.height = input[dims - 2];
  g.width = input[dims - 1];
  g.out_height = output[dims - 2];
  g.out_width = output[dims - 1];
  g.kernel_h = w.kernel[0];
  g.kernel_w = w.kernel[1];
  g.stride_h = w.stride[0];
  g.stride_w = w.stride[1];
  g.pad_h = w.padding[0];
  g.pad_w = w.padding[1];
  g.dilation_h = w.dilation[0];
  g.dilation_w = w.dilation[1];
  return g;
}

// ---- CPU and CUDA ----

template <class Run>
std::tuple<Tensor, Tensor> pool_with(const Tensor& input, const Window& w, bool ceil_mode,
                                     bool want_codes, Run&& run) {
  const auto sizes = output_sizes(input, input.sizes(), w, ceil_mode);
  const bool channels_last = is_channels_last(input);
  const auto format = format_of(channels_last);
  Tensor output = at::empty(sizes, input.options(), format);
  Tensor codes;
  if (want_codes) codes = at::empty(sizes, input.options().dtype(code_type(w)), format);
  if (output.numel() > 0) {
    const Tensor source = input.contiguous(format);
    run(MaxPool2dParams{dtype_of(input), make_geometry(input.sizes(), sizes, w, channels_last),
                        source.const_data_ptr(), output.mutable_data_ptr(),
                        want_codes ? codes.mutable_data_ptr() : nullptr});
  }
  return {output, codes};
}

template <class Run>
Tensor indices_with(const Tensor& codes, SymIntArrayRef input_size, const Window& w,
                    bool channels_last, Run&& run) {
  check_codes("max_pool2d_indices", codes, input_size, w);
  const auto format = format_of(channels_last);
  Tensor indices = at::empty(codes.sizes(), codes.options().dtype(at::kLong), format);
  if (indices.numel() > 0) {
    const Tensor code = codes.contiguous(format);
    run(MaxPool2dIndicesParams{
        make_geometry(C10_AS_INTARRAYREF_SLOW(input_size), codes.sizes(), w, channels_last),
        code.const_data_ptr(), indices.mutable_data_ptr<int64_t>()});
  }
  return indices;
}

template <class Run>
Tensor backward_with(const Tensor& grad_output, const Tensor& codes, SymIntArrayRef input_size,
                     const Window& w, bool channels_last, Run&& run) {
  check_codes("max_pool2d_backward", codes, input_size, w);
  check_pooled("max_pool2d_backward", "grad_output", grad_output, codes);
  check_floating(grad_output.scalar_type(), "max_pool2d_backward");
  const auto format = format_of(channels_last);
  const IntArrayRef sizes = C10_AS_INTARRAYREF_SLOW(input_size);
  Tensor grad_input = at::empty(sizes, grad_output.options(), format);
  if (grad_input.numel() > 0) {
    const Tensor grad = grad_output.contiguous(format);
    const Tensor code = codes.contiguous(format);
    run(MaxPool2dBackwardParams{
        dtype_of(grad), make_geometry(sizes, codes.sizes(), w, channels_last),
        grad.const_data_ptr(), code.const_data_ptr(), grad_input.mutable_data_ptr()});
  }
  return grad_input;
}

template <class Run>
Tensor gather_with(const Tensor& source, const Tensor& codes, const Window& w, bool channels_last,
                   Run&& run) {
  check_codes("max_pool2d_gather", codes, source.sym_sizes(), w);
  check_floating(source.scalar_type(), "max_pool2d_gather");
  const auto format = format_of(channels_last);
  Tensor output = at::empty(codes.sizes(), source.options(), format);
  if (output.numel() > 0) {
    const Tensor from = source.contiguous(format);
    const Tensor code = codes.contiguous(format);
    run(MaxPool2dGatherParams{
        dtype_of(from), make_geometry(source.sizes(), codes.sizes(), w, channels_last),
        from.const_data_ptr(), code.const_data_ptr(), output.mutable_data_ptr()});
  }
  return output;
}

Tensor max_pool2d_cpu_kernel(const Tensor& input, IntArrayRef kernel_size, IntArrayRef stride,
                             IntArrayRef padding, IntArrayRef dilation, bool ceil_mode) {
  return std::get<0>(pool_with(input, make_window(kernel_size, stride, padding, dilation),
                               ceil_mode, false, max_pool2d_cpu));
}
std::tuple<Tensor, Tensor> with_codes_cpu_kernel(const Tensor& input, IntArrayRef kernel_size,
                                                 IntArrayRef stride, IntArrayRef padding,
                                                 IntArrayRef dilation, bool ceil_mode) {
  return pool_with(input, make_window(kernel_size, stride, padding, dilation), ceil_mode, true,
                   max_pool2d_cpu);
}
Tensor indices_cpu_kernel(const Tensor& codes, SymIntArrayRef input_size, IntArrayRef kernel_size,
                          IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                          bool channels_last) {
  return indices_with(codes, input_size, make_window(kernel_size, stride, padding, dilation),
                      channels_last, max_pool2d_indices_cpu);
}
Tensor backward_cpu_kernel(const Tensor& grad_output, const Tensor& codes,
                           SymIntArrayRef input_size, IntArrayRef kernel_size, IntArrayRef stride,
                           IntArrayRef padding, IntArrayRef dilation, bool channels_last) {
  return backward_with(grad_output, codes, input_size,
                       make_window(kernel_size, stride, padding, dilation), channels_last,
                       max_pool2d_backward_cpu);
}
Tensor gather_cpu_kernel(const Tensor& source, const Tensor& codes, IntArrayRef kernel_size,
                         IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                         bool channels_last) {
  return gather_with(source, codes, make_window(kernel_size, stride, padding, dilation),
                     channels_last, max_pool2d_gather_cpu);
}

#ifdef WARPWRIGHT_WITH_CUDA
Tensor max_pool2d_cuda_kernel(const Tensor& input, IntArrayRef kernel_size, IntArrayRef stride,
                              IntArrayRef padding, IntArrayRef dilation, bool ceil_mode) {
  check_floating(input.scalar_type(), "max_pool2d");
  const CudaCall call(input);
  return std::get<0>(
      pool_with(input, make_window(kernel_size, stride, padding, dilation), ceil_mode, false,
                [&](const MaxPool2dParams& p) { launch_max_pool2d_fwd(p, call.stream); }));
}
std::tuple<Tensor, Tensor> with_codes_cuda_kernel(const Tensor& input, IntArrayRef kernel_size,
                                                  IntArrayRef stride, IntArrayRef padding,
                                                  IntArrayRef dilation, bool ceil_mode) {
  check_floating(input.scalar_type(), "max_pool2d");
  const CudaCall call(input);
  return pool_with(input, make_window(kernel_size, stride, padding, dilation), ceil_mode, true,
                   [&](const MaxPool2dParams& p) { launch_max_pool2d_fwd(p, call.stream); });
}
Tensor indices_cuda_kernel(const Tensor& codes, SymIntArrayRef input_size, IntArrayRef kernel_size,
                           IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                           bool channels_last) {
  const CudaCall call(codes);
  return indices_with(
      codes, input_size, make_window(kernel_size, stride, padding, dilation), channels_last,
      [&](const MaxPool2dIndicesParams& p) { launch_max_pool2d_indices(p, call.stream); });
}
Tensor backward_cuda_kernel(const Tensor& grad_output, const Tensor& codes,
                            SymIntArrayRef input_size, IntArrayRef kernel_size, IntArrayRef stride,
                            IntArrayRef padding, IntArrayRef dilation, bool channels_last) {
  const CudaCall call(grad_output);
  return backward_with(
      grad_output, codes, input_size, make_window(kernel_size, stride, padding, dilation),
      channels_last,
      [&](const MaxPool2dBackwardParams& p) { launch_max_pool2d_bwd(p, call.stream); });
}
Tensor gather_cuda_kernel(const Tensor& source, const Tensor& codes, IntArrayRef kernel_size,
                          IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                          bool channels_last) {
  const CudaCall call(source);
  return gather_with(
      source, codes, make_window(kernel_size, stride, padding, dilation), channels_last,
      [&](const MaxPool2dGatherParams& p) { launch_max_pool2d_gather(p, call.stream); });
}
#endif

// ---- Meta ----

std::tuple<Tensor, Tensor> with_codes_meta(const Tensor& input, IntArrayRef kernel_size,
                                           IntArrayRef stride, IntArrayRef padding,
                                           IntArrayRef dilation, bool ceil_mode) {
  const Window w = make_window(kernel_size, stride, padding, dilation);
  const auto sizes = output_sizes(input, input.sym_sizes(), w, ceil_mode);
  const auto format = format_of(is_channels_last(input));
  return {at::empty_symint(sizes, input.options(), format),
          at::empty_symint(sizes, input.options().dtype(code_type(w)), format)};
}
Tensor max_pool2d_meta(const Tensor& input, IntArrayRef kernel_size, IntArrayRef stride,
                       IntArrayRef padding, IntArrayRef dilation, bool ceil_mode) {
  return std::get<0>(with_codes_meta(input, kernel_size, stride, padding, dilation, ceil_mode));
}
Tensor indices_meta(const Tensor& codes, SymIntArrayRef input_size, IntArrayRef kernel_size,
                    IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                    bool channels_last) {
  check_codes("max_pool2d_indices", codes, input_size,
              make_window(kernel_size, stride, padding, dilation));
  return at::empty_symint(codes.sym_sizes(), codes.options().dtype(at::kLong),
                          format_of(channels_last));
}
Tensor backward_meta(const Tensor& grad_output, const Tensor& codes, SymIntArrayRef input_size,
                     IntArrayRef kernel_size, IntArrayRef stride, IntArrayRef padding,
                     IntArrayRef dilation, bool channels_last) {
  check_codes("max_pool2d_backward", codes, input_size,
              make_window(kernel_size, stride, padding, dilation));
  check_pooled("max_pool2d_backward", "grad_output", grad_output, codes);
  check_floating(grad_output.scalar_type(), "max_pool2d_backward");
  return at::empty_symint(input_size, grad_output.options(), format_of(channels_last));
}
Tensor gather_meta(const Tensor& source, const Tensor& codes, IntArrayRef kernel_size,
                   IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                   bool channels_last) {
  check_codes("max_pool2d_gather", codes, source.sym_sizes(),
              make_window(kernel_size, stride, padding, dilation));
  check_floating(source.scalar_type(), "max_pool2d_gather");
  return at::empty_symint(codes.sym_sizes(), source.options(), format_of(channels_last));
}

// ---- Autograd ----

struct PoolAttributes {
  Window window;
  std::vector<SymInt> input_size;
  bool channels_last;
};

struct MaxPool2dBackward {  // saved: codes
  static constexpr const char* kName = "WarpwrightMaxPool2DBackward";
  using Attributes = PoolAttributes;
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    if (!needs[0]) return {Tensor()};
    const Window& w = a.window;
    return {call::max_pool2d_backward(grads[0], saved[0], a.input_size, w.kernel, w.stride,
                                      w.padding, w.dilation, a.channels_last)};
  }
};

struct MaxPool2dBackwardBackward {  // saved: codes
  static constexpr const char* kName = "WarpwrightMaxPool2DBackwardBackward";
  using Attributes = PoolAttributes;
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    if (!needs[0]) return {Tensor()};
    const Window& w = a.window;
    return {call::max_pool2d_gather(grads[0], saved[0], w.kernel, w.stride, w.padding, w.dilation,
                                    a.channels_last)};
  }
};

std::tuple<Tensor, Tensor> with_codes_autograd(const Tensor& input, IntArrayRef kernel_size,
                                               IntArrayRef stride, IntArrayRef padding,
                                               IntArrayRef dilation, bool ceil_mode) {
  const Window w = make_window(kernel_size, stride, padding, dilation);
  const bool channels_last = is_channels_last(input);
  auto node = make_node<MaxPool2dBackward>({w, input.sym_sizes().vec(), channels_last}, input);
  auto [output, codes] = below_autograd([&] {
    return call::max_pool2d_with_codes(input, kernel_size, stride, padding, dilation, ceil_mode);
  });
  if (node) {
    node->save(codes);
    set_history(output, node);
  }
  if (has_tangent(input)) {
    set_tangent(output, call::max_pool2d_gather(tangent(input), codes, w.kernel, w.stride,
                                                w.padding, w.dilation, channels_last));
  }
  return {output, codes};
}

Tensor max_pool2d_autograd(const Tensor& input, IntArrayRef kernel_size, IntArrayRef stride,
                           IntArrayRef padding, IntArrayRef dilation, bool ceil_mode) {
  const bool needs_codes =
      (at::GradMode::is_enabled() && input.requires_grad()) || has_tangent(input);
  if (needs_codes) {
    return std::get<0>(
        with_codes_autograd(input, kernel_size, stride, padding, dilation, ceil_mode));
  }
  return below_autograd(
      [&] { return call::max_pool2d(input, kernel_size, stride, padding, dilation, ceil_mode); });
}

// Every key: codes are one byte of the nine that an index and its code take.
std::tuple<Tensor, Tensor> with_indices(const Tensor& input, IntArrayRef kernel_size,
                                        IntArrayRef stride, IntArrayRef padding,
                                        IntArrayRef dilation, bool ceil_mode) {
  auto [output, codes] =
      call::max_pool2d_with_codes(input, kernel_size, stride, padding, dilation, ceil_mode);
  const Window w = make_window(kernel_size, stride, padding, dilation);
  return {output, call::max_pool2d_indices(codes, input.sym_sizes(), w.kernel, w.stride, w.padding,
                                           w.dilation, is_channels_last(input))};
}

Tensor backward_autograd(const Tensor& grad_output, const Tensor& codes, SymIntArrayRef input_size,
                         IntArrayRef kernel_size, IntArrayRef stride, IntArrayRef padding,
                         IntArrayRef dilation, bool channels_last) {
  const Window w = make_window(kernel_size, stride, padding, dilation);
  auto node =
      make_node<MaxPool2dBackwardBackward>({w, input_size.vec(), channels_last}, grad_output);
  auto apply = [&](const Tensor& grad) {
    return call::max_pool2d_backward(grad, codes, input_size, w.kernel, w.stride, w.padding,
                                     w.dilation, channels_last);
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
  const Window w = make_window(kernel_size, stride, padding, dilation);
  auto node = make_node<MaxPool2dBackward>({w, source.sym_sizes().vec(), channels_last}, source);
  auto apply = [&](const Tensor& from) {
    return call::max_pool2d_gather(from, codes, w.kernel, w.stride, w.padding, w.dilation,
                                   channels_last);
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
      "max_pool2d(Tensor input, int[2] kernel_size, int[2] stride=[], int[2] padding=0, "
      "int[2] dilation=1, bool ceil_mode=False) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "max_pool2d_with_indices(Tensor input, int[2] kernel_size, int[2] stride=[], "
      "int[2] padding=0, int[2] dilation=1, bool ceil_mode=False) -> (Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "max_pool2d_with_codes(Tensor input, int[2] kernel_size, int[2] stride=[], "
      "int[2] padding=0, int[2] dilation=1, bool ceil_mode=False) -> (Tensor output, Tensor codes)",
      {at::Tag::pt2_compliant_tag});
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
  m.impl("max_pool2d", max_pool2d_cpu_kernel);
  m.impl("max_pool2d_with_codes", with_codes_cpu_kernel);
  m.impl("max_pool2d_indices", indices_cpu_kernel);
  m.impl("max_pool2d_backward", backward_cpu_kernel);
  m.impl("max_pool2d_gather", gather_cpu_kernel);
}

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) {
  m.impl("max_pool2d", max_pool2d_cuda_kernel);
  m.impl("max_pool2d_with_codes", with_codes_cuda_kernel);
  m.impl("max_pool2d_indices", indices_cuda_kernel);
  m.impl("max_pool2d_backward", backward_cuda_kernel);
  m.impl("max_pool2d_gather", gather_cuda_kernel);
}
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) {
  m.impl("max_pool2d", max_pool2d_meta);
  m.impl("max_pool2d_with_codes", with_codes_meta);
  m.impl("max_pool2d_indices", indices_meta);
  m.impl("max_pool2d_backward", backward_meta);
  m.impl("max_pool2d_gather", gather_meta);
}

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) {
  m.impl("max_pool2d", max_pool2d_autograd);
  m.impl("max_pool2d_with_codes", with_codes_autograd);
  m.impl("max_pool2d_backward", backward_autograd);
  m.impl("max_pool2d_gather", gather_autograd);
}

TORCH_LIBRARY_IMPL(warpwright, CompositeImplicitAutograd, m) {
  m.impl("max_pool2d_with_indices", with_indices);
}

}  // namespace warpwright
