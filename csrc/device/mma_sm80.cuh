// cp.async, ldmatrix and mma.sync: one PTX instruction per wrapper (sm_80 and later).
// The section of the PTX ISA manual is named above each. All lanes of the warp call ldmatrix_* and
// mma_* together. In the fragment comments g = lane / 4 and t = lane % 4.
#pragma once

#include <cstdint>

#include "device/types.cuh"

namespace warpwright {

// The 32-bit shared-memory address that the instructions below take.
__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// "Data Movement and Conversion Instructions: cp.async". Writes kBytes to shared memory: the first
// `source_bytes` from `global`, zeros for the rest. 0 source bytes never touch `global`. Both
// addresses are multiples of kBytes.
template <int kBytes>
__device__ __forceinline__ void cp_async(uint32_t shared, const void* global,
                                         int source_bytes = kBytes) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "cp.async moves 4, 8 or 16 bytes");
  if constexpr (kBytes == 16) {
    // .cg bypasses L1: a CTA reads each tile once.
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(shared),
                 "l"(global), "r"(source_bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;\n" ::"r"(shared), "l"(global),
                 "n"(kBytes), "r"(source_bytes)
                 : "memory");
  }
}

// "cp.async.commit_group".
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}

// "cp.async.wait_group": waits until all but this thread's kPending newest groups have arrived.
// Other threads see the data only after a barrier.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// "Warp-level matrix load instruction: ldmatrix". Lane l gives the 16-byte row l % 8 of
// the 8x8 matrix (of 16-bit elements) l / 8; d[i] is the pair at row g, columns 2t and 2t + 1 of
// matrix i. Rows of four 32-bit words work alike: d[i] is the word at row g, column t.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&d)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(row_address)
               : "memory");
}

// Transposed: d[i] is the pair at rows 2t and 2t + 1, column g of matrix i as stored.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&d)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(row_address)
               : "memory");
}

// "Multiply-and-Accumulate Instruction: mma", m16n8k16, .bf16 and .f16:
//   a[0..3]: pairs k = 2t, 2t + 1 of rows g, g + 8, then k = 2t + 8, 2t + 9 of rows g, g + 8
//   b[0..1]: pairs k = 2t, 2t + 1 and k = 2t + 8, 2t + 9 of column g
//   d[0..3]: (row g, columns 2t, 2t + 1), (row g + 8, columns 2t, 2t + 1)
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4],
                                             const uint32_t (&b)[2], bf16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4],
                                             const uint32_t (&b)[2], half) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Same section, m16n8k8, .bf16 and .f16: a[0..1]: pair k = 2t, 2t + 1 of rows g, g + 8;
//   b: the same pair of column g;  d as above.
__device__ __forceinline__ void mma_m16n8k8(float (&d)[4], const uint32_t (&a)[2], uint32_t b,
                                            bf16) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b));
}

__device__ __forceinline__ void mma_m16n8k8(float (&d)[4], const uint32_t (&a)[2], uint32_t b,
                                            half) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b));
}

// Same section, m16n8k8, .tf32 (operands rounded by to_tf32 first):
//   a[0..3]: k = t of rows g, g + 8, then k = t + 4 of rows g, g + 8;  b[0..1]: k = t, t + 4 of
//   column g;  d as above.
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4],
                                                 const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// "cvt": fp32 bits to TF32 bits, nearest, ties away. The tensor core would truncate.
__device__ __forceinline__ uint32_t to_tf32(uint32_t fp32_bits) {
  uint32_t d;
  asm("cvt.rna.tf32.f32 %0, %1;\n" : "=r"(d) : "f"(__uint_as_float(fp32_bits)));
  return d;
}

}  // namespace warpwright
