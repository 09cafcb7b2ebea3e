// gelu, its tanh form, silu, sigmoid and tanh, elementwise. Memory-bound: 2E bytes forward, 3E
// backward (E = bytes of the input). The backward reads what the forward kept: sigmoid and tanh
// their output, the others their input, as native does.
#pragma once

#include <cstdint>
#include <string_view>

#include "common/dtype.h"
#include "common/elementwise.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace warpwright {

enum class PointwiseActivation : int8_t { kGelu, kGeluTanh, kSilu, kSigmoid, kTanh };

constexpr std::string_view kPointwiseActivations[] = {"gelu", "gelu_tanh", "silu", "sigmoid",
                                                      "tanh"};

constexpr bool keeps_output(PointwiseActivation f) {
  return f == PointwiseActivation::kSigmoid || f == PointwiseActivation::kTanh;
}

struct ActivationParams {
  DType dtype;
  PointwiseActivation activation;
  int64_t numel;
  const void* input;  // (numel), any dense order
  void* output;       // (numel), same order
};

struct ActivationBackwardParams {
  DType dtype;
  PointwiseActivation activation;
  int64_t numel;
  const void* grad_output;  // (numel)
  const void* kept;         // (numel), of the forward: its output if keeps_output(), else its input
  void* grad_input;         // (numel)
};

inline ElementwisePlan choose_activation(const ActivationParams& p) {
  return choose_elementwise(p.dtype, p.numel, {p.output, p.input});
}
inline ElementwisePlan choose_activation_backward(const ActivationBackwardParams& p) {
  return choose_elementwise(p.dtype, p.numel, {p.grad_input, p.grad_output, p.kept});
}

// Whether ATen's kernel computes the forward on a CPU: oneDNN's gelu, which takes half of our time
// per element, after 8 us. `enabled`: torch.backends.mkldnn.enabled.
inline bool onednn_is_faster(std::string_view activation, bool is_dense_float32, int64_t numel,
                             bool enabled) {
  constexpr int64_t kLeastElements = 16384;
  return enabled && activation == "gelu" && is_dense_float32 && numel >= kLeastElements;
}

#ifdef WARPWRIGHT_WITH_CUDA
void launch_activation(const ActivationParams& params, const ElementwisePlan& plan,
                       cudaStream_t stream);
void launch_activation_backward(const ActivationBackwardParams& params, const ElementwisePlan& plan,
                                cudaStream_t stream);
#endif

}  // namespace warpwright
