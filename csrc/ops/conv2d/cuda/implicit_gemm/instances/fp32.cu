// The implicit GEMM of float32.
#include "ops/conv2d/cuda/implicit_gemm/products.cuh"

namespace warpwright {

template void launch_implicit_gemm_fprop<GemmKind::kFp32, float>(const Conv2dParams&,
                                                                 const ImplicitGemmConfig&,
                                                                 cudaStream_t);
template void launch_implicit_gemm_dgrad<GemmKind::kFp32, float>(const Conv2dBackwardParams&,
                                                                 const ImplicitGemmConfig&,
                                                                 cudaStream_t);
template void launch_implicit_gemm_wgrad<GemmKind::kFp32, float>(const Conv2dBackwardParams&,
                                                                 const ImplicitGemmConfig&, void*,
                                                                 cudaStream_t);

}  // namespace warpwright
