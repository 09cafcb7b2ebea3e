// Philox4x32-7 counter-based random numbers (Salmon et al., SC 2011: 7 rounds pass BigCrush), the
// same on host and device. The dropout decision of an attention probability is a pure function of
// its position, so the backward computes it again and no mask is stored.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define WARPWRIGHT_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define WARPWRIGHT_HOST_DEVICE inline
#endif

namespace warpwright {

constexpr int kPhiloxRounds = 7;

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
  for (int round = 0; round < kPhiloxRounds; ++round) {
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

// The dropout parameters of a call. A 16-bit random number decides one probability, which is kept
// if the number is at least the probability times 2^16. `threshold` has this bound in its upper
// half.
struct DropoutKey {
  uint32_t key0, key1, offset;
  uint32_t threshold;

  // The tag separates this random stream from other users of the same generator seed.
  WARPWRIGHT_HOST_DEVICE DropoutKey(uint64_t seed, uint64_t call_offset, uint32_t threshold_)
      : key0(static_cast<uint32_t>(seed) ^ 0x61747465u),
        key1(static_cast<uint32_t>(seed >> 32) ^ static_cast<uint32_t>(call_offset >> 32)),
        offset(static_cast<uint32_t>(call_offset)),
        threshold(threshold_) {}

  // One draw decides eight probabilities of head `bh`: half x of word[2 * b + a] is for query row +
  // 8 * a and key col + 8 * b + x, where row % 16 < 8, col % 16 < 8 and col is even. One thread has
  // these eight in the accumulator of mma.m16n8, and each word is a pair of neighbours there.
  WARPWRIGHT_HOST_DEVICE Random4 draw(int64_t bh, int64_t row, int64_t col) const {
    return draw_numbered(bh, row / 16 * 8 + row % 8, col / 16 * 4 + col % 8 / 2);
  }
  // By the number of its rows, and of its keys, among those of the head's draws.
  WARPWRIGHT_HOST_DEVICE Random4 draw_numbered(int64_t bh, uint64_t row, uint64_t col) const {
    return philox4x32(key0, key1, static_cast<uint32_t>(col), static_cast<uint32_t>(row),
                      static_cast<uint32_t>(bh), offset);
  }

  // Half `x` of a word of the draw.
  WARPWRIGHT_HOST_DEVICE bool keeps(uint32_t word, int x) const {
    return (x == 0 ? word << 16 : word) >= threshold;
  }
};

// For code that handles single elements: draws eight decisions and uses one.
WARPWRIGHT_HOST_DEVICE bool dropout_keeps(const DropoutKey& key, int64_t bh, int64_t row,
                                          int64_t col) {
  const Random4 random = key.draw(bh, row, col);
  const bool low_row = row % 16 < 8, low_col = col % 16 < 8;
  const uint32_t low = low_row ? random.word[0] : random.word[1];
  const uint32_t high = low_row ? random.word[2] : random.word[3];
  return key.keeps(low_col ? low : high, static_cast<int>(col % 2));
}

// The probability in effect: a multiple of 2^-16, and 0 or 1 only if `p` is.
inline double dropout_probability(double p) {
  return p <= 0.0 || p >= 1.0 ? p : std::clamp(std::round(p * 65536.0), 1.0, 65535.0) / 65536.0;
}

inline uint32_t dropout_threshold(double p) {
  return static_cast<uint32_t>(std::min(dropout_probability(p) * 65536.0, 65535.0)) << 16;
}

// At p = 1 everything is dropped: the factor is 0, not infinity.
inline double dropout_keep_scale(double p) {
  return p < 1.0 ? 1.0 / (1.0 - dropout_probability(p)) : 0.0;
}

}  // namespace warpwright
