// The kernel parameter that describes D of a product on sm_90a: its address and layout, and the
// bias and the activation that the epilogue applies (tile/epilogue_sm90.cuh).
#pragma once

#include <cstdint>

#include "device/activation.cuh"
#include "device/sm90/tma.cuh"

namespace warpwright {

struct OutputSm90 {
  CUtensorMap map;  // of d: boxes of 64 x 64; valid if use_tma
  CUtensorMap preactivation_map;
  void* d;              // (m, n), row-major, or its parts (splits, m, n)
  void* preactivation;  // like d: D before the activation; null: not wanted
  bool use_tma;         // rows of d and preactivation start at multiples of 16 bytes
  bool pairs;           // two neighbours from an even column on are one aligned access
  const void* bias;     // (n) of D's type or null
  bool bias_pairs;      // the same of the bias
  Activation activation;
  int64_t pitch;  // elements from a row to the next
  int m;
  int n;
  bool fp32;         // D is fp32, even if the operands have 16 bits
  bool accumulate;   // D += the product
  bool transposed;   // D, or each part, is (n, m), row-major; fp32 from 16-bit operands alone
  bool only_rounds;  // D is the rounded product, stored by TMA: store_boxes()

  __device__ __forceinline__ void prefetch() const {
    if (use_tma) prefetch_tensor_map(&map);
    if (use_tma && preactivation != nullptr) prefetch_tensor_map(&preactivation_map);
  }
};

}  // namespace warpwright
