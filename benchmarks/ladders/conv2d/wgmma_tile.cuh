// The product of rungs 5 and 6: 128 pixels by 64 filters by wgmma, from a ring that TMA fills. A k
// tile is the 64 channels under one tap: 128 bytes, a row of the swizzle pattern.
#pragma once

#include "device/mma_sm80.cuh"
#include "device/sm90/mbarrier.cuh"
#include "device/sm90/tma.cuh"
#include "device/sm90/wgmma.cuh"
#include "host/tensor_map.h"
#include "ladder.cuh"

namespace ladder {

constexpr int kTilePixels = 128;
constexpr int kTileStages = 4;
constexpr int kTileThreads = 256;  // two warpgroups of 64 pixels
constexpr int kBytesX = kTilePixels * 128;
constexpr int kTileStageBytes = kBytesX + kChannels * 128;
constexpr int kTileSmemBytes = 1024 + kTileStages * (kTileStageBytes + 8);  // 1024: see `ring`

// `smem`: the block's dynamic memory. Adds the tile's products to `sum`, 64 x 64 per warpgroup.
__device__ __forceinline__ void multiply_tile(const CUtensorMap& windows,
                                              const CUtensorMap& filters, const Conv& c, char* smem,
                                              float (&sum)[32]) {
  using namespace warpwright;  // mbarrier_*, tma_*, wgmma_*
  // The swizzle repeats every 1024 bytes, so that is where the ring starts. Behind it the
  // mbarriers: full(tap) says that the bytes of a tap have landed in its stage.
  const uint32_t ring = (smem_address(smem) + 1023) & ~1023u;
  auto stage = [&](int tap) { return ring + tap % kTileStages * kTileStageBytes; };
  auto full = [&](int tap) { return ring + kTileStages * kTileStageBytes + tap % kTileStages * 8; };
  const Place at = place_of(c, blockIdx.x * kTilePixels);
  auto load = [&](int tap) {
    mbarrier_arrive_expect_tx(full(tap), kTileStageBytes);
    // 128 windows from this one on, each at the tap; TMA finds rows, images and the padding.
    tma_load_im2col_4d(stage(tap), &windows, 0, at.col - 1, at.row - 1, at.image,
                       static_cast<uint16_t>(tap % 3), static_cast<uint16_t>(tap / 3), full(tap));
    tma_load_4d(stage(tap) + kBytesX, &filters, 0, 0, tap, 0, full(tap));
  };
  if (threadIdx.x == 0) {
    for (int s = 0; s < kTileStages; ++s) mbarrier_init(full(s), 1);
    fence_mbarrier_init();
    fence_proxy_async();
    for (int tap = 0; tap < kTileStages; ++tap) load(tap);
  }
  __syncthreads();

  constexpr uint64_t kFields = wgmma_descriptor_fields(/*leading=*/0, /*stride=*/1024);
  for (int tap = 0; tap < kTaps; ++tap) {
    const uint64_t a = wgmma_descriptor(kFields, stage(tap) + threadIdx.x / 128 * 64 * 128);
    const uint64_t b = wgmma_descriptor(kFields, stage(tap) + kBytesX);
    mbarrier_wait(full(tap), tap / kTileStages % 2);
    wgmma_pin(sum);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {  // 16 channels, 32 bytes, 2 in the descriptor's unit
      wgmma<bf16, 0, 0>(sum, a + k * 2, b + k * 2, tap > 0 || k > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(sum);
    __syncthreads();  // both warpgroups have read the stage
    if (threadIdx.x == 0 && tap + kTileStages < kTaps) load(tap + kTileStages);
  }
}

inline CUtensorMap windows_map(const Conv& c) {
  const int64_t side = c.side;
  return warpwright::make_im2col_tensor_map({.dtype = warpwright::DType::kBFloat16,
                                             .round_to_tf32 = false,
                                             .pointer = c.x,
                                             .batch = c.images,
                                             .size = {side, side},
                                             .channels = kChannels,
                                             .windows = {side, side},
                                             .stride = {1, 1},
                                             .padding = {1, 1},
                                             .box_channels = kChannels,
                                             .box_pixels = kTilePixels});
}

// Boxes of all filters' 64 channels under one tap.
inline CUtensorMap filters_map(const Conv& c) {
  return warpwright::make_rows_tensor_map({.dtype = warpwright::DType::kBFloat16,
                                           .pointer = c.w,
                                           .cols = kChannels,
                                           .extent = {kChannels, kTaps, 1},
                                           .stride = {kFilter, kChannels, 0},
                                           .box_rows = kChannels});
}

}  // namespace ladder
