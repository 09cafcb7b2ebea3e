// Selects the kernels of a backward call.
#include "ops/group_norm/cuda/on_chip_sm90.cuh"
#include "ops/group_norm/cuda/passes.cuh"

namespace warpwright {
namespace {

template <class T>
void launch_on_chip(const GroupNormBackwardParams& p, const GroupNormPlan& plan, Accum<T>* partials,
                    cudaStream_t stream) {
  auto run = [&]<int kHeld, bool kCluster>() {
    const int64_t ring = RowRing<kHeld, T, T>::bytes(plan.threads);
    launch_clusters(group_norm_bwd_on_chip_kernel<T, kHeld, kCluster>,
                    dim3(static_cast<unsigned>(plan.blocks)), dim3(plan.threads), plan.cluster,
                    ring + plan.smem_bytes, stream, p, GroupNormParts(p, plan), plan.entry_lanes,
                    plan.channel_lanes, static_cast<int>(ring),
                    p.needs_sums() ? partials : nullptr);
  };
  // As kGroupNormBackwardHeld and group_norm_most_held() have it: more would spill.
  if (plan.vectors <= kGroupNormPairVectors) {
    for_int<1, 2, 4, 6>(plan.vectors, [&]<int kHeld>() {
      for_bool(plan.cluster > 1,
               [&]<bool kCluster>() { run.template operator()<kHeld, kCluster>(); });
    });
  } else if constexpr (sizeof(T) < 8) {
    if (plan.cluster > 1) return run.template operator()<8, true>();
    for_int<8, 10>(plan.vectors, [&]<int kHeld>() { run.template operator()<kHeld, false>(); });
  }
}

template <class T, int kVec>
void launch_passes(const GroupNormBackwardParams& p, const GroupNormPlan& plan, Accum<T>* partials,
                   cudaStream_t stream) {
  const dim3 blocks(static_cast<unsigned>(plan.blocks)), threads(plan.threads);
  Accum<T>* sums = partials + 2 * plan.splits * p.batch * p.channels;
  launch(p.is_rows ? group_norm_row_sums_kernel<T, kVec> : group_norm_plane_sums_kernel<T, kVec>,
         blocks, threads, 0, stream, p, plan.lanes, plan.splits, partials);
  if (p.grad_input == nullptr) return;
  launch(group_norm_add_kernel<T>, dim3(static_cast<unsigned>(p.batch * p.groups)),
         dim3(kGroupMergeThreads), 0, stream, p, plan.splits, partials, sums);
  launch(p.is_rows ? group_norm_row_result_kernel<T, kVec, GroupNormBackwardParams>
                   : group_norm_plane_result_kernel<T, kVec, GroupNormBackwardParams>,
         blocks, threads, 0, stream, p, plan.lanes, plan.splits, sums);
}

}  // namespace

void launch_group_norm_backward(const GroupNormBackwardParams& p, const GroupNormPlan& plan,
                                void* workspace, cudaStream_t stream) {
  for_dtype(p.dtype, [&]<class T>() {
    auto* partials = static_cast<Accum<T>*>(workspace);
    if (plan.form == GroupNormForm::kOnChip) {
      launch_on_chip<T>(p, plan, partials, stream);
    } else {
      for_bool(plan.vec > 1, [&]<bool kVectorized>() {
        launch_passes<T, kVectorized ? kVecSize<T> : 1>(p, plan, partials, stream);
      });
    }
    if (!p.needs_sums()) return;
    const int64_t blocks = 2 * ceil_div(p.channels, int64_t{kWarpSize});
    launch(group_norm_last_sums_kernel<T>, dim3(static_cast<unsigned>(blocks)),
           dim3(kWarpSize * kGroupSumRows), 0, stream, p, plan.partials(), partials);
  });
}

}  // namespace warpwright
