// TMA: copies of whole tiles between global and shared memory, described by a tensor map that the
// host built (host/tensor_map.h). One thread issues a copy. One PTX instruction per wrapper; its
// section of the PTX ISA manual is named above. Coordinates are in elements, innermost first.
// Elements outside of the tensor read as zero and are not written.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace warpwright {

// "prefetch: .tensormap".
__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(map) : "memory");
}

// "cp.async.bulk.prefetch": `bytes` contiguous bytes to L2. Both are multiples of 16.
__device__ __forceinline__ void prefetch_to_l2(const void* global, uint32_t bytes) {
  asm volatile(
      "cp.async.bulk.prefetch.L2.global [%0], %1;\n" ::"l"(__cvta_generic_to_global(global)),
      "r"(bytes)
      : "memory");
}

// "cp.async.bulk.tensor", global to shared. `barrier` of this CTA counts the bytes of the whole
// box, zeros included.
__device__ __forceinline__ void tma_load_2d(uint32_t shared, const CUtensorMap* map, int c0, int c1,
                                            uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];\n" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1)
      : "memory");
}

// The same of a four-dimensional tensor.
__device__ __forceinline__ void tma_load_4d(uint32_t shared, const CUtensorMap* map, int c0, int c1,
                                            int c2, int c3, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];\n" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// The same, .L2::cache_hint: a policy of device/evict_first.cuh.
__device__ __forceinline__ void tma_load_2d(uint32_t shared, const CUtensorMap* map, int c0, int c1,
                                            uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;\n" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "l"(policy)
      : "memory");
}

// The same, .multicast::cluster: to the same address in every CTA of `cta_mask`. Each CTA counts
// its copy on its own barrier at the address of `barrier`.
__device__ __forceinline__ void tma_load_multicast_2d(uint32_t shared, const CUtensorMap* map,
                                                      int c0, int c1, uint32_t barrier,
                                                      uint16_t cta_mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;\n" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "h"(cta_mask)
      : "memory");
}

// "cp.async.bulk.tensor", .im2col: loads a box of pixels of an NHWC image (TensorMapIm2col), each
// at the filter tap (tap_h, tap_w). (c, w, h, n) names the first pixel, within the map's corners.
// The following pixels run along the row, then down the rows, then through the images. `barrier`
// counts the bytes of the whole box, zeros of the padding included.
__device__ __forceinline__ void tma_load_im2col_4d(uint32_t shared, const CUtensorMap* map, int c,
                                                   int w, int h, int n, uint16_t tap_w,
                                                   uint16_t tap_h, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};\n" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(c), "r"(w), "r"(h), "r"(n), "h"(tap_w), "h"(tap_h)
      : "memory");
}

// "cp.async.bulk.tensor", shared to global, in the thread's open bulk group. After ordinary stores
// to the shared memory, the writers must call fence_proxy_async() and meet at a barrier first.
__device__ __forceinline__ void tma_store_2d(const CUtensorMap* map, int c0, int c1,
                                             uint32_t shared) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];\n" ::"l"(
          map),
      "r"(shared), "r"(c0), "r"(c1)
      : "memory");
}

// The same of a four-dimensional tensor.
__device__ __forceinline__ void tma_store_4d(const CUtensorMap* map, int c0, int c1, int c2, int c3,
                                             uint32_t shared) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], "
      "[%1];\n" ::"l"(map),
      "r"(shared), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// "cp.reduce.async.bulk.tensor", .add: the same, but adds to the values in memory. Several writers
// add in no fixed order, so their floating-point sums differ from run to run.
__device__ __forceinline__ void tma_reduce_add_2d(const CUtensorMap* map, int c0, int c1,
                                                  uint32_t shared) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group "
      "[%0, {%2, %3}], [%1];\n" ::"l"(map),
      "r"(shared), "r"(c0), "r"(c1)
      : "memory");
}

// "cp.async.bulk.commit_group".
__device__ __forceinline__ void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;\n" ::: "memory");
}

// "cp.async.bulk.wait_group", .read: waits until all but the thread's kPending newest groups have
// read their shared memory.
template <int kPending>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;\n" ::"n"(kPending) : "memory");
}
// The same, until they have written global memory.
template <int kPending>
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// "membar / fence: fence.proxy.async". Orders this thread's ordinary accesses to shared memory
// before later accesses by TMA and wgmma.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

}  // namespace warpwright
