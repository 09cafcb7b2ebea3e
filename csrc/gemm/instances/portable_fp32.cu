// The portable kernels of float32.
#include "gemm/portable.cuh"

namespace warpwright {

template void launch_gemm_portable<GemmKind::kFp32, float>(const GemmParams&, const GemmPlan&,
                                                           void*, cudaStream_t);

}  // namespace warpwright
