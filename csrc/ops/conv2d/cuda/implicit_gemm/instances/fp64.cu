// The implicit GEMM of float64.
#include "ops/conv2d/cuda/implicit_gemm/products.cuh"

namespace warpwright {

template void launch_implicit_gemm_fprop<GemmKind::kFp64, double>(const Conv2dParams&,
                                                                  const Conv2dConfig&,
                                                                  cudaStream_t);
template void launch_implicit_gemm_dgrad<GemmKind::kFp64, double>(const Conv2dBackwardParams&,
                                                                  const Conv2dConfig&,
                                                                  cudaStream_t);
template void launch_implicit_gemm_wgrad<GemmKind::kFp64, double>(const Conv2dBackwardParams&,
                                                                  const Conv2dConfig&,
                                                                  cudaStream_t);

}  // namespace warpwright
