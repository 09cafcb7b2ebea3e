// The sm_90a kernels of float32 as sums of two TF32 numbers.
#include "gemm/sm90.cuh"

namespace warpwright {

template void launch_gemm_sm90<GemmKind::kFp32, float>(const GemmParams&, const GemmPlan&, void*,
                                                       cudaStream_t);

}  // namespace warpwright
