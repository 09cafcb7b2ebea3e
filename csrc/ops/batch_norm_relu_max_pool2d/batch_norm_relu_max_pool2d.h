// batch_norm_relu_max_pool2d: max_pool2d(relu(batch_norm(x))), of which only the pooled tensor is
// written. Batch norm's own kernels take the statistics (its forward without an output) and leave a
// table of coefficients; the pool's kernels make a value of each tap as they compare it.
// What the backward gets of a window is its code and the element of x that won (`winners`): the
// sums over dy and dy * (x - mean) are then batch norm's over grad_output and winners, a quarter of
// x where windows do not overlap, in place of a pass over x. Where no tap was positive the window
// keeps one of its own elements: normalised it is not positive either, so that batch norm's gate
// stops that gradient. Then one pass gathers dy from grad_output and codes and writes dx.
// Bytes (E = x, O = output, C = codes): forward 2E + 2O + C training, E + O evaluation without
// gradients; backward 2O, then O + C + 2E. The chain of native ops: 6E + O and 9E + O, with
// indices of 8 bytes an output beside them.
#pragma once

#include "ops/batch_norm/batch_norm.h"
#include "ops/max_pool2d/max_pool2d.h"

namespace warpwright {

// A channel of the pool's geometry is one of batch norm's, or, where an image is a plane (one
// channel), image % channels is.
struct PoolCoefficients {
  const void* table;  // as batch norm's params have it
  int64_t channels;
};

struct BatchNormPoolParams {
  MaxPool2dParams pool;            // of x, with a relu
  PoolCoefficients normalization;  // kForwardCoefficients
  void* winners;                   // (images, out_height, out_width, channels); null without codes
};

struct BatchNormPoolBackwardParams {
  MaxPool2dBackwardParams pool;
  PoolCoefficients gradient;  // kBackwardCoefficients
  bool training;              // else dx is dy * scale
  const void* input;          // x, read in training
};

void batch_norm_pool_cpu(const BatchNormPoolParams& params);
void batch_norm_pool_backward_cpu(const BatchNormPoolBackwardParams& params);

#ifdef WARPWRIGHT_WITH_CUDA
void launch_batch_norm_pool_fwd(const BatchNormPoolParams& params, cudaStream_t stream);
void launch_batch_norm_pool_bwd(const BatchNormPoolBackwardParams& params, cudaStream_t stream);
#endif

}  // namespace warpwright
