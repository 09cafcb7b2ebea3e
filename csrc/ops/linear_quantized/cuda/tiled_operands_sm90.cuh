// The codes of a stage as wgmma's A operands, for the kernel of tiles (tiled_sm90.cuh).
//   y: the rows of A are features. A lane of a fragment has, of each 32 k, eight neighbours, but as
//      an A operand two of each eight. The four lanes of a feature exchange pairs of codes.
//   dx: the rows of A are k. Warp w of a group takes word w of each lane of a fragment, which is 16
//       features by 16 k (two words of int8), and movmatrix transposes the codes, two per element.
//       Row g of A then is the k at 32 (w / 2) + 4 (w % 2) + 8 (g / 2) + g % 2, and row g + 8 two
//       more. int8: the k at ... + 2 (g % 2), and one more.
#pragma once

#include "device/math.cuh"
#include "device/movmatrix.cuh"
#include "ops/linear_quantized/cuda/operand.cuh"
#include "ops/linear_quantized/cuda/tiled_walk_sm90.cuh"

namespace warpwright {

// What a lane reads of a stage: the codes of its part of four A operands, and their scales and
// offsets. y: one per 32 k, of the features g and g + 8. dx: one per operand, of the features 2t
// and 2t + 1, and of 8 more.
template <int kBits, bool kGradient>
struct TiledCodes {
  static constexpr int kSets = kGradient ? 4 : 2;
  uint32_t words[4][kBits / 4];
  uint32_t scales[kSets][2], offsets[kSets][2];
};

// Four lanes t transpose a 4 x 4 matrix of pairs of codes: lane t has, of 32 k, the pairs from 8 t
// on, and receives pair t of every lane. int4: a pair of both features is the bytes 0 and 2 of a
// word, or 1 and 3. int8: a pair is a half of a word.
// kSelectors: of __byte_perm, that registers keep; with 2 the others follow by an exclusive or.
template <int kBits, int kSelectors>
struct QuadTranspose {
  static constexpr uint32_t kOtherPair = kBits == 4 ? 0x1111 : 0x2222, kOtherHalf = 0x2222;
  uint32_t mine, others, first, second;
  bool upper;

  __device__ __forceinline__ explicit QuadTranspose(int lane) : upper(lane % 4 >= 2) {
    const bool odd = lane % 2 != 0;
    constexpr uint32_t kMine = kBits == 4 ? 0x6420 : 0x5410;
    constexpr uint32_t kFirst = kBits == 4 ? 0x5140 : 0x5410, kOdd = kBits == 4 ? 0x1504 : 0x1054;
    // Hidden, else the compiler selects them again in every step.
    mine = keep_value(kMine ^ (odd ? kOtherPair : 0));
    first = keep_value((odd ? kOdd : kFirst) ^ (upper ? kOtherHalf : 0));
    others = keep_value(mine ^ kOtherPair);
    second = keep_value(first ^ kOtherHalf);
  }

  // The words of the first and of the second 16 k.
  __device__ __forceinline__ void operator()(uint32_t& a, uint32_t& b) const {
    const uint32_t kept = upper ? b : a, sent = upper ? a : b;
    const uint32_t received = __shfl_xor_sync(0xffffffffu, sent, 2);
    const uint32_t own = __byte_perm(kept, received, mine);
    const uint32_t given =
        __byte_perm(kept, received, kSelectors == 4 ? others : mine ^ kOtherPair);
    const uint32_t other = __shfl_xor_sync(0xffffffffu, given, 1);
    a = __byte_perm(own, other, first);
    b = __byte_perm(own, other, kSelectors == 4 ? second : first ^ kOtherHalf);
  }
};

template <class T, int kBits, bool kGradient, bool kZeros, int kGroups>
struct TiledWarp {
  using Cta = TiledCta<kBits, kGradient, kGroups>;
  using Codes = TiledCodes<kBits, kGradient>;
  static constexpr int kBlockBytes = Cta::kBlockBytes;
  int group, warp, lane;              // of the CTA, of the group, of the warp
  int codes_at, scales_at, zeros_at;  // of the lane's part, in a stage
  QuadTranspose<kBits, kGroups == 2 ? 4 : 2> transpose;

  __device__ __forceinline__ TiledWarp(const TiledMemory& memory, int thread)
      : group(thread / 128), warp(thread / 32 % 4), lane(thread % 32), transpose(lane) {
    int feature;
    if constexpr (kGradient) {
      codes_at =
          memory.codes + group / Cta::kBoxUnits * 4 * Cta::kBoxBytes +
          group % Cta::kBoxUnits * kBlockBytes + lane * 16 +
          (kBits == 8 ? warp / 2 * static_cast<int>(kFragmentBytes) + warp % 2 * 8 : warp * 4);
      feature = lane % 4 * 2;
    } else {
      const int block = group * 4 + warp;
      codes_at = memory.codes + lane * 16 + block * kBlockBytes;
      feature = block * 16 + lane / 4;
    }
    scales_at = feature * 2;
    zeros_at = memory.zeros + feature;
    lane = keep_value(lane);
    codes_at = keep_value(codes_at);
    scales_at = keep_value(scales_at);
    zeros_at = keep_value(zeros_at);
  }

  // `row`: of the scales, y: of the second 32 k, dx: of the warp's k.
  __device__ __forceinline__ Codes read(const char* stage, const char* scales, int row) const {
    Codes codes;
    if constexpr (kGradient) {
      read_k(stage + codes_at, scales + row * 128, row, codes);
    } else {
      read_features(stage + codes_at, scales, row, codes);
    }
    return codes;
  }

  // y: the warp's 16 features of 64 k.
  __device__ __forceinline__ void read_features(const char* at, const char* of_stage, int row,
                                                Codes& codes) const {
#pragma unroll
    for (int half = 0; half < kBits / 4; ++half) {
      const uint4 four = *reinterpret_cast<const uint4*>(at + half * kFragmentBytes);
      const uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int word = half * 4 + i;
        codes.words[word / (kBits / 4)][word % (kBits / 4)] = words[i];
      }
    }
#pragma unroll
    for (int q = 0; q < 4; q += 2) {
#pragma unroll
      for (int i = 0; i < kBits / 4; ++i) transpose(codes.words[q][i], codes.words[q + 1][i]);
    }
    if constexpr (kBits == 4) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const char* of_row = of_stage + c * row * Cta::kColumns * 2;
        const auto* scales = reinterpret_cast<const uint16_t*>(of_row + scales_at);
        const auto* zeros =
            reinterpret_cast<const uint8_t*>(of_stage + c * row * Cta::kColumns + zeros_at);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          codes.scales[c][i] = low_halves(scales[i * 8]);
          codes.offsets[c][i] = offset_pair<T>(kZeros ? zeros[i * 8] : 8);
        }
      }
    }
  }

  // dx: the warp's 16 k of 64 features.
  __device__ __forceinline__ void read_k(const char* at, const char* of_row, int row,
                                         Codes& codes) const {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const auto* words = reinterpret_cast<const uint32_t*>(at + q * Cta::kBoxBytes);
      codes.words[q][0] = words[0];
      if constexpr (kBits == 8) codes.words[q][1] = words[1];
    }
    const char* scales = of_row + scales_at;
    const char* zeros = of_row - row * 64 + zeros_at;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        codes.scales[q][pair] = *reinterpret_cast<const uint32_t*>(scales + q * 32 + pair * 16);
        codes.offsets[q][pair] = offset_pair<T>(8);
        if constexpr (kZeros) {
          const auto* two = reinterpret_cast<const uint16_t*>(zeros + q * 16 + pair * 8);
          codes.offsets[q][pair] = IntegerBits<T>::kBase | two_bytes_to_halves(*two);
        }
      }
    }
  }

  // Operand `q` of y: 16 features by 16 k, scaled unless int8's scale multiplies the sums.
  __device__ __forceinline__ void convert_features(uint32_t (&a)[4], const Codes& codes,
                                                   int q) const {
    if constexpr (kBits == 8) {
      int8_operand<T>(a, codes.words[q][0], codes.words[q][1]);
    } else {
      int4_operand<T>(a, codes.words[q][0], codes.offsets[q / 2][0], codes.offsets[q / 2][1]);
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = multiply_pair<T>(a[i], codes.scales[q / 2][i % 2]);
    }
  }

  // Operand `q` of dx: 16 k by 16 features. A transposed word has of two features, in its halves,
  // two k each (int4: also of the features 8 more).
  __device__ __forceinline__ void convert_k(uint32_t (&a)[4], const Codes& codes, int q) const {
    uint32_t turned = 0;
    if constexpr (kBits == 4) turned = transpose_8x8(codes.words[q][0]);
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      uint32_t of_k[2];
      if constexpr (kBits == 8) {
        int8_halves(of_k[0], of_k[1], transpose_8x8(codes.words[q][pair]), T());
      } else {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          of_k[k] = subtract_pair<T>(
              and_or(turned >> (4 * pair + 8 * k), 0x000f000fu, IntegerBits<T>::kBase),
              codes.offsets[q][pair]);
        }
      }
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        a[pair * 2 + k] = multiply_pair<T>(of_k[k], codes.scales[q][pair]);
      }
    }
  }

  __device__ __forceinline__ void convert(uint32_t (&a)[4], const Codes& codes, int q) const {
    if constexpr (kGradient) {
      convert_k(a, codes, q);
    } else {
      convert_features(a, codes, q);
    }
  }
};

}  // namespace warpwright
