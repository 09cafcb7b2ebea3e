// The matrix products of bfloat16; a file of its own so that the types compile in parallel.
#include "gemm/kernel_portable.cuh"

namespace warpwright {

void launch_gemm_bf16(const GemmParams& p, const GemmConfig& config, cudaStream_t stream) {
  launch_gemm_portable<GemmKind::k16Bit, bf16>(p, config, stream);
}

}  // namespace warpwright
