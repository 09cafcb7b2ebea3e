// mbarrier: barriers in shared memory that count arrivals and the bytes of asynchronous copies.
// One PTX instruction per wrapper; its section of the PTX ISA manual is named above.
//
// A barrier completes its phase after the initialised number of arrivals and after every expected
// byte. It then starts the next phase by itself. A waiter names the phase by its parity: 0 for the
// first, 1 for the second, and so on. On a fresh barrier parity 1 counts as complete.
#pragma once

#include <cstdint>

namespace warpwright {

// "mbarrier.init".
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(arrivals)
               : "memory");
}

// "membar / fence: fence.mbarrier_init". Makes this thread's inits visible to the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}

// "mbarrier.arrive.expect_tx". One arrival, and `bytes` more bytes to wait for in this phase.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// "mbarrier.arrive".
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}

// "mbarrier.arrive" on a barrier of any CTA of the cluster (an address from map_to_cta). Releases
// at CTA scope only: .cluster would put a GPU-wide fence before every arrival. CTA scope is enough
// after reads by wgmma, which have ended when wgmma_wait returns.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t cluster_barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];\n" ::"r"(cluster_barrier) : "memory");
}

// "mbarrier.try_wait". Suspends the thread for a while; true once the phase is complete.
__device__ __forceinline__ bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
  uint32_t complete;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(complete)
      : "r"(barrier), "r"(parity)
      : "memory");
  return complete != 0;
}

__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  while (!mbarrier_try_wait(barrier, parity)) {
  }
}

}  // namespace warpwright
