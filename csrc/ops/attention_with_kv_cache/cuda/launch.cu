// Attention over the cache: the plan's kernel, then the merge of the splits.
#include "ops/attention_with_kv_cache/cuda/launch.h"

#include "ops/attention_with_kv_cache/cuda/merge.cuh"

namespace warpwright {

void launch_kv_attention(const KvAttentionParams& p, const KvAttentionPlan& plan,
                         const KvAttentionWorkspace& workspace, const KvCacheErrors& errors,
                         cudaStream_t stream) {
  const KvLaunch args{.page_size = FastDivmod(std::max(p.layout.page_size, int64_t{1})),
                      .splits = plan.splits,
                      .errors = errors,
                      .partial_out = workspace.out,
                      .partial_stats = workspace.stats};
  for_dtype(p.dtype, [&]<class T>() {
    if constexpr (sizeof(T) == 2) {
      if (plan.path == KvAttentionPath::kMma) launch_kv_mma<T>(p, plan, args, stream);
    }
    if (plan.path == KvAttentionPath::kFma) launch_kv_fma<T>(p, plan, args, stream);
    if (plan.splits > 1) launch_kv_merge<T>(p, args, stream);
  });
}

}  // namespace warpwright
