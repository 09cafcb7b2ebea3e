// Philox4x32-7 for eight counters at once. The bits are those of philox4x32(); test_dropout.py has
// the reference for both. A function for the round that both call would change the GPU's code, so
// it stands twice.
#pragma once

#include <cstdint>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "common/philox.h"

namespace warpwright {

// A word of four counters, in the low half of a lane each. The high half holds any bits.
using PhiloxWords __attribute__((vector_size(32))) = uint64_t;
constexpr int kPhiloxLanes = 4;

// The 64-bit products of the low halves with a number.
inline PhiloxWords multiply_low_halves(PhiloxWords words, uint32_t multiplier) {
#ifdef __AVX2__
  return (PhiloxWords)_mm256_mul_epu32((__m256i)words, _mm256_set1_epi64x(multiplier));
#else
  return (words & 0xffffffffu) * multiplier;
#endif
}

// The keys of all rounds, in every lane.
struct PhiloxKeys {
  PhiloxWords key[kPhiloxRounds][2];

  PhiloxKeys(uint32_t key0, uint32_t key1) {
    constexpr uint32_t kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;
    for (auto& round : key) {
      round[0] = PhiloxWords{} + key0;
      round[1] = PhiloxWords{} + key1;
      key0 += kWeyl0;
      key1 += kWeyl1;
    }
  }
};

// The words of two times four counters become random numbers. The two are independent, which hides
// the products' latency.
inline void philox_rounds(const PhiloxKeys& keys, PhiloxWords (&word)[4][2]) {
  constexpr uint32_t kMultiplier0 = 0xD2511F53u, kMultiplier1 = 0xCD9E8D57u;
#pragma GCC unroll 7
  for (int round = 0; round < kPhiloxRounds; ++round) {
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const PhiloxWords p0 = multiply_low_halves(word[0][i], kMultiplier0);
      const PhiloxWords p1 = multiply_low_halves(word[2][i], kMultiplier1);
      word[0][i] = (p1 >> 32) ^ word[1][i] ^ keys.key[round][0];
      word[1][i] = p1;
      word[2][i] = (p0 >> 32) ^ word[3][i] ^ keys.key[round][1];
      word[3][i] = p0;
    }
  }
}

}  // namespace warpwright
