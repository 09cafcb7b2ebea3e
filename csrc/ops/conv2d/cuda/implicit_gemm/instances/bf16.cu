// The implicit GEMM of bfloat16.
#include "ops/conv2d/cuda/implicit_gemm/products.cuh"

namespace warpwright {

template void launch_implicit_gemm_fprop<GemmKind::k16Bit, bf16>(const Conv2dParams&,
                                                                 const ImplicitGemmConfig&,
                                                                 cudaStream_t);
template void launch_implicit_gemm_dgrad<GemmKind::k16Bit, bf16>(const Conv2dBackwardParams&,
                                                                 const ImplicitGemmConfig&,
                                                                 cudaStream_t);
template void launch_implicit_gemm_wgrad<GemmKind::k16Bit, bf16>(const Conv2dBackwardParams&,
                                                                 const ImplicitGemmConfig&, void*,
                                                                 cudaStream_t);

}  // namespace warpwright
