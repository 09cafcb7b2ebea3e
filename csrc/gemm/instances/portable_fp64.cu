// The matrix products of float64; a file of its own so that the types compile in parallel.
#include "gemm/kernel_portable.cuh"

namespace warpwright {

void launch_gemm_fp64(const GemmParams& p, const GemmConfig& config, cudaStream_t stream) {
  launch_gemm_portable<GemmKind::kFp64, double>(p, config, stream);
}

}  // namespace warpwright
