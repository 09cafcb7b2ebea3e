// The float32 forward on the CPU by native's kernel, if choose_conv2d_cpu_path() finds that of
// oneDNN faster for dgrad. The gradients are conv2d's own calls of oneDNN.
#include <ATen/Context.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "ops/conv2d/cpu_path.h"
#include "ops/conv_transpose2d/torch/common.h"

namespace warpwright {
namespace {

// Native's result with the strides of our outputs. They differ in dimensions of size 1.
Tensor with_dense_strides(const Tensor& result, at::MemoryFormat format) {
  const Tensor dense = result.contiguous(format);
  const Tensor like =
      at::empty(dense.sizes(), dense.options().device(at::kMeta).memory_format(format));
  if (!dense.strides().equals(like.strides())) {
    dense.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  }
  return dense;
}

}  // namespace

Tensor conv_transpose2d_onednn(const Conv2dShape& s, const Tensor& input, const Tensor& weight,
                               const Tensor& bias) {
  static const bool avx512 = at::get_cpu_capability() == "AVX512";
  const bool onednn = at::hasMKLDNN() && at::globalContext().userEnabledMkldnn();
  if (choose_conv2d_cpu_path(ConvDirection::kDgrad, s, {onednn, avx512}) !=
      Conv2dCpuPath::kOneDnn) {
    return Tensor();
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
  const std::array<int64_t, 2> stride{s.stride_h, s.stride_w}, padding{s.pad_h, s.pad_w},
      dilation{s.dilation_h, s.dilation_w};
  const std::array<int64_t, 2> output_padding{
      s.h - ((s.p - 1) * s.stride_h - 2 * s.pad_h + (s.r - 1) * s.dilation_h + 1),
      s.w - ((s.q - 1) * s.stride_w - 2 * s.pad_w + (s.s - 1) * s.dilation_w + 1)};
  const Tensor output =
      at::convolution(input, weight, optional_if_defined(bias), stride, padding, dilation,
                      /*transposed=*/true, output_padding, s.groups);
  return with_dense_strides(
      output, s.channels_last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous);
}

}  // namespace warpwright
