// relu(x) = max(x, 0); NaN remains. Memory-bound: 2E bytes forward, 3E backward (E = bytes of x).
// The backward reads the saved output, as native does.
#pragma once

#include <cstdint>

#include "common/dtype.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace warpwright {

struct ReluParams {
  DType dtype;
  int64_t numel;
  const void* input;  // (numel), any dense order
  void* output;       // (numel), same order; may be `input`
};

struct ReluBackwardParams {
  DType dtype;
  int64_t numel;
  const void* grad_output;  // (numel)
  const void* output;       // (numel), of the forward
  void* grad_input;         // (numel)
};

struct ReluConfig {
  bool vectorized;  // 16-byte accesses after a scalar head; else one element per access
  int64_t head;     // elements before the first 16-byte boundary
  const char* reason;
};

// `misalignment[i]`: bytes of operand i past a 16-byte boundary.
inline ReluConfig choose_relu_config(DType dtype, int64_t numel, const int64_t* misalignment,
                                     int operands) {
  for (int i = 1; i < operands; ++i) {
    if (misalignment[i] != misalignment[0]) {
      return {false, 0, "operands are misaligned differently: no common 16-byte boundary"};
    }
  }
  const int64_t size = dtype_size(dtype);
  if (misalignment[0] % size != 0) return {false, 0, "an address is not a multiple of the element"};
  const int64_t head = (16 - misalignment[0]) % 16 / size;
  if (head > numel) return {false, 0, "shorter than the way to a 16-byte boundary"};
  return {true, head, "16-byte accesses"};
}

void relu_cpu(const ReluParams& params);
void relu_backward_cpu(const ReluBackwardParams& params);

#ifdef WARPWRIGHT_WITH_CUDA
void launch_relu_fwd(const ReluParams& params, cudaStream_t stream);
void launch_relu_bwd(const ReluBackwardParams& params, cudaStream_t stream);
#endif

}  // namespace warpwright
