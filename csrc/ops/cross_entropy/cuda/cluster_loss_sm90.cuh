// The loss of a grid that is one cluster of sm_90. Its blocks' sums meet in distributed shared
// memory, which saves a second launch that would read them from memory.
#pragma once

#include "device/mma_sm80.cuh"
#include "device/sm90/arch.cuh"
#include "device/sm90/cluster.cuh"
#include "ops/cross_entropy/cuda/row_sums.cuh"

namespace warpwright {

// As finish_block(), for all blocks of the cluster.
template <class T>
__device__ __forceinline__ void finish_cluster(const CrossEntropyParams& p,
                                               LossShare<Accum<T>> share, Accum<T>* shared) {
  if constexpr (kHasSm90a) {
    using Acc = Accum<T>;
    __shared__ Acc own[2];
    share.loss = block_reduce(share.loss, Sum{}, Acc(0), shared);
    share.weight = block_reduce(share.weight, Sum{}, Acc(0), shared);
    if (threadIdx.x == 0) {
      own[0] = share.loss;
      own[1] = share.weight;
    }
    cluster_arrive();
    cluster_wait();
    double loss = 0, weight = 0;
    if (blockIdx.x == 0 && threadIdx.x < gridDim.x) {
      const uint32_t block = map_to_cta(smem_address(own), threadIdx.x);
      loss = load_cluster(block, Acc());
      weight = load_cluster(block + sizeof(Acc), Acc());
    }
    cluster_arrive();  // keeps a block's shared memory alive until the others have read it
    cluster_wait();
    loss = warp_reduce(loss, Sum{});
    weight = warp_reduce(weight, Sum{});
    if (blockIdx.x == 0 && threadIdx.x == 0) write_reduced<T>(p, loss, weight);
  } else {
    __trap();  // CrossEntropyPlan::cluster was set without clusters
  }
}

}  // namespace warpwright
