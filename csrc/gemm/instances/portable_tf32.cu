// The matrix products of float32 rounded to TF32; a file of its own so that the types compile in
// parallel.
#include "gemm/kernel_portable.cuh"

namespace warpwright {

void launch_gemm_tf32(const GemmParams& p, const GemmConfig& config, cudaStream_t stream) {
  launch_gemm_portable<GemmKind::kTf32, float>(p, config, stream);
}

}  // namespace warpwright
