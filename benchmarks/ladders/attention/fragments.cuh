// What rungs 4 and 5 share: a warp's 16 queries against 64 keys by mma.sync. In comments g = lane /
// 4 and t = lane % 4: a lane has columns 2t and 2t + 1 of rows g and g + 8 of every 16 x 8 block.
#pragma once

#include <cmath>

#include "device/mma_sm80.cuh"
#include "device/special_function.cuh"
#include "ladder.cuh"

namespace ladder {

constexpr int kKeys = 64;  // of a tile
// A row is 256 bytes and 16 of padding: the eight rows that ldmatrix reads at once meet in no bank.
constexpr int kPitch = kHead * 2 + 16;
constexpr int kTileBytes = kKeys * kPitch;

__device__ __forceinline__ uint32_t pair_of(float a, float b) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

struct WarpAttention {
  uint32_t q[kHead / 16][4];
  float out[kHead / 8][4] = {};
  float max[2] = {-INFINITY, -INFINITY};  // of rows g and g + 8, of scores times kScaleLog2
  float sum[2] = {};                      // of this lane's columns only

  // tile: the warp's 16 rows of queries in shared memory.
  __device__ void load_queries(uint32_t tile) {
    const int lane = threadIdx.x % 32;
    const uint32_t row = tile + lane % 16 * kPitch + lane / 16 * 16;
#pragma unroll
    for (int d = 0; d < kHead / 16; ++d) warpwright::ldmatrix_x4(q[d], row + d * 32);
  }

  // Takes a tile of keys and one of values.
  __device__ void attend(uint32_t keys, uint32_t values) {
    float s[kKeys / 8][4] = {};
    multiply_queries(keys, s);
    softmax(s);
    multiply_values(values, s);
  }

  __device__ void multiply_queries(uint32_t keys, float (&s)[kKeys / 8][4]) {
    const int lane = threadIdx.x % 32;
    const uint32_t row = keys + (lane / 16 * 8 + lane % 8) * kPitch + lane / 8 % 2 * 16;
#pragma unroll
    for (int d = 0; d < kHead / 16; ++d) {
#pragma unroll
      for (int j = 0; j < kKeys / 16; ++j) {
        uint32_t k[4];  // of two blocks of eight keys
        warpwright::ldmatrix_x4(k, row + j * 16 * kPitch + d * 32);
        warpwright::mma_m16n8k16(s[2 * j], q[d], {k[0], k[1]}, bf16());
        warpwright::mma_m16n8k16(s[2 * j + 1], q[d], {k[2], k[3]}, bf16());
      }
    }
  }

  // Scores become weights; out and sum so far are scaled to the new maximum.
  __device__ void softmax(float (&s)[kKeys / 8][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = max[half];
#pragma unroll
      for (auto& block : s) {
        top = fmaxf(top, kScaleLog2 * fmaxf(block[2 * half], block[2 * half + 1]));
      }
      top = fmaxf(top, __shfl_xor_sync(warpwright::kFullMask, top, 1));
      top = fmaxf(top, __shfl_xor_sync(warpwright::kFullMask, top, 2));
      const float scale = warpwright::ex2_approx(max[half] - top);
      max[half] = top;
      sum[half] *= scale;
#pragma unroll
      for (auto& block : s) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          block[i] = warpwright::ex2_approx(block[i] * kScaleLog2 - top);
          sum[half] += block[i];
        }
      }
#pragma unroll
      for (auto& block : out) {
        block[2 * half] *= scale;
        block[2 * half + 1] *= scale;
      }
    }
  }

  // A product's result lies in the lanes as the next product's left operand does: no exchange.
  __device__ void multiply_values(uint32_t values, const float (&s)[kKeys / 8][4]) {
    const int lane = threadIdx.x % 32;
    const uint32_t row = values + lane % 16 * kPitch + lane / 16 * 16;
#pragma unroll
    for (int j = 0; j < kKeys / 16; ++j) {
      const auto& left = s[2 * j];
      const auto& right = s[2 * j + 1];
      const uint32_t weights[4] = {pair_of(left[0], left[1]), pair_of(left[2], left[3]),
                                   pair_of(right[0], right[1]), pair_of(right[2], right[3])};
#pragma unroll
      for (int d = 0; d < kHead / 16; ++d) {
        uint32_t v[4];
        warpwright::ldmatrix_x4_trans(v, row + j * 16 * kPitch + d * 32);
        warpwright::mma_m16n8k16(out[2 * d], weights, {v[0], v[1]}, bf16());
        warpwright::mma_m16n8k16(out[2 * d + 1], weights, {v[2], v[3]}, bf16());
      }
    }
  }

  // to: the warp's first row of out.
  __device__ void store(bf16* to) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = sum[half];
      total += __shfl_xor_sync(warpwright::kFullMask, total, 1);
      total += __shfl_xor_sync(warpwright::kFullMask, total, 2);
      const float factor = 1 / total;
      bf16* row = to + (lane / 4 + 8 * half) * kHead + lane % 4 * 2;
#pragma unroll
      for (int d = 0; d < kHead / 8; ++d) {
        const float* v = out[d] + 2 * half;
        *reinterpret_cast<uint32_t*>(row + d * 8) = pair_of(v[0] * factor, v[1] * factor);
      }
    }
  }
};

}  // namespace ladder
