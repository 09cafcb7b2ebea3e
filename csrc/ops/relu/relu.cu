// relu and its gradient: passes of tile/elementwise.cuh.
#include "host/launch.h"
#include "ops/relu/relu.h"
#include "tile/elementwise.cuh"

namespace warpwright {
namespace {

// Compares in float, which is exact for every type: comparisons in the own type would promote bf16
// pairwise.
template <class T>
__device__ __forceinline__ auto comparable(T x) {
  if constexpr (sizeof(T) == 2 && !std::is_integral_v<T>) {
    return convert<float>(x);
  } else {
    return x;
  }
}

struct ReluForward {
  static constexpr int kInputs = 1;

  template <class T, int kSize>
  __device__ __forceinline__ Vec<T, kSize> operator()(const Vec<T, kSize> (&in)[1], int64_t) const {
    Vec<T, kSize> result;
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      // "not (x <= 0)" passes NaN. -0.0 becomes +0.0, as in the native CUDA kernel.
      const bool passes = !(comparable(in[0][j]) <= comparable(convert<T>(0)));
      result[j] = passes ? in[0][j] : convert<T>(0);
    }
    return result;
  }
};

struct ReluBackward {
  static constexpr int kInputs = 2;  // grad_output, output

  template <class T, int kSize>
  __device__ __forceinline__ Vec<T, kSize> operator()(const Vec<T, kSize> (&in)[2], int64_t) const {
    Vec<T, kSize> result;
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      // threshold_backward: NaN in `output` passes the gradient.
      result[j] = comparable(in[1][j]) <= comparable(convert<T>(0)) ? convert<T>(0) : in[0][j];
    }
    return result;
  }
};

template <class Op, class... Inputs>
void launch_relu_op(Op op, DType dtype, int64_t numel, const ElementwisePlan& plan,
                    cudaStream_t stream, void* output, const Inputs*... inputs) {
  if (numel == 0) return;
  for_any_dtype(dtype, [&]<class T>() {
    for_elementwise<T>(plan, numel, [&]<int kSize>(unsigned blocks) {
      launch(elementwise_kernel<T, kSize, Op>, dim3(blocks), dim3(kElementwiseThreads), 0, stream,
             op, numel, plan.head,
             ElementwiseOperands<T, Op::kInputs>{static_cast<T*>(output),
                                                 {static_cast<const T*>(inputs)...}});
    });
  });
}

}  // namespace

void launch_relu(const ReluParams& p, const ElementwisePlan& plan, cudaStream_t stream) {
  launch_relu_op(ReluForward{}, p.dtype, p.numel, plan, stream, p.output, p.input);
}

void launch_relu_backward(const ReluBackwardParams& p, const ElementwisePlan& plan,
                          cudaStream_t stream) {
  launch_relu_op(ReluBackward{}, p.dtype, p.numel, plan, stream, p.grad_input, p.grad_output,
                 p.output);
}

}  // namespace warpwright
