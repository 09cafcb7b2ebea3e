// The tensor-core kernels of bf16.
#include "ops/attention_with_kv_cache/cuda/mma.cuh"

namespace warpwright {

template void launch_kv_mma<bf16>(const KvAttentionParams&, const KvAttentionPlan&, const KvLaunch&,
                                  cudaStream_t);

}  // namespace warpwright
