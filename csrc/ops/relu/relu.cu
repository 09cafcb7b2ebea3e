// One pass, no reuse: many short blocks, one 16-byte load of each operand per thread.
// docs/kernels/relu.md has the race.
#include <algorithm>

#include "common/ceil_div.h"
#include "device/access.cuh"
#include "device/vec.cuh"
#include "host/launch.h"
#include "ops/relu/relu.h"

namespace warpwright {
namespace {

constexpr int kThreads = 256;

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

struct ReluFwd {
  static constexpr int kInputs = 1;
  template <class T>
  __device__ __forceinline__ T operator()(const T (&in)[1]) const {
    // "not (x <= 0)" passes NaN. -0.0 becomes +0.0, as in the native CUDA kernel.
    return !(comparable(in[0]) <= comparable(convert<T>(0))) ? in[0] : convert<T>(0);
  }
};

struct ReluBwd {
  static constexpr int kInputs = 2;  // grad_output, output
  template <class T>
  __device__ __forceinline__ T operator()(const T (&in)[2]) const {
    // threshold_backward: NaN in `output` passes the gradient.
    return comparable(in[1]) <= comparable(convert<T>(0)) ? convert<T>(0) : in[0];
  }
};

template <class T, int kInputs>
struct Operands {
  const T* pointer[kInputs];
};

// Layout: Op::kInputs dense arrays of `numel` elements, walked in the same order.
// Grid: block b covers kThreads vectors of kSize elements. The first threads of block 0 take the
// scalar head and tail (each shorter than a vector).
template <class T, int kSize, class Op>
__global__ void __launch_bounds__(kThreads)
    elementwise_kernel(Op op, int64_t numel, int64_t head, T* output,
                       Operands<T, Op::kInputs> inputs) {
  constexpr int kInputs = Op::kInputs;
  const int64_t num_vectors = (numel - head) / kSize;
  const int64_t v = int64_t{blockIdx.x} * kThreads + threadIdx.x;

  auto apply = [&](auto&& element_of) {
    T in[kInputs];
#pragma unroll
    for (int i = 0; i < kInputs; ++i) in[i] = element_of(i);
    return op(in);
  };

  if (v < num_vectors) {
    Vec<T, kSize> loaded[kInputs], result;
#pragma unroll
    for (int i = 0; i < kInputs; ++i) {
      loaded[i] = load_vec<kSize>(inputs.pointer[i] + head + v * kSize);
    }
#pragma unroll
    for (int j = 0; j < kSize; ++j) result[j] = apply([&](int i) { return loaded[i][j]; });
    store_vec_global(output + head + v * kSize, result);
  }

  if (blockIdx.x == 0) {
    const int64_t tail = head + num_vectors * kSize + threadIdx.x;
    if (threadIdx.x < head) {
      output[threadIdx.x] = apply([&](int i) { return inputs.pointer[i][threadIdx.x]; });
    }
    if (tail < numel) output[tail] = apply([&](int i) { return inputs.pointer[i][tail]; });
  }
}

template <class Op, class... Inputs>
void launch_elementwise(Op op, DType dtype, int64_t numel, const ReluPlan& plan,
                        cudaStream_t stream, void* output, const Inputs*... inputs) {
  if (numel == 0) return;
  for_any_dtype(dtype, [&]<class T>() {
    auto run = [&]<int kSize>() {
      const int64_t vectors = (numel - plan.head) / kSize;
      const int64_t blocks = std::max<int64_t>(1, ceil_div<int64_t>(vectors, kThreads));
      launch(elementwise_kernel<T, kSize, Op>, dim3(static_cast<unsigned>(blocks)), dim3(kThreads),
             0, stream, op, numel, plan.head, static_cast<T*>(output),
             Operands<T, Op::kInputs>{{static_cast<const T*>(inputs)...}});
    };
    if (plan.vectorized) {
      run.template operator()<kVecSize<T>>();
    } else {
      run.template operator()<1>();
    }
  });
}

}  // namespace

void launch_relu(const ReluParams& p, const ReluPlan& plan, cudaStream_t stream) {
  launch_elementwise(ReluFwd{}, p.dtype, p.numel, plan, stream, p.output, p.input);
}

void launch_relu_backward(const ReluBackwardParams& p, const ReluPlan& plan, cudaStream_t stream) {
  launch_elementwise(ReluBwd{}, p.dtype, p.numel, plan, stream, p.grad_input, p.grad_output,
                     p.output);
}

}  // namespace warpwright
