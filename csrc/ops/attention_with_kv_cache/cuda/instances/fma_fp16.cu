// The kernels of scalar products of fp16.
#include "ops/attention_with_kv_cache/cuda/fma.cuh"

namespace warpwright {

template void launch_kv_fma<half>(const KvAttentionParams&, const KvAttentionPlan&, const KvLaunch&,
                                  cudaStream_t);

}  // namespace warpwright
