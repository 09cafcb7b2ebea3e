// The portable kernels of float64.
#include "gemm/portable.cuh"

namespace warpwright {

template void launch_gemm_portable<GemmKind::kFp64, double>(const GemmParams&, const GemmPlan&,
                                                            void*, cudaStream_t);

}  // namespace warpwright
