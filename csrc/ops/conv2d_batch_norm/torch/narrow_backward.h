// narrow_backward.h on tensors in memory: batch norm's coefficients, then one kernel for both
// gradients of the convolution.
#pragma once

#include <optional>

#include "ops/conv2d_batch_norm/torch/common.h"

namespace warpwright::conv_norm {

struct NarrowCall {
  const Tensor& grad_output;  // of the batch norm's output, or what passes the relu's mask
  const Tensor& sums;         // of a GatedGradient, or undefined
  const Tensor &input, &weight;
  const Conv2dGeometry& geometry;
  const Tensor& addend;  // to the input's gradient; undefined: none
  const Tensor& convolved;
  const Tensor &norm_weight, &norm_bias;  // maybe undefined
  const Tensor &mean, &rstd;
  NormActivation activation;  // none with sums
  bool needs_norm_weight, needs_norm_bias;
};

struct NarrowGradients {
  Tensor input, weight, norm_weight, norm_bias;
};

// Whether one kernel computes them. The values may be traced.
bool has_narrow_kernel(const NarrowCall& call);

// None if the layers' own kernels run one after the other.
std::optional<NarrowGradients> narrow_gradients(const NarrowCall& call);

}  // namespace warpwright::conv_norm
