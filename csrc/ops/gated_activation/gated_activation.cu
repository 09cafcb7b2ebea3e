// One pass, no reuse: many short blocks, one 16-byte load of each operand per thread.
// docs/kernels/gated_activation.md has the race.
#include <algorithm>

#include "common/ceil_div.h"
#include "device/access.cuh"
#include "device/activation.cuh"
#include "device/vec.cuh"
#include "host/launch.h"
#include "ops/gated_activation/gated_activation.h"

namespace warpwright {
namespace {

constexpr int kThreads = 256;

// gate, up -> f(gate) * up
struct GatedForward {
  static constexpr int kInputs = 2;
  static constexpr int kOutputs = 1;
  Activation activation;

  template <class T, int kSize>
  __device__ __forceinline__ void operator()(const Vec<Accum<T>, kSize> (&in)[2],
                                             Vec<Accum<T>, kSize> (&out)[1]) const {
    out[0] = in[0];
    activate<kRoundingOf<T>, kSize>(activation, out[0].data);
#pragma unroll
    for (int j = 0; j < kSize; ++j) out[0][j] *= in[1][j];
  }
};

// grad_output, gate, up -> grad_output * up * f'(gate), grad_output * f(gate)
struct GatedBackward {
  static constexpr int kInputs = 3;
  static constexpr int kOutputs = 2;
  Activation activation;

  template <class T, int kSize>
  __device__ __forceinline__ void operator()(const Vec<Accum<T>, kSize> (&in)[3],
                                             Vec<Accum<T>, kSize> (&out)[2]) const {
    out[1] = in[1];
    activate<kRoundingOf<T>, kSize>(activation, out[1].data);
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      out[1][j] *= in[0][j];
      out[0][j] = in[0][j] * in[2][j];
    }
    activate_backward<kRoundingOf<T>, kSize>(activation, in[1].data, out[0].data);
  }
};

template <class T, int kInputs, int kOutputs>
struct GatedOperands {
  const T* input[kInputs];
  int64_t input_pitch[kInputs];
  T* output[kOutputs];  // null: not wanted
  int64_t output_pitch[kOutputs];
};

// Loads kSize elements per operand at (row, col), computes, and stores.
template <int kSize, class T, class Op>
__device__ __forceinline__ void gated_step(
    const Op& op, const GatedOperands<T, Op::kInputs, Op::kOutputs>& operands, int64_t row,
    int64_t col) {
  Vec<T, kSize> loaded[Op::kInputs];
#pragma unroll
  for (int i = 0; i < Op::kInputs; ++i) {
    loaded[i] = load_vec<kSize>(operands.input[i] + row * operands.input_pitch[i] + col);
  }
  Vec<Accum<T>, kSize> in[Op::kInputs], out[Op::kOutputs];
#pragma unroll
  for (int i = 0; i < Op::kInputs; ++i) in[i] = widen(loaded[i]);
  op.template operator()<T, kSize>(in, out);
#pragma unroll
  for (int i = 0; i < Op::kOutputs; ++i) {
    if (operands.output[i] == nullptr) continue;
    store_vec_global(operands.output[i] + row * operands.output_pitch[i] + col,
                     narrow<T, kSize>(out[i]));
  }
}

// Layout: matrices (rows, cols) with a pitch each, columns adjacent.
// Grid: thread t owns the t-th vector of kSize elements, row by row. If there is one row, the first
// threads of block 0 also take its scalar head and tail (each shorter than a vector).
template <class T, int kSize, class Op>
__global__ void __launch_bounds__(kThreads)
    gated_kernel(Op op, int64_t rows, int64_t cols, int64_t head,
                 GatedOperands<T, Op::kInputs, Op::kOutputs> operands) {
  const int64_t per_row = (cols - head) / kSize;
  const int64_t v = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (rows == 1) {
    if (v < per_row) gated_step<kSize>(op, operands, 0, head + v * kSize);
    if (kSize > 1 && blockIdx.x == 0) {
      const int64_t tail = head + per_row * kSize + threadIdx.x;
      if (threadIdx.x < head) gated_step<1>(op, operands, 0, threadIdx.x);
      if (tail < cols) gated_step<1>(op, operands, 0, tail);
    }
    return;
  }
  if (v >= rows * per_row) return;
  int64_t row;
  if (rows * per_row <= UINT32_MAX) {  // a division of 64 bits takes four times the instructions
    row = static_cast<uint32_t>(v) / static_cast<uint32_t>(per_row);
  } else {
    row = v / per_row;
  }
  gated_step<kSize>(op, operands, row, (v - row * per_row) * kSize);
}

template <class Op, class MakeOperands>
void launch_gated(Op op, DType dtype, int64_t rows, int64_t cols, const GatedActivationPlan& plan,
                  cudaStream_t stream, MakeOperands&& make_operands) {
  if (rows == 0 || cols == 0) return;
  for_dtype(dtype, [&]<class T>() {
    auto run = [&]<int kSize>() {
      const int64_t vectors = rows * ((cols - plan.head) / kSize);
      const int64_t blocks = std::max<int64_t>(1, ceil_div<int64_t>(vectors, kThreads));
      launch(gated_kernel<T, kSize, Op>, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0,
             stream, op, rows, cols, plan.head, make_operands.template operator()<T>());
    };
    if (plan.vectorized) {
      run.template operator()<kVecSize<T>>();
    } else {
      run.template operator()<1>();
    }
  });
}

}  // namespace

void launch_gated_activation(const GatedActivationParams& p, const GatedActivationPlan& plan,
                             cudaStream_t stream) {
  launch_gated(GatedForward{p.activation}, p.dtype, p.rows, p.cols, plan, stream, [&]<class T>() {
    return GatedOperands<T, 2, 1>{
        {static_cast<const T*>(p.gate.data), static_cast<const T*>(p.up.data)},
        {p.gate.pitch, p.up.pitch},
        {static_cast<T*>(p.output.data)},
        {p.output.pitch}};
  });
}

void launch_gated_activation_backward(const GatedActivationBackwardParams& p,
                                      const GatedActivationPlan& plan, cudaStream_t stream) {
  launch_gated(GatedBackward{p.activation}, p.dtype, p.rows, p.cols, plan, stream, [&]<class T>() {
    return GatedOperands<T, 3, 2>{
        {static_cast<const T*>(p.grad_output.data), static_cast<const T*>(p.gate.data),
         static_cast<const T*>(p.up.data)},
        {p.grad_output.pitch, p.gate.pitch, p.up.pitch},
        {static_cast<T*>(p.grad_gate.data), static_cast<T*>(p.grad_up.data)},
        {p.grad_gate.pitch, p.grad_up.pitch}};
  });
}

}  // namespace warpwright
