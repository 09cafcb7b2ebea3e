// gated_activation(gate, up) = f(gate) * up, elementwise: f = silu is SwiGLU, f = gelu is GeGLU.
// Memory-bound: 3E bytes forward, 5E backward (E = bytes of up). The backward computes f(gate)
// again, so the forward keeps no tensor of its own.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "common/activation.h"
#include "common/dtype.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace warpwright {

// A matrix whose columns are adjacent.
struct ConstRows {
  const void* data;
  int64_t pitch;  // elements from a row to the next
};
struct MutableRows {
  void* data;  // null: not wanted
  int64_t pitch;
};

struct GatedActivationParams {
  DType dtype;
  Activation activation;
  int64_t rows, cols;  // of every operand; one row if all operands are dense
  ConstRows gate, up;
  MutableRows output;
};

struct GatedActivationBackwardParams {
  DType dtype;
  Activation activation;
  int64_t rows, cols;
  ConstRows grad_output, gate, up;
  MutableRows grad_gate, grad_up;
};

struct GatedActivationPlan {
  bool vectorized;  // 16-byte accesses; else one element per access
  int64_t head;     // elements of the only row before its first 16-byte boundary
  const char* reason;
};

struct RowsAddress {
  const void* data;
  int64_t pitch;
};

inline GatedActivationPlan choose_gated_rows(DType dtype, int64_t rows, int64_t cols,
                                             std::initializer_list<RowsAddress> operands) {
  const int64_t size = dtype_size(dtype);
  auto misalignment = [](const void* data) {
    return static_cast<int64_t>(reinterpret_cast<uintptr_t>(data) % 16);
  };
  int64_t first = -1;  // of the first operand that is wanted
  for (const RowsAddress& operand : operands) {
    if (operand.data == nullptr) continue;
    if (first < 0) first = misalignment(operand.data);
    if (misalignment(operand.data) != first) {
      return {false, 0, "operands are misaligned differently: no common 16-byte boundary"};
    }
    if (rows > 1 && operand.pitch * size % 16 != 0) {
      return {false, 0, "rows do not all begin at a 16-byte boundary"};
    }
  }
  first = std::max<int64_t>(first, 0);
  if (rows > 1 && (first > 0 || cols * size % 16 != 0)) {
    return {false, 0, "rows do not begin and end at 16-byte boundaries"};
  }
  if (first % size != 0) return {false, 0, "an address is not a multiple of the element"};
  const int64_t head = (16 - first) % 16 / size;
  if (head > cols) return {false, 0, "ends before the first 16-byte boundary"};
  return {true, head, "16-byte accesses"};
}

inline GatedActivationPlan choose_gated_activation(const GatedActivationParams& p) {
  return choose_gated_rows(
      p.dtype, p.rows, p.cols,
      {{p.gate.data, p.gate.pitch}, {p.up.data, p.up.pitch}, {p.output.data, p.output.pitch}});
}
inline GatedActivationPlan choose_gated_activation_backward(
    const GatedActivationBackwardParams& p) {
  return choose_gated_rows(p.dtype, p.rows, p.cols,
                           {{p.grad_output.data, p.grad_output.pitch},
                            {p.gate.data, p.gate.pitch},
                            {p.up.data, p.up.pitch},
                            {p.grad_gate.data, p.grad_gate.pitch},
                            {p.grad_up.data, p.grad_up.pitch}});
}

inline std::string describe(const GatedActivationPlan& plan) {
  return std::string(plan.vectorized ? "" : "element accesses: ") + plan.reason;
}

void gated_activation_cpu(const GatedActivationParams& params);
void gated_activation_backward_cpu(const GatedActivationBackwardParams& params);

#ifdef WARPWRIGHT_WITH_CUDA
void launch_gated_activation(const GatedActivationParams& params, const GatedActivationPlan& plan,
                             cudaStream_t stream);
void launch_gated_activation_backward(const GatedActivationBackwardParams& params,
                                      const GatedActivationPlan& plan, cudaStream_t stream);
#endif

}  // namespace warpwright
