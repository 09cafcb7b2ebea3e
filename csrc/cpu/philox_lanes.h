// Philox4x32-7 for eight counters at once, for sixteen with AVX-512. The bits are those of
// philox4x32(); test_dropout.py has the reference for both. A function for the round that both call
// would change the GPU's code, so it stands twice.
#pragma once

#include <cstdint>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "common/philox.h"

namespace warpwright {
inline namespace CPU_CAPABILITY {  // cpu/capability.h

#ifdef CPU_CAPABILITY_AVX512
constexpr int kPhiloxLanes = 8;
#else
constexpr int kPhiloxLanes = 4;
#endif
// A word of as many counters, in the low half of a lane each. The high half holds any bits.
using PhiloxWords __attribute__((vector_size(8 * kPhiloxLanes))) = uint64_t;

// The 64-bit products of the low halves with a number.
inline PhiloxWords multiply_low_halves(PhiloxWords words, uint32_t multiplier) {
#if defined(CPU_CAPABILITY_AVX512)
  return (PhiloxWords)_mm512_mul_epu32((__m512i)words, _mm512_set1_epi64(multiplier));
#elif defined(__AVX2__)
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

// The words of two times kPhiloxLanes counters become random numbers. The two are independent,
// which hides the products' latency.
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

}  // namespace CPU_CAPABILITY
}  // namespace warpwright
