// The two steps of gated_dgrad.h on tensors in memory.
#pragma once

#include <optional>

#include "ops/conv2d_batch_norm/torch/common.h"
#include "ops/conv2d_batch_norm/torch/strided_skip.h"

namespace warpwright::conv_norm {

// `input` is relu(batch norm(norm_input) + residual); mean is that batch norm's, mask the relu's.
// `addend`: of the pixels of the input at multiples of its strides.
struct GatedCall {
  const Tensor &grad_output, &input, &weight;
  const Conv2dGeometry& geometry;
  const Tensor& addend;
  Strides addend_strides;
  const Tensor &mask, &norm_input, &mean;
};

// The gated gradient of `input`, and (channels, 2) sums for the batch norm.
struct GatedGradient {
  Tensor gradient, sums;
};

// Whether a kernel computes both. The values may be traced.
bool has_gated_kernel(const GatedCall& call);
// The same for `input` in memory, read by a 1x1 convolution with `k` outputs, stride 1 and no
// padding.
bool has_gated_kernel(const Tensor& input, int64_t k);

// None if no kernel computes both.
std::optional<GatedGradient> gated_input_gradient(const GatedCall& call);

// batch_norm_backward in training, with the sums of a GatedGradient.
Tensors3 batch_norm_backward_with_sums(const GatedGradient& grad_output, const Tensor& input,
                                       const OptionalTensor& weight, const Tensor& mean,
                                       const Tensor& rstd, std::array<bool, 3> output_mask);

}  // namespace warpwright::conv_norm
