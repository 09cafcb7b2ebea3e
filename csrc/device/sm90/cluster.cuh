// Clusters, register redistribution, and moves between registers and shared memory
// that tiles need on sm_90. One PTX instruction per wrapper; its section of the PTX ISA manual is
// named above.
#pragma once

#include <cstdint>

#include "device/named_barrier.cuh"

namespace warpwright {

// "Special Registers: %cluster_ctarank".
__device__ __forceinline__ uint32_t cluster_cta_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
  return rank;
}

// "mapa". Maps a shared-memory address of this CTA to the same address in CTA `rank` of the
// cluster.
__device__ __forceinline__ uint32_t map_to_cta(uint32_t shared, uint32_t rank) {
  uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(mapped) : "r"(shared), "r"(rank));
  return mapped;
}

// "ld". Loads a number from any CTA of the cluster (an address from map_to_cta).
__device__ __forceinline__ float load_cluster(uint32_t mapped, float) {
  float value;
  asm volatile("ld.shared::cluster.f32 %0, [%1];\n" : "=f"(value) : "r"(mapped) : "memory");
  return value;
}
__device__ __forceinline__ double load_cluster(uint32_t mapped, double) {
  double value;
  asm volatile("ld.shared::cluster.f64 %0, [%1];\n" : "=d"(value) : "r"(mapped) : "memory");
  return value;
}

// The same, 16 bytes. The address is a multiple of 16.
__device__ __forceinline__ float4 load_cluster_f32x4(uint32_t mapped) {
  float4 value;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];\n"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(mapped)
               : "memory");
  return value;
}

// "barrier.cluster". Every thread of the cluster arrives and waits; warps need not be converged.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release;\n" ::: "memory");
}
// The same without .release, which would wait until other SMs see all of the thread's writes. For
// mbarrier inits, which fence_mbarrier_init() makes visible.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed;\n" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire;\n" ::: "memory");
}

// "setmaxnreg". All warps of the warpgroup must call it. The launch has capped the block's
// registers.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

// "stmatrix". Lane l gives the address of the 16-byte row l % 8 of the 8x8 matrix (of 16-bit
// elements) l / 8; d[i] is the pair at row l / 4, columns 2 (l % 4) and 2 (l % 4) + 1, of matrix i.
__device__ __forceinline__ void stmatrix_x4(uint32_t row_address, const uint32_t (&d)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(row_address),
      "r"(d[0]), "r"(d[1]), "r"(d[2]), "r"(d[3])
      : "memory");
}

// The same, ".trans": d[i] is the pair at columns 2 (l % 4) and 2 (l % 4) + 1 as rows, l / 4 as the
// column.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t row_address, const uint32_t (&d)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(row_address),
      "r"(d[0]), "r"(d[1]), "r"(d[2]), "r"(d[3])
      : "memory");
}

// "ld.shared".
__device__ __forceinline__ uint16_t load_shared_u16(uint32_t shared) {
  uint16_t value;
  asm volatile("ld.shared.u16 %0, [%1];\n" : "=h"(value) : "r"(shared) : "memory");
  return value;
}
__device__ __forceinline__ uint32_t load_shared_u32(uint32_t shared) {
  uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];\n" : "=r"(value) : "r"(shared) : "memory");
  return value;
}
__device__ __forceinline__ uint2 load_shared_u64(uint32_t shared) {
  uint2 value;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];\n"
               : "=r"(value.x), "=r"(value.y)
               : "r"(shared)
               : "memory");
  return value;
}
__device__ __forceinline__ uint4 load_shared_u128(uint32_t shared) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(shared)
               : "memory");
  return value;
}

// "st.shared".
__device__ __forceinline__ void store_shared_u32(uint32_t shared, uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;\n" ::"r"(shared), "r"(value) : "memory");
}
__device__ __forceinline__ void store_shared_u64(uint32_t shared, uint32_t x, uint32_t y) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};\n" ::"r"(shared), "r"(x), "r"(y) : "memory");
}
__device__ __forceinline__ void store_shared_f32x4(uint32_t shared, float x, float y, float z,
                                                   float w) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"r"(shared), "f"(x), "f"(y), "f"(z),
               "f"(w)
               : "memory");
}
__device__ __forceinline__ void store_shared_u128(uint32_t shared, const uint4& value) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};\n" ::"r"(shared), "r"(value.x),
               "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}

}  // namespace warpwright
