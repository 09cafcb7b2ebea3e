// The backward of conv2d_batch_norm: batch norm's, then the convolution's, and where a kernel
// computes both, or parts of the backward of the node before, that kernel.
#pragma once

#include <array>
#include <optional>
#include <utility>

#include "ops/conv2d_batch_norm/torch/common.h"
#include "ops/conv2d_batch_norm/torch/strided_skip.h"

namespace warpwright::conv_norm {

// Of the node that wrote `input` = relu(batch norm(convolved) + residual), if this backward gates
// the gradient of `input` and sums it for that batch norm (gated_dgrad.h).
struct GateValues {
  Tensor convolved, mean, mask;
};

struct BackwardCall {
  // Which gradients: of input, weight, residual, norm_weight, norm_bias.
  using Needs = std::array<bool, 5>;

  Tensor grad_output;
  Tensor sums;  // (channels, 2) that the next node left with grad_output, or undefined
  Tensor skip;  // the gradient of a shortcut around the convolution, or undefined
  Strides skip_strides = {1, 1};  // skip has the pixels of the input at multiples of these
  Tensor input, weight, norm_weight, norm_bias;
  Tensor mean, rstd, mask, convolved;
  std::optional<GateValues> gate;
  double eps;
  NormActivation activation;
  Conv2dGeometry geometry;
  Needs needs;
  // Of the input's gradient, the pixels that a strided 1x1 convolution reads are enough.
  bool only_read_pixels = false;

  // The gradient of the shortcut for each pixel of the input.
  Tensor whole_skip() const {
    const bool is_whole = !skip.defined() || skip_strides == Strides{1, 1};
    return is_whole ? skip : with_zeros_between(skip, skip_strides, input);
  }
};

struct BackwardResults {
  Tensor input, weight, residual, norm_weight, norm_bias;
  Tensor gate_sums;  // (channels of input, 2) if the gradient of `input` is gated, or undefined
};

// Whether one kernel computes both gradients of the convolution, as far as shapes, types and
// layouts tell. Values may be traced.
bool has_narrow_kernel(const BackwardCall& call);
// Whether a kernel gates the gradient of the input. Values may be traced.
bool has_gated_kernel(const BackwardCall& call);

// The gradient of the convolution's output, and all but those of input and weight.
std::pair<Tensor, BackwardResults> batch_norm_gradients(const BackwardCall& call);

// One operator after the other, each with its derivatives.
BackwardResults composed_backward(const BackwardCall& call);

// By the fused kernels where they are. `call.gate` is a wish: gate_sums are undefined if no kernel
// gates.
BackwardResults backward_of(const BackwardCall& call);

// The same as one operator, through the dispatcher. It always gates if `call.gate` is there.
BackwardResults dispatch_backward(const BackwardCall& call);

}  // namespace warpwright::conv_norm
