// The portable kernels of bfloat16.
#include "gemm/portable.cuh"

namespace warpwright {

template void launch_gemm_portable<GemmKind::k16Bit, bf16>(const GemmParams&, const GemmPlan&,
                                                           void*, cudaStream_t);

}  // namespace warpwright
