// Shared by the fused backward kernels, for 16-bit images in rows of channels.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "ops/conv2d/torch/forward.h"
#include "torch/plain.h"
#include "torch/traced.h"

namespace warpwright::conv_norm {

// Whether they are rows of channels of one type on one device. Their values may be traced.
inline bool are_rows(std::initializer_list<const Tensor*> images) {
  const Tensor& first = **images.begin();
  return std::all_of(images.begin(), images.end(), [&](const Tensor* image) {
    const auto* impl = image->unsafeGetTensorImpl();
    return (is_plain(*image) || is_traced(*image)) && image->dim() == 4 &&
           !impl->has_symbolic_sizes_strides() && image->numel() > 0 &&
           image->scalar_type() == first.scalar_type() && image->device() == first.device() &&
           image->is_contiguous(at::MemoryFormat::ChannelsLast);
  });
}

// Whether the kernels may read them now; undefined tensors pass.
inline bool are_plain(std::initializer_list<const Tensor*> tensors) {
  return std::all_of(tensors.begin(), tensors.end(),
                     [](const Tensor* tensor) { return is_plain_or_none(*tensor); });
}

// Null for a traced tensor, whose memory will be aligned.
inline const void* address_if_plain(const Tensor& tensor) {
  return tensor.defined() && is_plain(tensor) ? tensor.const_data_ptr() : nullptr;
}

#ifdef WARPWRIGHT_WITH_CUDA
// The shape of a convolution whose forward has checked its arguments.
inline Conv2dShape shape_in_rows(const Tensor& input, const Tensor& weight,
                                 const Conv2dGeometry& g) {
  auto ints = [](const std::vector<SymInt>& values) { return C10_AS_INTARRAYREF_SLOW(values); };
  const auto v = expand_windows<int64_t>(ints(g.stride), ints(g.padding), ints(g.dilation),
                                         g.groups.expect_int());
  const auto sizes = output_sizes<int64_t>(input, weight, std::nullopt, v, int_sizes);
  Conv2dShape shape = shape_of(input, weight, sizes, v, at::MemoryFormat::ChannelsLast);
  shape.allow_tf32 = allow_tf32();
  shape.sm90 = sm90_path_available();
  return shape;
}
#endif

}  // namespace warpwright::conv_norm
