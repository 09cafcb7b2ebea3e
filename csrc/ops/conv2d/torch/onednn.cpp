// The float32 convolutions on the CPU that native's kernels compute: those of oneDNN, if
// choose_conv2d_cpu_path() finds them faster. Their bits and errors are native's.
#include <ATen/Context.h>
#include <ATen/Version.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "ops/conv2d/cpu_path.h"
#include "ops/conv2d/torch/common.h"

namespace warpwright {
namespace {

using at::IntArrayRef;

// Guards for calling native inside a kernel: no autograd, and no cast of the operands.
struct BelowAutocast {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

bool takes_onednn(ConvDirection direction, const Conv2dShape& s) {
  static const bool avx512 = at::get_cpu_capability() == "AVX512";
  const bool onednn = at::hasMKLDNN() && at::globalContext().userEnabledMkldnn();
  return choose_conv2d_cpu_path(direction, s, {onednn, avx512}) == Conv2dCpuPath::kOneDnn;
}

struct NativeWindow {
  std::array<int64_t, 2> stride, padding, dilation, output_padding{0, 0};
  explicit NativeWindow(const Conv2dShape& s)
      : stride{s.stride_h, s.stride_w},
        padding{s.pad_h, s.pad_w},
        dilation{s.dilation_h, s.dilation_w} {}
};

// Gives native's result the strides of our outputs. They differ in dimensions of size 1.
Tensor with_strides_of(Tensor result, bool channels_last) {
  const auto format = channels_last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
  result = result.contiguous(format);
  const IntArrayRef size = result.sizes();
  const std::vector<int64_t> strides =
      channels_last
          ? c10::get_channels_last_strides_2d(size)
          : std::vector<int64_t>{size[1] * size[2] * size[3], size[2] * size[3], size[3], 1};
  if (!result.strides().equals(strides)) {
    result.unsafeGetTensorImpl()->set_sizes_and_strides(size.vec(), strides);
  }
  return result;
}

}  // namespace

Tensor conv2d_onednn(const Conv2dShape& s, const Tensor& input, const Tensor& weight,
                     const OptionalTensor& bias) {
  if (!takes_onednn(ConvDirection::kFprop, s)) return Tensor();
  const BelowAutocast guard;
  const NativeWindow w(s);
  return with_strides_of(at::convolution(input, weight, bias, w.stride, w.padding, w.dilation,
                                         /*transposed=*/false, w.output_padding, s.groups),
                         s.channels_last);
}

std::array<Tensor, 2> conv2d_backward_onednn(const Conv2dShape& s, const Tensor& grad_output,
                                             const Tensor& input, const Tensor& weight,
                                             const Conv2dMask& mask) {
  const bool dx = mask[0] && takes_onednn(ConvDirection::kDgrad, s);
  const bool dw = mask[1] && takes_onednn(ConvDirection::kWgrad, s);
  if (!dx && !dw) return {};
  const BelowAutocast guard;
  const NativeWindow w(s);
  auto [grad_input, grad_weight, grad_bias] = at::convolution_backward(
      grad_output, input, weight, std::nullopt, w.stride, w.padding, w.dilation,
      /*transposed=*/false, w.output_padding, s.groups, {dx, dw, false});
  return {dx ? with_strides_of(grad_input, s.channels_last) : Tensor(),
          dw ? with_strides_of(grad_weight, s.channels_last) : Tensor()};
}

}  // namespace warpwright
