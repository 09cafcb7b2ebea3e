// Selects the kernels of a forward call.
#include "ops/group_norm/cuda/on_chip_sm90.cuh"
#include "ops/group_norm/cuda/passes.cuh"

namespace warpwright {
namespace {

template <class T>
void launch_on_chip(const GroupNormParams& p, const GroupNormPlan& plan, cudaStream_t stream) {
  auto run = [&]<int kHeld>() {
    const int64_t ring = RowRing<kHeld, T>::bytes(plan.threads);
    for_bool(plan.cluster > 1, [&]<bool kCluster>() {
      launch_clusters(group_norm_on_chip_kernel<T, kHeld, kCluster>,
                      dim3(static_cast<unsigned>(plan.blocks)), dim3(plan.threads), plan.cluster,
                      ring + plan.smem_bytes, stream, p, GroupNormParts(p, plan),
                      static_cast<int>(ring));
    });
  };
  if constexpr (sizeof(T) == 8) {
    for_int<2, 4>(plan.vectors, run);
  } else {
    for_int<2, 4, 8, 12>(plan.vectors, run);
  }
}

template <class T, int kVec>
void launch_passes(const GroupNormParams& p, const GroupNormPlan& plan, Accum<T>* partials,
                   cudaStream_t stream) {
  const dim3 blocks(static_cast<unsigned>(plan.blocks)), threads(plan.threads);
  launch(
      p.is_rows ? group_norm_row_moments_kernel<T, kVec> : group_norm_plane_moments_kernel<T, kVec>,
      blocks, threads, 0, stream, p, plan.lanes, plan.splits, partials);
  launch(group_norm_merge_kernel<T>, dim3(static_cast<unsigned>(p.batch * p.groups)),
         dim3(kGroupMergeThreads), 0, stream, p, kVec, plan.splits, partials);
  launch(p.is_rows ? group_norm_row_result_kernel<T, kVec, GroupNormParams>
                   : group_norm_plane_result_kernel<T, kVec, GroupNormParams>,
         blocks, threads, 0, stream, p, plan.lanes, plan.splits, nullptr);
}

}  // namespace

void launch_group_norm(const GroupNormParams& p, const GroupNormPlan& plan, void* workspace,
                       cudaStream_t stream) {
  for_dtype(p.dtype, [&]<class T>() {
    if (plan.form == GroupNormForm::kOnChip) return launch_on_chip<T>(p, plan, stream);
    for_bool(plan.vec > 1, [&]<bool kVectorized>() {
      launch_passes<T, kVectorized ? kVecSize<T> : 1>(p, plan, static_cast<Accum<T>*>(workspace),
                                                      stream);
    });
  });
}

}  // namespace warpwright
