// The matrix products of bfloat16 on sm_90a; a file of its own so that the types compile in
// parallel.
#include "gemm/kernel_sm90.cuh"

namespace warpwright {

void launch_gemm_sm90_bf16(const GemmParams& p, const GemmConfig& config, cudaStream_t stream) {
  launch_gemm_sm90_type<bf16>(p, config, stream);
}

}  // namespace warpwright
