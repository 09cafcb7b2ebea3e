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

#include "device/mma_sm80.cuh"
#include "device/sm90/arch.cuh"
#include "device/sm90/wgmma.cuh"
#include "device/sm90/wgmma_wide.cuh"
#include "ops/conv2d/cuda/row_walk/wgrad_rings_sm90.cuh"

namespace warpwright {

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
  template <int kCount>
  __device__ __forceinline__ void add_steps(const Fragments& fragments, uint32_t x, uint32_t dy) {
    uint32_t a[4][4];
    fragments.load(a[0], x, 0);
    fragments.load(a[1], x, 1);
#pragma unroll
    for (int step = 0; step < kCount; ++step) {
      wgmma_pin(d);
      wgmma_fence();
      wgmma_registers<T>(d, a[step % 4],
                         wgmma_descriptor(kFields, dy + Fragments::offset_dy(step)));
      wgmma_commit();
      if (step + 2 < kCount) fragments.load(a[(step + 2) % 4], x, step + 2);
      // The products of the step before have read their fragment.
      wgmma_wait<1>();
      wgmma_pin(d);
    }
    wgmma_wait<0>();
    wgmma_pin(d);
  }

  // `pixels`: of the run; the others are zero. Images with sides of 14, 28 and 56 have 56.
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
