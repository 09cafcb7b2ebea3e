// conv2d: y[n,k,p,q] = b[k] + sum over c,r,s of x[n,c,p*stride+r*dilation-pad,...] * w[k,c,r,s],
// and its gradients. All tensors of a call share one dense layout, NCHW/KCRS or NHWC/KRSC, which is
// read and written in place: no im2col buffer and no layout copy in memory. 2*N*P*Q*K*C/groups*R*S
// FLOPs a direction; memory-bound where C/groups*R*S or K/groups is small.
#pragma once

#include <cstdint>

#include "host/dtype.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace warpwright {

struct Conv2dShape {
  DType dtype;
  bool channels_last;
  bool allow_tf32;                                                   // fp32 on tensor cores
  int64_t n, c, h, w;                                                // input
  int64_t k, r, s;                                                   // weight: k x c/groups x r x s
  int64_t p, q;                                                      // output: n x k x p x q
  int64_t stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;  // pad: before the first row
  int64_t groups;

  int64_t group_c() const { return c / groups; }
  int64_t group_k() const { return k / groups; }
  int64_t taps() const { return r * s; }
};

struct Conv2dParams {
  Conv2dShape shape;
  const void* input;
  const void* weight;
  const void* bias;  // (k), or null
  void* output;
};

// A null gradient is not wanted. `input` and `weight` may be null where no wanted one reads them.
struct Conv2dBackwardParams {
  Conv2dShape shape;
  const void* grad_output;
  const void* input;
  const void* weight;
  void* grad_input;
  void* grad_weight;
  void* grad_bias;
};

void conv2d_cpu(const Conv2dParams& params);
void conv2d_backward_cpu(const Conv2dBackwardParams& params);

}  // namespace warpwright
