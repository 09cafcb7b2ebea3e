// gelu, silu, sigmoid, tanh and their gradients: passes of tile/elementwise.cuh. The activation is
// a template argument: each kernel has the instructions and registers of one.
#include "ops/activation/activation.h"

#include "common/activation.h"
#include "common/switch.h"
#include "device/activation.cuh"
#include "host/launch.h"
#include "tile/elementwise.cuh"

namespace warpwright {
namespace {

using enum PointwiseActivation;

// Of those that device/activation.cuh has.
constexpr Activation activation_of(PointwiseActivation f) {
  return f == kGelu ? Activation::kGelu : f == kSilu ? Activation::kSilu : Activation::kGeluTanh;
}

template <PointwiseActivation kActivation>
struct ActivationForward {
  static constexpr int kInputs = 1;

  template <class T, int kSize>
  __device__ __forceinline__ Vec<T, kSize> operator()(const Vec<T, kSize> (&in)[1], int64_t) const {
    using Acc = Accum<T>;
    Vec<Acc, kSize> x = widen(in[0]);
    if constexpr (kActivation == kSigmoid) {
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        const Acc e = exp_within<kRoundingOf<T>>(-x[j]);
        x[j] = divide_within<kRoundingOf<T>>(Acc(1), Acc(1) + e);
      }
    } else if constexpr (kActivation == kTanh) {
#pragma unroll
      for (int j = 0; j < kSize; ++j) x[j] = tanh(x[j]);
    } else {
      activate<kRoundingOf<T>, kSize>(activation_of(kActivation), x.data);
    }
    return narrow<T, kSize>(x);
  }
};

template <PointwiseActivation kActivation>
struct ActivationBackward {
  static constexpr int kInputs = 2;  // grad_output, kept

  template <class T, int kSize>
  __device__ __forceinline__ Vec<T, kSize> operator()(const Vec<T, kSize> (&in)[2], int64_t) const {
    using Acc = Accum<T>;
    Vec<Acc, kSize> dx = widen(in[0]);
    const Vec<Acc, kSize> kept = widen(in[1]);
    if constexpr (kActivation == kSigmoid) {
#pragma unroll
      for (int j = 0; j < kSize; ++j) dx[j] *= kept[j] * (Acc(1) - kept[j]);
    } else if constexpr (kActivation == kTanh) {
#pragma unroll
      for (int j = 0; j < kSize; ++j) dx[j] *= Acc(1) - kept[j] * kept[j];
    } else {
      activate_backward<kRoundingOf<T>, kSize>(activation_of(kActivation), kept.data, dx.data);
    }
    return narrow<T, kSize>(dx);
  }
};

template <class Op, class... Inputs>
void launch_op(DType dtype, int64_t numel, const ElementwisePlan& plan, cudaStream_t stream,
               void* output, const Inputs*... inputs) {
  if (numel == 0) return;
  for_dtype(dtype, [&]<class T>() {
    for_elementwise<T>(plan, numel, [&]<int kSize>(unsigned blocks) {
      launch(elementwise_kernel<T, kSize, Op>, dim3(blocks), dim3(kElementwiseThreads), 0, stream,
             Op{}, numel, plan.head,
             ElementwiseOperands<T, Op::kInputs>{static_cast<T*>(output),
                                                 {static_cast<const T*>(inputs)...}});
    });
  });
}

template <class F>
void for_activation(PointwiseActivation activation, F&& f) {
  for_int<0, 1, 2, 3, 4>(static_cast<int>(activation), [&]<int kIndex>() {
    f.template operator()<static_cast<PointwiseActivation>(kIndex)>();
  });
}

}  // namespace

void launch_activation(const ActivationParams& p, const ElementwisePlan& plan,
                       cudaStream_t stream) {
  for_activation(p.activation, [&]<PointwiseActivation kActivation>() {
    launch_op<ActivationForward<kActivation>>(p.dtype, p.numel, plan, stream, p.output, p.input);
  });
}

void launch_activation_backward(const ActivationBackwardParams& p, const ElementwisePlan& plan,
                                cudaStream_t stream) {
  for_activation(p.activation, [&]<PointwiseActivation kActivation>() {
    launch_op<ActivationBackward<kActivation>>(p.dtype, p.numel, plan, stream, p.grad_input,
                                               p.grad_output, p.kept);
  });
}

}  // namespace warpwright
