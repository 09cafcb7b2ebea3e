// What brings the rows of a walk's wgrad (wgrad_sm90.cuh) to shared memory: rings of x and dy, the
// thread that loads, and in TF32 the warpgroup that transposes dy.
#pragma once

#include <type_traits>

#include "device/math.cuh"
#include "device/sm90/cluster.cuh"
#include "device/sm90/tma.cuh"
#include "ops/conv2d/cuda/row_walk/wgrad.h"
#include "tile/loaded_stage_sm90.cuh"
#include "tile/mn_major_tf32_sm90.cuh"
#include "tile/stage_ring_sm90.cuh"

namespace warpwright {

// T: bf16 or half with 64 channels, or float for TF32 with 32. kBlocks warpgroups multiply.
template <class T>
struct WalkGrad {
  static constexpr bool kTf32 = sizeof(T) == 4;
  static constexpr int kBlocks = kTf32 ? 2 : 3;
  static constexpr int kChunk = 128 / sizeof(T);  // channels or filters of a box
  static constexpr int kChannels = walk_grad_channels(kTf32);
  static constexpr int kBoxBytes = kWalkRun * 128;
  static constexpr int kLoadingWarpgroups = kTf32 ? 2 : 1;
  static constexpr int kThreads = 128 * (kLoadingWarpgroups + kBlocks);
  static constexpr int kConsumerWarps = 4 * kBlocks;

  // Per thread after setmaxnreg: of the warpgroup that loads, that transposes, of the others. Their
  // sum over the warpgroups is at most 512.
  static constexpr int kLoadRegisters = 32, kTransposeRegisters = 64;
  static constexpr int kSumRegisters = kTf32 ? 192 : 160;

  static constexpr int kBoxesX = kWalkTaps * kChannels / kChunk;  // of a stage: s, then channels
  static constexpr int kBoxesDy = kWalkFilters / kChunk;
  static constexpr int kStagesX = kTf32 ? 3 : 4;
  static constexpr int kStagesDy = kTf32 ? 5 : 7;  // three rows are in use
  // Copies of the first two stages after the last one: any three rows lie one after the other.
  static constexpr int kCopiesDy = kWalkTaps - 1;
  static constexpr int kStagesRaw = kTf32 ? 2 : 0;  // of dy before it is transposed
  static constexpr int kBytesX = kBoxesX * kBoxBytes, kBytesDy = kBoxesDy * kBoxBytes;
  static constexpr int kBarriers = kStagesX + kStagesDy + kStagesRaw;
  static constexpr int kSmemBytes =
      1024 + kStagesX * kBytesX + (kStagesDy + kCopiesDy + kStagesRaw) * kBytesDy + kBarriers * 16;

  using RingX = StageRing<kStagesX>;
  using RingDy = StageRing<kStagesDy>;
  using RingRaw = StageRing<kTf32 ? kStagesRaw : 1>;

  // Shared memory at a multiple of 1024: stages of x, of dy, of raw dy, barriers. In TF32 a row of
  // dy has two boxes of 32 pixels by 64 filters. Boxes of the same pixels lie side by side, so
  // neighbouring stages are one operand of 128 or 192 columns.
  uint32_t base;

  __device__ __forceinline__ uint32_t x(int stage) const { return base + stage * kBytesX; }
  __device__ __forceinline__ uint32_t dy(int stage, int box = 0) const {
    return x(kStagesX) + (box * (kStagesDy + kCopiesDy) + stage) * kBoxBytes;
  }
  __device__ __forceinline__ uint32_t raw(int stage) const {
    return dy(0, kBoxesDy) + stage * kBytesDy;
  }
  __device__ __forceinline__ RingX ring_x() const { return {raw(kStagesRaw)}; }
  __device__ __forceinline__ RingDy ring_dy() const {
    return {ring_x().barriers + RingX::kBarrierBytes};
  }
  __device__ __forceinline__ RingRaw ring_raw() const {
    return {ring_dy().barriers + RingDy::kBarrierBytes};
  }

  // One thread.
  __device__ __forceinline__ void init() const {
    ring_x().init(kConsumerWarps);
    if constexpr (kTf32) {
      ring_raw().init(/*releases=*/4);
      for (int i = 0; i < kStagesDy; ++i) {
        mbarrier_init(ring_dy().full(i), 4);  // warps that transpose
        mbarrier_init(ring_dy().empty(i), kConsumerWarps);
      }
    } else {
      ring_dy().init(kConsumerWarps);
    }
    fence_mbarrier_init();
  }

  // All threads. Pixels past a run are zero: no box covers them.
  __device__ __forceinline__ void clear() const {
    const auto vectors = static_cast<int>(ring_x().barriers - base) / 16;
    for (int i = threadIdx.x; i < vectors; i += kThreads) {
      store_shared_u128(base + i * 16, uint4{0, 0, 0, 0});
    }
    fence_proxy_async();
  }
};

// A walk: a strip, and rows of dy from `first_row` to before `end_row`. In the ring of dy two rows
// of zeros come before and after them.
struct WalkGradUnit {
  int first_segment, first_row, end_row;

  __device__ WalkGradUnit(const WalkGradShape& w, int unit)
      : first_segment(unit / w.row_parts * w.strip_segments),
        first_row(unit % w.row_parts * w.part_rows),
        end_row(min(first_row + w.part_rows, w.p)) {}

  __device__ bool has_dy(int row) const { return row >= first_row && row < end_row; }
  // Steps are numbered by the row of dy that is the newest.
  __device__ int end_step() const { return end_row + kWalkTaps - 1; }
  __device__ static bool has_x(const WalkGradShape& w, int step) {
    return step >= w.pad_h && step - w.pad_h < w.height;
  }
};

// One thread. A step's row of dy, then its row of x, each column of the window by itself.
template <class T>
__device__ __forceinline__ void load_walk_gradients(const WalkGrad<T>& memory,
                                                    const CUtensorMap* map_x,
                                                    const CUtensorMap* map_dy,
                                                    const WalkGradShape& w, int first_filter,
                                                    int first_channel, int first, int stride) {
  using Memory = WalkGrad<T>;
  typename Memory::RingX::Cursor at_x;
  std::conditional_t<Memory::kTf32, typename Memory::RingRaw, typename Memory::RingDy> ring_dy{0};
  if constexpr (Memory::kTf32) {
    ring_dy = memory.ring_raw();
  } else {
    ring_dy = memory.ring_dy();
  }
  typename decltype(ring_dy)::Cursor at_dy;
  const int column_bytes = w.part_columns * 128;  // of a segment in a box
  for (int i = first; i < w.units(); i += stride) {
    const WalkGradUnit unit(w, i);
    // f(place in a box, image, first column). Images past the batch read as zero.
    auto for_segments = [&](auto&& f) {
      int image = unit.first_segment / w.parts, part = unit.first_segment % w.parts;
      for (int b = 0; b < w.strip_segments; ++b) {
        f(b * column_bytes, image, part * w.part_columns);
        if (++part == w.parts) part = 0, ++image;
      }
    };
    for (int t = unit.first_row - (kWalkTaps - 1); t < unit.end_step(); ++t) {
      const uint32_t stage = Memory::kTf32 ? memory.raw(at_dy.stage) : memory.dy(at_dy.stage);
      const bool copies = !Memory::kTf32 && at_dy.stage < Memory::kCopiesDy;
      ring_dy.wait_empty(at_dy);
      ring_dy.expect(at_dy, (copies ? 2 : 1) * Memory::kBoxesDy * w.run() * 128);
      for_segments([&](int place, int image, int column) {
        const int from = unit.has_dy(t) ? image : w.images;
        for (int box = 0; box < Memory::kBoxesDy; ++box) {
          auto load = [&](uint32_t to) {
            tma_load_4d(to + box * Memory::kBoxBytes + place, map_dy,
                        first_filter + box * Memory::kChunk, column, t, from,
                        ring_dy.full(at_dy.stage));
          };
          load(stage);
          if (copies) load(stage + Memory::kStagesDy * Memory::kBoxBytes);
        }
      });
      at_dy.next();
      if (t < unit.first_row || !unit.has_x(w, t)) continue;
      memory.ring_x().wait_empty(at_x);
      memory.ring_x().expect(at_x, Memory::kBoxesX * w.run() * 128);
      for_segments([&](int place, int image, int column) {
        constexpr int kChunks = Memory::kChannels / Memory::kChunk;
        for (int box = 0; box < Memory::kBoxesX; ++box) {
          tma_load_4d(memory.x(at_x.stage) + box * Memory::kBoxBytes + place, map_x,
                      first_channel + box % kChunks * Memory::kChunk,
                      column + box / kChunks - w.pad_w, t - w.pad_h, image,
                      memory.ring_x().full(at_x.stage));
        }
      });
      at_x.next();
    }
  }
}

// TF32, one warpgroup: transposes each row of dy, from boxes of 64 pixels by 32 filters to K-major
// boxes of 32 pixels by 64 filters. A warp has a block of 32 x 32.
template <class Memory>
__device__ __forceinline__ void transpose_walk_gradients(const Memory& memory,
                                                         const WalkGradShape& w, int first,
                                                         int stride) {
  constexpr int kBlockBytes = 32 * 128;
  BoxTransposer transposer;
  const int warp = static_cast<int>(threadIdx.x % 128 / 32), pixels = warp / 2, filters = warp % 2;
  const uint32_t from = filters * Memory::kBoxBytes + pixels * kBlockBytes;
  typename Memory::RingRaw::Cursor at_raw;
  typename Memory::RingDy::Cursor at_dy;
  for (int i = first; i < w.units(); i += stride) {
    const WalkGradUnit unit(w, i);
#pragma unroll 1
    for (int row = unit.first_row - (kWalkTaps - 1); row < unit.end_step(); ++row) {
      memory.ring_raw().wait_full(at_raw);
      memory.ring_dy().wait_empty(at_dy);
      const uint32_t source = memory.raw(at_raw.stage) + from;
      const uint32_t move = memory.dy(at_dy.stage, pixels) + filters * kBlockBytes - source;
      const bool copies = at_dy.stage < Memory::kCopiesDy;
      transposer.transpose(source, [&](uint32_t address, const uint4& value) {
        store_shared_u128(address + move, value);
        if (copies) {
          store_shared_u128(address + move + Memory::kStagesDy * Memory::kBoxBytes, value);
        }
      });
      release_loaded(memory.ring_raw(), at_raw);  // its fence also makes the stores wgmma's
      if (threadIdx.x % 32 == 0) mbarrier_arrive(memory.ring_dy().full(at_dy.stage));
      at_raw.next();
      at_dy.next();
    }
  }
}

}  // namespace warpwright
