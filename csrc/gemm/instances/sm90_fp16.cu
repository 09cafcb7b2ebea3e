// The sm_90a kernels of float16.
#include "gemm/sm90.cuh"

namespace warpwright {

template void launch_gemm_sm90<GemmKind::k16Bit, half>(const GemmParams&, const GemmPlan&, void*,
                                                       cudaStream_t);

}  // namespace warpwright
