// The kernels of bfloat16 for a short k.
#include "gemm/short_k_sm90.cuh"

namespace warpwright {

template void launch_gemm_short_k<bf16>(const GemmParams&, const GemmPlan&, cudaStream_t);

}  // namespace warpwright
