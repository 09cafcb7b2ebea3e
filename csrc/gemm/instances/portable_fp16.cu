// The portable kernels of float16.
#include "gemm/portable.cuh"

namespace warpwright {

template void launch_gemm_portable<GemmKind::k16Bit, half>(const GemmParams&, const GemmPlan&,
                                                           void*, cudaStream_t);

}  // namespace warpwright
