// wgmma's descriptor of an operand without swizzle.
#pragma once

#include <cstdint>

namespace warpwright {

// "Matrix Descriptor Format", as wgmma_descriptor_fields() of wgmma.cuh, swizzle 0. The operand
// consists of 8x8 matrices of 16-bit elements, each 8 rows of 16 bytes one after the other; the
// matrices may overlap.
//   K-major:  a row is 8 elements of k. `leading`: from a matrix to the next 8 k; `stride`: to the
//             next 8 of M or N.
//   MN-major: a row is 8 elements of M or N. `leading`: to the next 8 k; `stride`: to the next 8 of
//             M or N.
constexpr uint64_t plain_descriptor_fields(uint32_t leading_bytes, uint32_t stride_bytes) {
  return uint64_t{leading_bytes >> 4} << 16 | uint64_t{stride_bytes >> 4} << 32;
}

}  // namespace warpwright
