// Philox4x32-10 counter-based random numbers (Salmon et al., SC 2011), the same on host and device,
// and the dropout decision of one attention probability: a pure function of its position, so that
// the backward pass replays the forward's without storing a mask.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define WARPWRIGHT_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define WARPWRIGHT_HOST_DEVICE inline
#endif

namespace warpwright {

struct Random4 {
  uint32_t word[4];
};

WARPWRIGHT_HOST_DEVICE Random4 philox4x32(uint32_t key0, uint32_t key1, uint32_t c0, uint32_t c1,
                                          uint32_t c2, uint32_t c3) {
  constexpr uint32_t kMultiplier0 = 0xD2511F53u, kMultiplier1 = 0xCD9E8D57u;
  constexpr uint32_t kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;
#ifdef __CUDACC__
#pragma unroll
#endif
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(kMultiplier0) * c0;
    const uint64_t p1 = static_cast<uint64_t>(kMultiplier1) * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ key0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ key1;
    c3 = static_cast<uint32_t>(p0);
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  return {{c0, c1, c2, c3}};
}

// The dropout parameters of a call: `threshold` = dropout_p * 2^32, saturated.
struct DropoutKey {
  uint32_t key0, key1, offset;
  uint32_t threshold;

  // The tag separates this random stream from other users of the same generator seed.
  WARPWRIGHT_HOST_DEVICE DropoutKey(uint64_t seed, uint64_t call_offset, uint32_t threshold_)
      : key0(static_cast<uint32_t>(seed) ^ 0x61747465u),
        key1(static_cast<uint32_t>(seed >> 32) ^ static_cast<uint32_t>(call_offset >> 32)),
        offset(static_cast<uint32_t>(call_offset)),
        threshold(threshold_) {}

  // One draw decides four probabilities of head `bh`: word[2 * a + b] is for (row + 8 * a, col + 8
  // * b), where row % 16 < 8 and col % 16 < 8. This square matches the accumulator fragments of
  // mma.m16n8, of S and of its transpose.
  WARPWRIGHT_HOST_DEVICE Random4 draw(int64_t bh, int64_t row, int64_t col) const {
    return philox4x32(key0, key1, static_cast<uint32_t>(col / 16 * 8 + col % 8),
                      static_cast<uint32_t>(row / 16 * 8 + row % 8), static_cast<uint32_t>(bh),
                      offset);
  }

  WARPWRIGHT_HOST_DEVICE bool keeps(const Random4& random, int a, int b) const {
    return random.word[2 * a + b] >= threshold;
  }
};

// For code that handles single elements: draws four decisions and uses one.
WARPWRIGHT_HOST_DEVICE bool dropout_keeps(const DropoutKey& key, int64_t bh, int64_t row,
                                          int64_t col) {
  return key.keeps(key.draw(bh, row, col), static_cast<int>(row % 16 / 8),
                   static_cast<int>(col % 16 / 8));
}

inline uint32_t dropout_threshold(double p) {
  const double scaled = p * 4294967296.0;
  return scaled >= 4294967295.0 ? 0xffffffffu : static_cast<uint32_t>(scaled);
}

// At p = 1 everything is dropped: the factor is 0, not infinity.
inline double dropout_keep_scale(double p) { return p < 1.0 ? 1.0 / (1.0 - p) : 0.0; }

}  // namespace warpwright
