// The sm_90a kernels of float32 rounded to TF32.
#include "gemm/sm90.cuh"

namespace warpwright {

template void launch_gemm_sm90<GemmKind::kTf32, float>(const GemmParams&, const GemmPlan&, void*,
                                                       cudaStream_t);

}  // namespace warpwright
