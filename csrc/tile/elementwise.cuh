// A pass over dense operands of one order, without reuse: many short blocks, one 16-byte load of
// each operand per thread. docs/kernels/relu.md has the race.
//
// An Op is a functor with
//   static constexpr int kInputs;
//   template <class T, int kSize>
//   __device__ Vec<T, kSize> operator()(const Vec<T, kSize> (&in)[kInputs], int64_t first) const;
// `first` is the position of the vector's first element.
#pragma once

#include <algorithm>

#include "common/ceil_div.h"
#include "common/elementwise.h"
#include "device/access.cuh"
#include "device/vec.cuh"

namespace warpwright {

constexpr int kElementwiseThreads = 256;

template <class T, int kInputs>
struct ElementwiseOperands {
  T* output;
  const T* input[kInputs];
};

template <int kSize, class T, class Op>
__device__ __forceinline__ void elementwise_step(
    const Op& op, const ElementwiseOperands<T, Op::kInputs>& operands, int64_t first) {
  Vec<T, kSize> in[Op::kInputs];
#pragma unroll
  for (int i = 0; i < Op::kInputs; ++i) in[i] = load_vec<kSize>(operands.input[i] + first);
  store_vec_global(operands.output + first, op.template operator()<T, kSize>(in, first));
}

// Grid: block b covers kElementwiseThreads vectors of kSize elements. The first threads of block 0
// take the scalar head and tail (each shorter than a vector).
template <class T, int kSize, class Op>
__global__ void __launch_bounds__(kElementwiseThreads)
    elementwise_kernel(const Op op, int64_t numel, int64_t head,
                       ElementwiseOperands<T, Op::kInputs> operands) {
  const int64_t num_vectors = (numel - head) / kSize;
  const int64_t v = int64_t{blockIdx.x} * kElementwiseThreads + threadIdx.x;
  if (v < num_vectors) elementwise_step<kSize>(op, operands, head + v * kSize);
  if (kSize > 1 && blockIdx.x == 0) {
    const int64_t tail = head + num_vectors * kSize + threadIdx.x;
    if (threadIdx.x < head) elementwise_step<1>(op, operands, threadIdx.x);
    if (tail < numel) elementwise_step<1>(op, operands, tail);
  }
}

// Calls f.operator()<kSize>(blocks).
template <class T, class F>
void for_elementwise(const ElementwisePlan& plan, int64_t numel, F&& f) {
  auto run = [&]<int kSize>() {
    const int64_t vectors = (numel - plan.head) / kSize;
    const int64_t blocks = std::max<int64_t>(1, ceil_div<int64_t>(vectors, kElementwiseThreads));
    f.template operator()<kSize>(static_cast<unsigned>(blocks));
  };
  plan.vectorized ? run.template operator()<kVecSize<T>>() : run.template operator()<1>();
}

}  // namespace warpwright
