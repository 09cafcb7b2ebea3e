// Rows that a cluster of blocks holds: each block reads and writes its part, and the parts' sums
// meet through distributed shared memory.
#include "device/sm90/arch.cuh"
#include "device/sm90/cluster.cuh"
#include "host/launch_cluster.h"
#include "ops/cross_entropy/cross_entropy_gradient.cuh"

namespace warpwright {
namespace {

constexpr int kLargestCluster = 8;

// Every block writes its sums into the inbox of each, so that nobody waits for a read. A row's sums
// travel while the next row is summed (lag 1), or at once (lag 0) where only one row fits.
template <class Acc>
struct Cluster {
  using Inbox = Acc[2][kLargestCluster][4];  // the sums of the blocks, of an even or an odd step

  int rank_, log2_size_, lag_;
  Inbox& inbox_;

  __device__ __forceinline__ int rank() const { return rank_; }
  __device__ __forceinline__ int log2_size() const { return log2_size_; }
  __device__ __forceinline__ int lag() const { return lag_; }

  // A block's shared memory can be written from outside once the block runs.
  __device__ __forceinline__ void begin() const {
    cluster_arrive();
    cluster_wait();
  }

  // The row's sums whose gradient is next. An inbox is written again two steps later, which is
  // after the barrier of the step between, and so after its reads here. The last wait is for the
  // last writes: a block may end then.
  template <class Sums>
  __device__ __forceinline__ Sums exchange(const Acc (*warp_sums)[4], int step, int steps) const {
    Sums sums;
    if (lag_ == 1 && step > 0) sums = receive<Sums>(step - 1);
    __syncthreads();
    if (step < steps) {
      if (threadIdx.x < kWarpSize) send(merge_warps<Sums>(warp_sums), step);
      cluster_arrive();
    }
    return lag_ == 1 ? sums : receive<Sums>(step);
  }

  template <class Sums>
  __device__ __forceinline__ void send(const Sums& sums, int step) const {
    if (threadIdx.x >= 1 << log2_size_) return;
    Acc part[4];
    sums.store(part);
    const uint32_t own =
        static_cast<uint32_t>(__cvta_generic_to_shared(&inbox_[step & 1][rank_][0]));
    const uint32_t mapped = map_to_cta(own, threadIdx.x);
#pragma unroll
    for (int i = 0; i < 4; ++i) store_cluster(mapped + i * sizeof(Acc), part[i]);
  }

  // The order of the ranks decides the order of the sum.
  template <class Sums>
  __device__ __forceinline__ Sums receive(int step) const {
    cluster_wait();
    const int from = threadIdx.x % kLargestCluster;
    Sums sums;
    if (from < 1 << log2_size_) sums.load(inbox_[step & 1][from]);
    return merge_lanes(sums, kLargestCluster);
  }
};

// See cross_entropy_gradient_rows(); 2^log2_size neighbouring blocks a row.
template <class T, TargetKind kKind, int kVec>
__global__ void __launch_bounds__(cross_entropy_team(sizeof(T), kKind), 1)
    cross_entropy_gradient_cluster_kernel(const CrossEntropyGradientParams p,
                                          const Smoothing<Accum<T>> smoothing, int lanes, int slots,
                                          int slot_vectors, int log2_size) {
  if constexpr (kHasSm90a) {
    using Team = Cluster<Accum<T>>;
    __shared__ typename Team::Inbox inbox;
    cross_entropy_gradient_rows<T, kKind, kVec>(
        p, smoothing, lanes, slots, slot_vectors,
        Team{static_cast<int>(cluster_cta_rank()), log2_size, slots > 1 ? 1 : 0, inbox});
  }
}

}  // namespace

int64_t launch_cross_entropy_gradient_cluster(const CrossEntropyGradientParams& p,
                                              const CrossEntropyGradientConfig& config,
                                              cudaStream_t stream) {
  int log2_size = 0;
  while (1 << log2_size < config.cluster) ++log2_size;
  int64_t blocks = config.blocks;
  for_gradient(p, config, [&]<class T, TargetKind kKind, int kVec>() {
    const auto kernel = cross_entropy_gradient_cluster_kernel<T, kKind, kVec>;
    const int64_t smem = config.smem_bytes(p.dtype);
    // A cluster more than there is room for would start when all others end.
    blocks = std::min(blocks, config.cluster * resident_clusters(kernel, dim3(config.threads),
                                                                 config.cluster, smem));
    launch_clusters(kernel, dim3(static_cast<unsigned>(blocks)), dim3(config.threads),
                    config.cluster, smem, stream, p, Smoothing<Accum<T>>(p), config.lanes,
                    config.slots, config.slot_accesses, log2_size);
  });
  return blocks / config.cluster;
}

}  // namespace warpwright
