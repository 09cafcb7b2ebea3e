// Rows that a cluster of blocks shares: each block reads and writes its part, and distributed
// shared memory exchanges the parts' sums.
#include "device/sm90/arch.cuh"
#include "device/sm90/cluster.cuh"
#include "host/launch_cluster.h"
#include "ops/cross_entropy/cuda/fused.cuh"

namespace warpwright {
namespace {

struct Cluster {
  int rank_, size_;

  __device__ __forceinline__ int rank() const { return rank_; }
  __device__ __forceinline__ int size() const { return size_; }

  // Turns each thread's block sums into the cluster's sums. Adds in the order of the ranks, so all
  // blocks get the same bits.
  template <class Sums>
  __device__ __forceinline__ void merge(Sums& sums) const {
    using Acc = typename Sums::Acc;
    __shared__ Acc slot[4];
    if (threadIdx.x == 0) sums.store(slot);
    cluster_arrive();
    cluster_wait();
    const int in_warp = threadIdx.x % kWarpSize;
    sums = Sums();
    if (in_warp < size_) {
      const uint32_t mapped = map_to_cta(static_cast<uint32_t>(__cvta_generic_to_shared(slot)),
                                         static_cast<uint32_t>(in_warp));
      Acc part[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) part[i] = load_cluster(mapped + i * sizeof(Acc), Acc());
      sums.load(part);
    }
    cluster_arrive();  // leave() waits for the others
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) sums.merge(sums.from_lane(offset));
  }

  // Keeps a block's shared memory alive until the others have read it.
  __device__ __forceinline__ void leave() const { cluster_wait(); }
};

// See cross_entropy_gradient_rows(). `cluster` consecutive blocks own a row.
template <class T, TargetKind kKind, int kVec>
__global__ void __launch_bounds__(kCrossEntropyTeam, kCrossEntropyTeams<T>)
    cross_entropy_gradient_cluster_kernel(const CrossEntropyGradientParams p,
                                          const Smoothing<Accum<T>> smoothing, int lanes,
                                          int cluster) {
  if constexpr (kHasSm90a) {
    cross_entropy_gradient_rows<T, kKind, kVec>(
        p, smoothing, lanes, Cluster{static_cast<int>(cluster_cta_rank()), cluster});
  }
}

}  // namespace

void launch_cross_entropy_gradient_cluster(const CrossEntropyGradientParams& p,
                                           const CrossEntropyGradientPlan& plan,
                                           cudaStream_t stream) {
  for_gradient(p, plan, [&]<class T, TargetKind kKind, int kVec>() {
    launch_clusters(cross_entropy_gradient_cluster_kernel<T, kKind, kVec>,
                    dim3(static_cast<unsigned>(plan.blocks)), dim3(plan.threads), plan.cluster,
                    plan.smem_bytes(p.dtype), stream, p, Smoothing<Accum<T>>(p), plan.lanes,
                    plan.cluster);
  });
}

}  // namespace warpwright
