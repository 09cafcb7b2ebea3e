// The matrix products of strict float32; a file of its own so that the types compile in parallel.
#include "gemm/kernel_portable.cuh"

namespace warpwright {

void launch_gemm_fp32(const GemmParams& p, const GemmConfig& config, cudaStream_t stream) {
  launch_gemm_portable<GemmKind::kFp32, float>(p, config, stream);
}

}  // namespace warpwright
