// The random numbers that decide which probabilities of an accumulator are dropped, the same for
// every kernel and both orientations.
#pragma once

#include "ops/attention/cuda/common.cuh"

namespace warpwright {

// The random words of this thread's part of the 16 x 16 square at (row0, col0), multiples of 16.
// Half x of words[2 * n + y] decides element (n, 2 * y + x), which is acc[.][2 * pair + n][2 * y +
// x] of mma.m16n8. kTransposed: rows are keys.
//
// A draw has two neighbouring keys. Transposed, those are rows of two threads: lane / 4 is even in
// one and odd in the other. Each draws for one of its two queries, and they exchange the words.
template <bool kTransposed>
__device__ __forceinline__ void draw_square(uint32_t (&words)[4], const DropoutKey& key, int64_t bh,
                                            uint64_t row0, uint64_t col0) {
  const uint32_t g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
  if constexpr (!kTransposed) {
    const Random4 random = key.draw_numbered(bh, row0 / 2 + g, col0 / 4 + t);
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = random.word[i];
  } else {
    const bool odd = g % 2 != 0;
    const Random4 random = key.draw_numbered(bh, col0 / 2 + 2 * t + g % 2, row0 / 4 + g / 2);
    // Even: its own low half, then the other's. Odd: the other's high half, then its own.
    const uint32_t halves = odd ? 0x3276 : 0x5410;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t other = __shfl_xor_sync(kFullMask, random.word[i], 4);
      words[i % 2 * 2 + i / 2] = __byte_perm(random.word[i], other, halves);
    }
  }
}

// Calls drop(n, e) for each dropped element of the square.
template <bool kTransposed, class Drop>
__device__ __forceinline__ void for_dropped(const DropoutKey& key, int64_t bh, uint64_t row0,
                                            uint64_t col0, Drop&& drop) {
  uint32_t words[4];
  draw_square<kTransposed>(words, key, bh, row0, col0);
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (!key.keeps(words[i / 2], i % 2)) drop(i / 4, i % 4);
}

}  // namespace warpwright
