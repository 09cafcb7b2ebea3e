// The product of rungs 3 and 4: 128 pixels by 64 filters by mma.sync, with the ring of cp.async and
// the padded rows of the matrix product's rung 6. A k tile is the 64 channels under one tap.
#pragma once

#include "device/mma_sm80.cuh"
#include "ladder.cuh"

namespace ladder {

constexpr int kTilePixels = 128;
constexpr int kTileStages = 3;
constexpr int kTileThreads = 128;              // 4 warps of 32 pixels by 64 filters
constexpr int kPitch = kChannels * 2 + 16;     // bytes of a row, with 16 against bank conflicts
constexpr int kBytesX = kTilePixels * kPitch;  // of a stage
constexpr int kTileStageBytes = kBytesX + kChannels * kPitch;
constexpr int kTileSmemBytes = kTileStages * kTileStageBytes;

// load(shared, row, piece, tap): starts the copy of 16 bytes, 8 channels, of a pixel's window.
template <class Load>
__device__ __forceinline__ void multiply_tile(const Conv& c, char* smem, const Load& load) {
  using namespace warpwright;  // cp_async, ldmatrix_x4, mma_m16n8k16
  const uint32_t ring = smem_address(smem);
  const int piece = threadIdx.x % 8;  // 8 lanes copy one row
  auto copy = [&](int tap) {
    if (tap < kTaps) {
      const uint32_t stage = ring + tap % kTileStages * kTileStageBytes;
#pragma unroll
      for (int i = 0; i < kTilePixels / 16; ++i) {
        const int row = threadIdx.x / 8 + i * 16;
        load(stage + row * kPitch + piece * 16, i, piece, tap);
      }
#pragma unroll
      for (int i = 0; i < kChannels / 16; ++i) {
        const int k = threadIdx.x / 8 + i * 16;
        cp_async<16>(stage + kBytesX + k * kPitch + piece * 16,
                     c.w + k * kFilter + tap * kChannels + piece * 8);
      }
    }
    cp_async_commit();  // an empty group keeps the count of groups that of the taps
  };

  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 32;
  // The rows whose addresses this lane hands to ldmatrix, as in the matrix product's rung 6.
  const int lane_x = (warp_row + lane % 16) * kPitch + lane / 16 * 16;
  const int lane_w = (lane / 16 * 8 + lane % 8) * kPitch + lane / 8 % 2 * 16;
  float sum[2][8][4] = {};  // 16 x 8 blocks
  for (int tap = 0; tap < kTileStages - 1; ++tap) copy(tap);
  for (int tap = 0; tap < kTaps; ++tap) {
    cp_async_wait<kTileStages - 2>();
    __syncthreads();
    copy(tap + kTileStages - 1);
    const uint32_t sX = ring + tap % kTileStages * kTileStageBytes + lane_x;
    const uint32_t sW = ring + tap % kTileStages * kTileStageBytes + kBytesX + lane_w;
#pragma unroll
    for (int k = 0; k < kChannels * 2; k += 32) {  // bytes: 16 elements
      uint32_t rX[2][4], rW[4][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) ldmatrix_x4(rX[i], sX + i * 16 * kPitch + k);
#pragma unroll
      for (int j = 0; j < 4; ++j) ldmatrix_x4(rW[j], sW + j * 16 * kPitch + k);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const uint32_t pair[2] = {rW[j / 2][j % 2 * 2], rW[j / 2][j % 2 * 2 + 1]};
          mma_m16n8k16(sum[i][j], rX[i], pair, bf16());
        }
      }
    }
  }
  const int pixel = blockIdx.x * kTilePixels + warp_row + lane / 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      store_fragment(c, sum[i][j], pixel + i * 16, j * 8 + lane % 4 * 2);
    }
  }
}

}  // namespace ladder
