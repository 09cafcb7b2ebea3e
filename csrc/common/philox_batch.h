// Philox4x32-7 for many counters at once on the CPU: a lane per counter, so that the compiler
// vectorizes the rounds. The bits are those of philox4x32(); test_dropout.py has the reference for
// both. A function for the round that both call would change the GPU's code, so it stands twice.
#pragma once

#include <cstdint>

#include "common/philox.h"

namespace warpwright {

// Word i of lane l is word[i][l]; before the rounds the counters, after them the random numbers.
template <int kLanes>
struct PhiloxBatch {
  uint32_t word[4][kLanes];

  void run(uint32_t key0, uint32_t key1) {
    constexpr uint32_t kMultiplier0 = 0xD2511F53u, kMultiplier1 = 0xCD9E8D57u;
    constexpr uint32_t kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;
    for (int round = 0; round < kPhiloxRounds; ++round) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const uint64_t p0 = static_cast<uint64_t>(kMultiplier0) * word[0][lane];
        const uint64_t p1 = static_cast<uint64_t>(kMultiplier1) * word[2][lane];
        word[0][lane] = static_cast<uint32_t>(p1 >> 32) ^ word[1][lane] ^ key0;
        word[1][lane] = static_cast<uint32_t>(p1);
        word[2][lane] = static_cast<uint32_t>(p0 >> 32) ^ word[3][lane] ^ key1;
        word[3][lane] = static_cast<uint32_t>(p0);
      }
      key0 += kWeyl0;
      key1 += kWeyl1;
    }
  }
};

}  // namespace warpwright
