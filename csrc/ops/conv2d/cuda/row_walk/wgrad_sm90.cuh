// wgrad of a 3x3 window with stride 1 on sm_90a: a CTA walks down rows of x and dy.
//
// dw^T is a product over pixels. Its rows are pairs (column s of the window, channel), its columns
// filters. One warpgroup has 64 rows, and three sets of sums, one per row r of the window:
//
//   sums[r] += x(row t)^T dy(row t - r)      in step t; x is shifted by the window's column
//
// A row of dy stays in its ring for three steps. x^T goes through registers, because wgmma takes A
// from there in any order: a fragment serves all three rows of the window. dy is B. In TF32 wgmma
// reads B along pixels only, so a warpgroup transposes dy.
//
// Each CTA leaves its sums; a second kernel adds them in order.
// Bound: the tensor cores, and the bytes of x from L2, which come once per column of the window.
#pragma once

#include <type_traits>

#include "device/math.cuh"
#include "device/mma_sm80.cuh"
#include "device/sm90/arch.cuh"
#include "device/sm90/cluster.cuh"
#include "device/sm90/tma.cuh"
#include "device/sm90/wgmma.cuh"
#include "device/sm90/wgmma_wide.cuh"
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

// A warpgroup's fragments of x^T. kK pixels are one product. 16 bits: block b is column b of the
// window, 64 channels in their order.
template <class T>
struct WalkFragments {
  static constexpr int kK = 16;

  uint32_t offset;  // in a stage of x

  __device__ __forceinline__ explicit WalkFragments(int block) {
    // The lane's row of four 8x8 matrices: 8 pixels by 16 channels, and the next 8 pixels.
    const int lane = static_cast<int>(threadIdx.x % 32), pixel = lane / 16 * 8 + lane % 8;
    const int piece = accumulator_warp_row() / 8 + lane / 8 % 2;
    offset = block * (kWalkRun * 128) + pixel * 128 + ((piece ^ pixel % 8) << 4);
  }
  __device__ __forceinline__ void load(uint32_t (&a)[4], uint32_t stage, int step) const {
    ldmatrix_x4_trans(a, stage + offset + step * kK * 128);
  }
  // The thread's rows of the sums: (column of the window) * channels + channel.
  __device__ __forceinline__ static int row(int block, int h) {
    return block * 64 + accumulator_row() + h * 8;
  }
  // Of a step's pixels in a row of dy.
  __device__ __forceinline__ static uint32_t offset_dy(int step) { return step * kK * 128; }
};

// TF32: boxes of 32 channels. Each two warps have one.
template <>
struct WalkFragments<float> {
  using Rows = FragmentRows<1>;
  static constexpr int kK = 8;

  uint32_t offset;
  int box;

  __device__ __forceinline__ explicit WalkFragments(int block)
      : box(block * 2 + static_cast<int>(threadIdx.x % 128 / 64)) {
    // The fourth box does not exist: its sums are not stored.
    const int loaded = min(box, WalkGrad<float>::kBoxesX - 1);
    offset = loaded * (kWalkRun * 128) + Rows::offset(0) % Rows::kBoxBytes;
  }
  __device__ __forceinline__ void load(uint32_t (&a)[4], uint32_t stage, int step) const {
    Rows::load(a, stage + offset + step * kK * 128);
  }
  __device__ __forceinline__ static int row(int block, int h) {
    return block * 64 + Rows::row(0) + h;
  }
  // Each box of 32 pixels has four steps.
  __device__ __forceinline__ static uint32_t offset_dy(int step) {
    using Memory = WalkGrad<float>;
    constexpr int kBoxes = Memory::kStagesDy + Memory::kCopiesDy;
    return step / 4 * (kBoxes * Memory::kBoxBytes) + step % 4 * 32;
  }
};

// Where a warpgroup leaves its sums: (taps + 1, pitch_k) of the CTA from its first filter on. Taps
// are numbered (channel * 3 + r) * 3 + s.
struct WalkParts {
  float* sums;
  int pitch_k;
  int first_channel, channels;  // of the CTA, and of the image
  int block;                    // of rows of the product

  __device__ __forceinline__ int64_t taps() const {
    return int64_t{channels} * kWalkTaps * kWalkTaps;
  }
  // The last row, of the bias, which another kernel sums.
  __device__ __forceinline__ void clear_bias() const {
    const int thread = static_cast<int>(threadIdx.x % 128);
    if (block == 0 && thread < kWalkFilters) sums[taps() * pitch_k + thread] = 0;
  }
};

// Whether a word's values, one float or two of 16 bits, are neither infinite nor NaN.
template <class T>
__device__ __forceinline__ bool is_finite(uint32_t word) {
  constexpr uint32_t kExponent = sizeof(T) == 4            ? 0x7F800000
                                 : std::is_same_v<T, bf16> ? 0x7F80
                                                           : 0x7C00;
  const bool low = (word & kExponent) != kExponent;
  return sizeof(T) == 4 ? low : low && (word >> 16 & kExponent) != kExponent;
}

// Sums of one warpgroup: 64 rows of dw^T by 64 filters, for each row of the window.
template <class T>
struct WalkSums {
  using Fragments = WalkFragments<T>;
  static constexpr int kSteps = kWalkRun / Fragments::kK;
  static constexpr uint64_t kFields = wgmma_descriptor_fields(/*leading=*/8192, /*stride=*/1024);

  static constexpr int kBlock = kWalkFilters / 2;  // sums of a row of the window

  float d[kWalkTaps * kBlock] = {};  // rows 2, 1, 0: as the rows of dy lie in their ring

  // Adds the products of a row of x with three rows of dy that lie one after the other in the ring,
  // from `dy` on.
  template <int kSteps>
  __device__ __forceinline__ void add_steps(const Fragments& fragments, uint32_t x, uint32_t dy) {
    uint32_t a[4][4];
    fragments.load(a[0], x, 0);
    fragments.load(a[1], x, 1);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      wgmma_pin(d);
      wgmma_fence();
      wgmma_registers<T>(d, a[step % 4],
                         wgmma_descriptor(kFields, dy + Fragments::offset_dy(step)));
      wgmma_commit();
      if (step + 2 < kSteps) fragments.load(a[(step + 2) % 4], x, step + 2);
      // The products of the step before have read their fragment.
      wgmma_wait<1>();
      wgmma_pin(d);
    }
    wgmma_wait<0>();
    wgmma_pin(d);
  }

  // `pixels`: of the run; the others are zero. Images with sides of 7, 14, 28 and 56 have 56.
  __device__ __forceinline__ void add(const Fragments& fragments, uint32_t x, uint32_t dy,
                                      int pixels) {
    if (sizeof(T) == 4 && pixels <= kWalkRun - Fragments::kK) {
      add_steps<kSteps - 1>(fragments, x, dy);
    } else {
      add_steps<kSteps>(fragments, x, dy);
    }
  }

  // The same if some of the rows are zeros. Only the rows of the window in `valid`, a bit each, do
  // not meet them. Zero times an infinity is NaN: the other sums wait in `parts` meanwhile.
  __device__ __forceinline__ void add_edge(const Fragments& fragments, uint32_t x, uint32_t dy,
                                           int pixels, int valid, const WalkParts& parts) {
    bool finite = true;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t a[4];
      fragments.load(a, x, step);
#pragma unroll
      for (int i = 0; i < 4; ++i) finite = finite && is_finite<T>(a[i]);
    }
    const bool keeps = __any_sync(kFullMask, !finite);
    if (keeps) store(parts);
    add(fragments, x, dy, pixels);
    if (!keeps) return;
    for_sums(parts, [&](int r, float2* to, float& d0, float& d1) {
      if (valid >> r & 1) return;
      d0 = to->x;
      d1 = to->y;
    });
  }

  __device__ __forceinline__ void store(const WalkParts& parts) {
    for_sums(parts, [](int, float2* to, float d0, float d1) { *to = make_float2(d0, d1); });
  }

 private:
  // Calls f(row of the window, place, sum, next sum).
  template <class F>
  __device__ __forceinline__ void for_sums(const WalkParts& parts, const F& f) {
    constexpr int kChannels = WalkGrad<T>::kChannels;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = Fragments::row(parts.block, h), s = row / kChannels;
      const int c = parts.first_channel + row % kChannels;
      if (s >= kWalkTaps || c >= parts.channels) break;
#pragma unroll
      for (int r = 0; r < kWalkTaps; ++r) {
        const int tap = (c * kWalkTaps + r) * kWalkTaps + s;
        float* to = parts.sums + int64_t{tap} * parts.pitch_k + accumulator_col();
#pragma unroll
        for (int i = 0; i < kBlock; i += 4) {
          const int at = (kWalkTaps - 1 - r) * kBlock + i + h * 2;
          f(r, reinterpret_cast<float2*>(to + i * 2), d[at], d[at + 1]);
        }
      }
    }
  }
};

// One warpgroup: all walks of the CTA.
template <class T>
__device__ __forceinline__ void add_walks(WalkSums<T>& sums, const WalkGrad<T>& memory,
                                          const WalkParts& parts, const WalkGradShape& w, int first,
                                          int stride) {
  using Memory = WalkGrad<T>;
  const typename WalkSums<T>::Fragments fragments(parts.block);
  const auto ring_x = memory.ring_x();
  const auto ring_dy = memory.ring_dy();
  typename Memory::RingX::Cursor at_x;
  typename Memory::RingDy::Cursor at_dy, oldest;  // of the next row, and of the oldest in use
  auto next_dy = [&] {
    ring_dy.wait_full(at_dy);
    at_dy.next();
  };
  auto release_dy = [&] {
    ring_dy.release(oldest);
    oldest.next();
  };
  for (int i = first; i < w.units(); i += stride) {
    const WalkGradUnit unit(w, i);
    next_dy();
    next_dy();
#pragma unroll 1
    for (int t = unit.first_row; t < unit.end_step(); ++t) {
      next_dy();
      if (unit.has_x(w, t)) {
        ring_x.wait_full(at_x);
        const uint32_t x = memory.x(at_x.stage), dy = memory.dy(oldest.stage);
        if (unit.has_dy(t) && unit.has_dy(t - 2)) {
          sums.add(fragments, x, dy, w.run());
        } else {
          int valid = 0;
#pragma unroll
          for (int r = 0; r < kWalkTaps; ++r) valid |= unit.has_dy(t - r) << r;
          sums.add_edge(fragments, x, dy, w.run(), valid, parts);
        }
        release_loaded(ring_x, at_x);
        at_x.next();
      }
      release_dy();
    }
    release_dy();
    release_dy();
  }
}

// map_x, map_dy: boxes of a segment's columns by kChunk channels or filters of one row.
// partials: (ctas_per_group, taps + 1, pitch_k).
// Grid: CTA b has a group of filters and one of channels, and every ctas_per_group-th walk.
template <class T>
__global__ void __launch_bounds__(WalkGrad<T>::kThreads, 1)
    conv2d_row_walk_wgrad_kernel(const __grid_constant__ CUtensorMap map_x,
                                 const __grid_constant__ CUtensorMap map_dy, float* partials,
                                 const __grid_constant__ WalkGradShape w) {
  if constexpr (kHasSm90a) {
    using Memory = WalkGrad<T>;
    extern __shared__ char walk_grad_smem[];
    const Memory memory{(smem_address(walk_grad_smem) + 1023) & ~1023u};
    if (threadIdx.x == 0) {
      prefetch_tensor_map(&map_x);
      prefetch_tensor_map(&map_dy);
      memory.init();
    }
    memory.clear();
    __syncthreads();

    const int group = static_cast<int>(blockIdx.x) % w.groups();
    const int first = static_cast<int>(blockIdx.x) / w.groups();
    const int first_filter = group % w.filter_groups * kWalkFilters;
    const int first_channel = group / w.filter_groups * Memory::kChannels;
    const int warpgroup = __shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / 128, 0);
    if (warpgroup == 0) {
      setmaxnreg_dec<Memory::kLoadRegisters>();
      if (threadIdx.x == 0) {
        load_walk_gradients(memory, &map_x, &map_dy, w, first_filter, first_channel, first,
                            w.ctas_per_group);
      }
    } else if (warpgroup < Memory::kLoadingWarpgroups) {
      setmaxnreg_dec<Memory::kTransposeRegisters>();
      if constexpr (Memory::kTf32) {
        transpose_walk_gradients(memory, w, first, w.ctas_per_group);
      }
    } else {
      setmaxnreg_inc<Memory::kSumRegisters>();
      WalkParts parts{.pitch_k = w.pitch_k(),
                      .first_channel = first_channel,
                      .channels = w.channels,
                      .block = warpgroup - Memory::kLoadingWarpgroups};
      parts.sums = partials + first * (parts.taps() + 1) * parts.pitch_k + first_filter;
      WalkSums<T> sums;
      add_walks(sums, memory, parts, w, first, w.ctas_per_group);
      sums.store(parts);
      parts.clear_bias();
    }
  } else {
    __trap();
  }
}

}  // namespace warpwright
