// conv2d: y[n,k,p,q] = b[k] + sum over c,r,s of x[n,c,p*stride+r*dilation-pad,...] * w[k,c,r,s],
// and its gradients. All tensors of a call share one dense layout, NCHW/KCRS or NHWC/KRSC. There is
// no im2col buffer in memory. If the faster kernel needs NHWC, NCHW operands are copied first.
// 2*N*P*Q*K*C/groups*R*S FLOPs per direction; memory-bound if C/groups*R*S or K/groups is small.
// plan.h has the choice of kernel.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/dtype.h"
#include "gemm/tiles.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace warpwright {

// y, the gradient of x, and the gradient of w.
enum class ConvDirection { kFprop, kDgrad, kWgrad };

struct Conv2dShape {
  DType dtype;
  bool channels_last;
  bool sm90;                                                         // the sm_90a kernels run here
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

// Reduces strides and dilations to the smallest that give the same windows. One step of h + pad_h
// rows leaves the image from any position or tap, and so does any longer step.
inline void fit_windows(Conv2dShape& s) {
  const int64_t past_h = std::max<int64_t>(s.h + s.pad_h, 1);
  const int64_t past_w = std::max<int64_t>(s.w + s.pad_w, 1);
  s.stride_h = std::min(s.stride_h, past_h);
  s.stride_w = std::min(s.stride_w, past_w);
  s.dilation_h = std::min(s.dilation_h, past_h);
  s.dilation_w = std::min(s.dilation_w, past_w);
}

// Largest padded extent of an image. On the CPU, rows, columns and offsets have 64 bits, and 2^48
// elements exceed any address space. The CUDA kernels hold a row, a column, and the sum of two of
// them in 32 bits.
constexpr int64_t kMaxPaddedCpu = int64_t{1} << 48;
constexpr int64_t kMaxPaddedCuda = int64_t{1} << 30;

struct Conv2dParams {
  Conv2dShape shape;
  const void* input;
  const void* weight;
  const void* bias;  // (k), or null
  void* output;
  int64_t input_pitch = 0;  // elements between pixels; 0: c. Others with TMA im2col alone
};

// A null gradient is not wanted. `input` and `weight` may be null if no wanted gradient reads them.
struct Conv2dBackwardParams {
  Conv2dShape shape;
  const void* grad_output;
  const void* input;
  const void* weight;
  void* grad_input;
  void* grad_weight;
  void* grad_bias;
  const void* addend = nullptr;  // like grad_input, which it is added to if the plan says so
  int64_t input_pitch = 0;       // as in Conv2dParams, for grad_weight
  // grad_weight and grad_bias are float32, of 16-bit operands. Only if the plan writes_float32().
  bool float32_parameters = false;
};

// Addresses of a direction's three tensors: x is the input or its gradient, w the weight or its
// gradient, y the output or its gradient. 0: freshly allocated and fully aligned.
struct Conv2dAddresses {
  uintptr_t x, w, y;

  bool are_multiples_of(uintptr_t bytes) const { return (x | w | y) % bytes == 0; }
};

// A product's kind follows from the element type and the permission to round to TF32.
inline GemmKind gemm_kind(const Conv2dShape& s) { return gemm_kind(s.dtype, s.allow_tf32); }

void conv2d_cpu(const Conv2dParams& params);
void conv2d_backward_cpu(const Conv2dBackwardParams& params);

}  // namespace warpwright
