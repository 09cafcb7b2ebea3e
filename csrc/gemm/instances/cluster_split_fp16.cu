// The sm_90a kernels of float16 that split k inside a cluster.
#include "gemm/cluster_split_sm90.cuh"

namespace warpwright {

template void launch_gemm_cluster_split<half>(const GemmParams&, const GemmPlan&, void*,
                                              cudaStream_t);

}  // namespace warpwright
