// The sm_90a kernels of bfloat16.
#include "gemm/sm90.cuh"

namespace warpwright {

template void launch_gemm_sm90<GemmKind::k16Bit, bf16>(const GemmParams&, const GemmPlan&, void*,
                                                       cudaStream_t);

}  // namespace warpwright
