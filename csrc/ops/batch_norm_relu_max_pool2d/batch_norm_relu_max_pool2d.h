// batch_norm_relu_max_pool2d: max_pool2d(relu(batch_norm(x))), which writes only the pooled tensor.
// Batch norm's kernels compute the statistics (a forward without an output) and write a table of
// coefficients. The pool's kernels normalise each tap as they compare it.
// For the backward each window keeps its code and the element of x that won (`winners`). The sums
// over dy and dy * (x - mean) are then batch norm's sums over grad_output and winners. They replace
// a pass over x; without overlap of windows they are a quarter of x. A window without a positive
// tap keeps one of its own elements. Normalised it is not positive either, so batch norm's gate
// stops its gradient. One more pass gathers dy from grad_output and codes and writes dx. Bytes (E =
// x, O = output, C = codes): forward 2E + 2O + C in training, E + O in evaluation without
// gradients; backward 2O, then O + C + 2E. The chain of native ops: 6E + O and 9E + O, plus indices
// of 8 bytes per output.
#pragma once

#include "ops/batch_norm/batch_norm.h"
#include "ops/max_pool2d/max_pool2d.h"

namespace warpwright {

// A channel of the pool's geometry is one of batch norm's. If an image is a plane (one channel), it
// is image % channels.
struct PoolCoefficients {
  const void* table;  // as in batch norm's params
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

inline MaxPool2dPlan choose_batch_norm_pool(const BatchNormPoolParams& p) {
  return choose_max_pool2d(p.pool, address_of(p.winners));
}
inline MaxPool2dPlan choose_batch_norm_pool_backward(const BatchNormPoolBackwardParams& p) {
  return choose_max_pool2d_backward(p.pool, address_of(p.input));
}

void batch_norm_pool_cpu(const BatchNormPoolParams& params);
void batch_norm_pool_backward_cpu(const BatchNormPoolBackwardParams& params);

#ifdef WARPWRIGHT_WITH_CUDA
void launch_batch_norm_pool(const BatchNormPoolParams& params, const MaxPool2dPlan& plan,
                            cudaStream_t stream);
void launch_batch_norm_pool_backward(const BatchNormPoolBackwardParams& params,
                                     const MaxPool2dPlan& plan, cudaStream_t stream);
#endif

}  // namespace warpwright
