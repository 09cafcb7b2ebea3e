// The kernels of scalar products of fp32.
#include "ops/attention_with_kv_cache/cuda/fma.cuh"

namespace warpwright {

template void launch_kv_fma<float>(const KvAttentionParams&, const KvAttentionPlan&,
                                   const KvLaunch&, cudaStream_t);

}  // namespace warpwright
