// The launchers of attention over the cache by path and type, instantiated one file each.
#pragma once

#include "ops/attention_with_kv_cache/attention_with_kv_cache.h"

namespace warpwright {

struct KvLaunch;

template <class T>
void launch_kv_mma(const KvAttentionParams& params, const KvAttentionPlan& plan,
                   const KvLaunch& args, cudaStream_t stream);
template <class T>
void launch_kv_fma(const KvAttentionParams& params, const KvAttentionPlan& plan,
                   const KvLaunch& args, cudaStream_t stream);

}  // namespace warpwright
