// Depthwise fprop of stride 1 by tensor cores. D (segments, 8 outputs) += A (segments, 16 columns
// of a row of x) B (16 columns, 8 outputs) for each channel and each row of the window. B holds the
// row's weights along its diagonals. A is loaded once and multiplied for kTaps rows of sums.
#pragma once

#include "device/mma_sm80.cuh"
#include "device/reduce.cuh"
#include "device/sm90/arch.cuh"
#include "device/sm90/tma.cuh"
#include "device/vec.cuh"
#include "ops/conv2d/cuda/depthwise/columns.h"
#include "ops/conv2d/cuda/depthwise/exact.cuh"
#include "tile/loaded_stage_sm90.cuh"
#include "tile/stage_ring_sm90.cuh"

namespace warpwright {

// One walk of a CTA: `rows` rows from `row` on, from column `col` on.
struct DepthwiseColumnsUnit {
  int image, row, col, rows;

  __device__ __forceinline__ DepthwiseColumnsUnit(const DepthwiseColumnsWalk& g, int unit, int p) {
    col = unit % g.col_tiles * g.segments * kColumnsRun;
    const int rest = unit / g.col_tiles;
    row = rest % g.row_tiles * g.tile_rows;
    rows = min(g.tile_rows, p - row);
    image = rest / g.row_tiles * g.images;
  }
};

// The byte of a warp's four channels at a pixel of a swizzled box.
__device__ __forceinline__ int swizzled_pixel(int pixel, int warp) {
  return pixel * 64 + (((warp / 2) ^ (pixel / 2 % 4)) << 4) + warp % 2 * 8;
}

// Four channels of four pixels as pairs of pixels: `to[ch]` has pixels 0, 1 and pixels 2, 3.
__device__ __forceinline__ void pair_pixels(const uint2 (&pixels)[4], uint32_t (&to)[4][2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    to[0][i] = __byte_perm(pixels[2 * i].x, pixels[2 * i + 1].x, 0x5410);
    to[1][i] = __byte_perm(pixels[2 * i].x, pixels[2 * i + 1].x, 0x7632);
    to[2][i] = __byte_perm(pixels[2 * i].y, pixels[2 * i + 1].y, 0x5410);
    to[3][i] = __byte_perm(pixels[2 * i].y, pixels[2 * i + 1].y, 0x7632);
  }
}

// What a thread of both kernels has.
struct DepthwiseColumnsThread {
  int first_channel, part;  // of the CTA: its channels, and its share of the units
  int warp, lane, t;        // t: of the quad that has a row of the product
  int channel;              // the first of the warp's four
  unsigned char* stages;    // aligned to the swizzle's period

  __device__ __forceinline__ DepthwiseColumnsThread(const DepthwiseColumnsWalk& g,
                                                    unsigned char* shared)
      : first_channel(static_cast<int>(blockIdx.x) % g.chunks * kColumnsChannels),
        part(static_cast<int>(blockIdx.x) / g.chunks),
        warp(static_cast<int>(threadIdx.x) / 32),
        lane(static_cast<int>(threadIdx.x) % 32),
        t(lane % 4),
        channel(first_channel + warp * 4),
        stages(shared + (512 - smem_address(shared) % 512) % 512) {}
};

template <class Ring>
__device__ __forceinline__ Ring make_columns_ring(uint64_t* barriers, int releases) {
  const Ring ring{smem_address(barriers)};
  if (threadIdx.x == 0) {
    ring.init(releases);
    fence_mbarrier_init();
  }
  __syncthreads();
  return ring;
}

// ---- fprop ----

// The thread of a CTA that issues the copies, with its place in the walk.
struct DepthwiseColumnsProducer {
  int unit, step = 0;

  template <int kTaps, class Ring>
  __device__ __forceinline__ void load_next(const CUtensorMap* map, const DepthwiseImage& s,
                                            const DepthwiseColumnsWalk& g, int channel,
                                            const Ring& ring, typename Ring::Cursor& at,
                                            uint32_t stages) {
    if (unit >= g.units) return;
    const DepthwiseColumnsUnit u(g, unit, s.p);
    ring.expect(at, g.images * g.box_cols * 64);
    tma_load_4d(stages + at.stage * g.stage_bytes, map, channel, u.col - s.pad_w,
                u.row - s.pad_h + step, u.image, ring.full(at.stage));
    at.next();
    if (++step == u.rows + kTaps - 1) step = 0, unit += g.parts;
  }
};

// B for four channels: lane (g, t) has output g, columns t, t + 4 and t + 8, t + 12. This order of
// columns lets a warp read neighbouring pixels.
template <int kTaps, class T>
__device__ __forceinline__ void load_bands(const T* w, int channel, int channels, bool flip,
                                           uint32_t (&bands)[kTaps][4][2]) {
  const int lane = threadIdx.x % 32, output = lane / 4, t = lane % 4;
#pragma unroll
  for (int r = 0; r < kTaps; ++r) {
#pragma unroll
    for (int ch = 0; ch < 4; ++ch) {
      Vec<T, 4> band;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int tap = t + 4 * i - output;
        const bool exists = tap >= 0 && tap < kTaps && channel + ch < channels;
        const int place = r * kTaps + tap;
        band[i] = exists ? w[int64_t{channel + ch} * kTaps * kTaps +
                             (flip ? kTaps * kTaps - 1 - place : place)]
                         : convert<T>(0.f);
      }
      const uint2 packed = *reinterpret_cast<const uint2*>(&band);
      bands[r][ch][0] = packed.x;
      bands[r][ch][1] = packed.y;
    }
  }
}

// Rows lane / 4 and lane / 4 + 8 of the product. Neighbouring rows are of different images.
struct DepthwiseColumnsRows {
  int image[2], segment[2];
  int from[2][2];  // bytes of columns t and t + 4 in a stage; columns from 8 on are 512 bytes on
  int to[2];       // the first pixel in a buffer of outputs; -1: no such segment

  __device__ __forceinline__ DepthwiseColumnsRows(const DepthwiseColumnsWalk& g,
                                                  const DepthwiseColumnsThread& me) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int m = me.lane / 4 + half * 8;
      const bool exists = m < g.segments * g.images;
      if (!exists) m = 0;
      image[half] = m % g.images;
      segment[half] = m / g.images;
      const int pixel = image[half] * g.box_cols + segment[half] * kColumnsRun + me.t;
      from[half][0] = swizzled_pixel(pixel, me.warp);
      from[half][1] = swizzled_pixel(pixel + 4, me.warp);
      to[half] = exists ? (image[half] * g.segments + segment[half]) * kColumnsRun + 2 * me.t : -1;
    }
  }
};

// A for the warp's four channels, from a row of x.
template <int kTaps>
__device__ __forceinline__ void load_windows(const unsigned char* stage,
                                             const DepthwiseColumnsRows& rows, int t,
                                             uint32_t (&a)[4][4]) {
  constexpr int kColumns = kColumnsRun + kTaps - 1;  // of a segment's windows
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint2 loaded[4];
    uint32_t pairs[4][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      loaded[i] = make_uint2(0, 0);
      // Columns past the window may be anything, and anything times zero may be NaN.
      if (4 * i >= kColumns || (4 * i + 3 >= kColumns && 4 * i + t >= kColumns)) continue;
      loaded[i] = *reinterpret_cast<const uint2*>(stage + rows.from[half][i % 2] + i / 2 * 512);
    }
    pair_pixels(loaded, pairs);
#pragma unroll
    for (int ch = 0; ch < 4; ++ch) a[ch][half] = pairs[ch][0], a[ch][2 + half] = pairs[ch][1];
  }
}

// Computes sums that are NaN again: a zero of the band may have met a neighbour's infinity.
template <int kTaps, class T>
__device__ __forceinline__ void mend_outputs(float (&sums)[4][4], const T* x, const T* w,
                                             const float (&bias)[4], bool flip, int first_image,
                                             int row, int first_col,
                                             const DepthwiseColumnsRows& rows,
                                             const DepthwiseColumnsThread& me,
                                             const DepthwiseImage& s) {
  float total = 0;
#pragma unroll
  for (int ch = 0; ch < 4; ++ch) {
#pragma unroll
    for (int e = 0; e < 4; ++e) total += sums[ch][e];
  }
  if (total == total) return;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int image = first_image + rows.image[e / 2];
    const int col = first_col + rows.segment[e / 2] * kColumnsRun + 2 * me.t + e % 2;
    if (image >= s.n || col >= s.q) continue;
#pragma unroll
    for (int ch = 0; ch < 4; ++ch) {
      if (sums[ch][e] == sums[ch][e] || me.channel + ch >= s.c) continue;
      sums[ch][e] =
          exact_depthwise_output<kTaps>(x, w, bias[ch], image, me.channel + ch, row, col, flip, s);
    }
  }
}

template <class T>
__device__ __forceinline__ void store_outputs(unsigned char* output, const float (&sums)[4][4],
                                              const DepthwiseColumnsRows& rows, int warp) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if (rows.to[e / 2] < 0) continue;
    Vec<T, 4> packed;
#pragma unroll
    for (int ch = 0; ch < 4; ++ch) packed[ch] = convert<T>(sums[ch][e]);
    const int pixel = rows.to[e / 2] + e % 2;
    store_vec(reinterpret_cast<T*>(output + swizzled_pixel(pixel, warp)), packed);
  }
}

// Layout: x (N, H, W, C) by `x_map`, w (C, kTaps, kTaps), bias (C) or null, y (N, P, Q, C) by
// `y_map`. Grid: CTA b has channels b % chunks * 32 and the units b / chunks + i * parts. x is read
// only if a sum is NaN.
template <class T, int kTaps>
__global__ void __launch_bounds__(kColumnsThreads, 1)
    conv2d_depthwise_columns_fprop_kernel(const __grid_constant__ CUtensorMap x_map,
                                          const __grid_constant__ CUtensorMap y_map, const T* x,
                                          const T* w, const T* bias, DepthwiseImage s,
                                          DepthwiseColumnsWalk g, bool flip) {
  if constexpr (kHasSm90a) {
    using Ring = StageRing<kColumnsStages>;
    extern __shared__ unsigned char shared[];
    __shared__ __align__(8) uint64_t barriers[Ring::kBarrierBytes / 8];
    const Ring ring = make_columns_ring<Ring>(barriers, 1);
    const DepthwiseColumnsThread me(g, shared);
    unsigned char* const outputs = me.stages + kColumnsStages * g.stage_bytes;
    const bool is_leader = threadIdx.x == 0;
    typename Ring::Cursor at, filled;
    DepthwiseColumnsProducer producer{me.part};
    auto load_next = [&] {
      producer.load_next<kTaps>(&x_map, s, g, me.first_channel, ring, filled,
                                smem_address(me.stages));
    };
    if (is_leader) {
      for (int i = 0; i < kColumnsStages; ++i) load_next();
    }
    uint32_t bands[kTaps][4][2];
    load_bands<kTaps>(w, me.channel, s.c, flip, bands);
    float b[4];
#pragma unroll
    for (int ch = 0; ch < 4; ++ch) {
      const bool exists = bias != nullptr && me.channel + ch < s.c;
      b[ch] = exists ? convert<float>(bias[me.channel + ch]) : 0.f;
    }
    const DepthwiseColumnsRows rows(g, me);
    float acc[kTaps][4][4];
    int buffer = 0;
    for (int unit = me.part; unit < g.units; unit += g.parts) {
      const DepthwiseColumnsUnit u(g, unit, s.p);
      const int steps = u.rows + kTaps - 1;
      for (int base = 0; base < steps; base += kTaps) {
#pragma unroll
        for (int j = 0; j < kTaps; ++j) {
          if (base + j >= steps) break;
          ring.wait_full(at);
          uint32_t a[4][4];
          load_windows<kTaps>(me.stages + at.stage * g.stage_bytes, rows, me.t, a);
          at.next();
#pragma unroll
          for (int ch = 0; ch < 4; ++ch) {
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[j][ch][e] = b[ch];
          }
#pragma unroll
          for (int r = 0; r < kTaps; ++r) {
#pragma unroll
            for (int ch = 0; ch < 4; ++ch) {
              mma_m16n8k16(acc[(j - r + kTaps) % kTaps][ch], a[ch], bands[r][ch], T{});
            }
          }
          const int done = base + j - (kTaps - 1);  // the row of the unit that is complete
          unsigned char* const output = outputs + buffer * g.output_bytes;
          if (done >= 0) {
            float(&sums)[4][4] = acc[(j + 1) % kTaps];
            mend_outputs<kTaps>(sums, x, w, b, flip, u.image, u.row + done, u.col, rows, me, s);
            store_outputs<T>(output, sums, rows, me.warp);
          }
          fence_proxy_async();  // the outputs before their copy, loads before that of the next row
          __syncthreads();
          if (is_leader) {
            if (done >= 0) {
              tma_store_4d(&y_map, me.first_channel, u.col, u.row + done, u.image,
                           smem_address(output));
              tma_store_commit();
              // A buffer is written again after two more barriers.
              tma_store_wait_read<1>();
            }
            load_next();
          }
          if (done >= 0) buffer = buffer == kColumnsOutputs - 1 ? 0 : buffer + 1;
        }
      }
    }
    if (is_leader) tma_store_wait<0>();
  }
}

// ---- wgrad ----

// Segments t, t + 4, t + 8, t + 12 of the product: neighbours are of different images.
struct DepthwiseColumnsSegments {
  int x[4], dy[4];  // bytes in a stage; x -1: no such segment

  __device__ __forceinline__ DepthwiseColumnsSegments(const DepthwiseColumnsWalk& g,
                                                      const DepthwiseColumnsThread& me) {
    const int row = me.lane / 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int m = me.t + 4 * i, image = m % g.images, segment = m / g.images;
      const bool exists = m < g.segments * g.images;
      x[i] =
          exists ? swizzled_pixel(image * g.box_cols + segment * kColumnsRun + row, me.warp) : -1;
      dy[i] =
          g.x_bytes + swizzled_pixel((image * g.segments + segment) * kColumnsRun + row, me.warp);
    }
  }

  // Four channels of a pixel of each segment, in pairs; zeros if there is no such segment.
  __device__ __forceinline__ void load(const unsigned char* stage, const int (&places)[4],
                                       uint32_t (&to)[4][2]) const {
    uint2 pixels[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pixels[i] = make_uint2(0, 0);
      if (x[i] >= 0) pixels[i] = *reinterpret_cast<const uint2*>(stage + places[i]);
    }
    pair_pixels(pixels, to);
  }
};

// The thread of a CTA that issues the copies of wgrad, with its place in the walk.
struct DepthwiseColumnsPairProducer {
  int unit, steps, step = 0;

  template <class Ring>
  __device__ __forceinline__ void load_next(const CUtensorMap* x_map, const CUtensorMap* dy_map,
                                            const DepthwiseImage& s, const DepthwiseColumnsWalk& g,
                                            int channel, const Ring& ring,
                                            typename Ring::Cursor& at, uint32_t stages) {
    if (unit >= g.units) return;
    const DepthwiseColumnsUnit u(g, unit, s.p);
    const bool has_dy = step < s.p;
    const uint32_t stage = stages + at.stage * g.stage_bytes;
    ring.wait_empty(at);
    ring.expect(at, g.images * 64 * (g.box_cols + (has_dy ? g.segments * kColumnsRun : 0)));
    tma_load_4d(stage, x_map, channel, u.col - s.pad_w, step - s.pad_h, u.image,
                ring.full(at.stage));
    if (has_dy) {
      tma_load_4d(stage + g.x_bytes, dy_map, channel, u.col, step, u.image, ring.full(at.stage));
    }
    at.next();
    if (++step == steps) step = 0, unit += g.parts;
  }
};

// Adds the diagonals of a warp's products and stores the part's sums. `sums`: shared memory of the
// warp, for the products of four channels. exact(channel, r, tap): a sum from its own products.
template <int kTaps, class F>
__device__ __forceinline__ void leave_diagonals(const float (&acc)[kTaps][4][4],
                                                const float (&bias)[4],
                                                const DepthwiseColumnsThread& me, int channels,
                                                float* sums, float* partials, F&& exact) {
  constexpr int kSums = kTaps * kTaps + 1;
  float* const mine = partials + int64_t{me.part} * kSums * channels + me.channel;
#pragma unroll
  for (int r = 0; r < kTaps; ++r) {
    __syncwarp();
#pragma unroll
    for (int ch = 0; ch < 4; ++ch) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        sums[ch * 128 + (me.lane / 4 + e / 2 * 8) * 8 + 2 * me.t + e % 2] = acc[r][ch][e];
      }
    }
    __syncwarp();
    for (int e = me.lane; e < 4 * kTaps; e += 32) {
      const int ch = e / kTaps, tap = e % kTaps;
      const float* diagonal = sums + ch * 128 + tap * 8;
      float sum = tree_sum<8>([&](int q) { return diagonal[q * 9]; });
      if (me.channel + ch >= channels) continue;
      if (sum != sum) sum = exact(me.channel + ch, r, tap);
      mine[int64_t{r * kTaps + tap} * channels + ch] = sum;
    }
  }
#pragma unroll
  for (int ch = 0; ch < 4; ++ch) {
    const float sum = warp_reduce(bias[ch], Sum{});
    if (me.lane == 0 && me.channel + ch < channels) mine[int64_t{kSums - 1} * channels + ch] = sum;
  }
}

// D (16 columns of x, 8 columns of dy) += A (columns of x, segments) B (segments, columns of dy)
// for each channel and each row of the window. A tap is a diagonal of D, summed at the end.
// Layout: x (N, H, W, C) by `x_map`, dy (N, P, Q, C) by `dy_map`, partials (parts, taps + 1, C);
// the last is the bias. Grid: as fprop; a unit has all rows. x and grad (dy) are read only if a sum
// is NaN.
template <class T, int kTaps>
__global__ void __launch_bounds__(kColumnsThreads, 1)
    conv2d_depthwise_columns_wgrad_kernel(const __grid_constant__ CUtensorMap x_map,
                                          const __grid_constant__ CUtensorMap dy_map, const T* x,
                                          const T* grad, float* partials, DepthwiseImage s,
                                          DepthwiseColumnsWalk g) {
  if constexpr (kHasSm90a) {
    using Ring = StageRing<kColumnsStages>;
    extern __shared__ unsigned char shared[];
    __shared__ __align__(8) uint64_t barriers[Ring::kBarrierBytes / 8];
    const Ring ring = make_columns_ring<Ring>(barriers, kColumnsThreads / 32);
    const DepthwiseColumnsThread me(g, shared);
    const bool is_leader = threadIdx.x == 0;
    const int steps = s.p + kTaps - 1;
    typename Ring::Cursor at, filled;
    DepthwiseColumnsPairProducer producer{me.part, steps};
    auto load_next = [&] {
      producer.load_next(&x_map, &dy_map, s, g, me.first_channel, ring, filled,
                         smem_address(me.stages));
    };
    // One stage stays free, so that a load never waits for the slowest warp of this step.
    if (is_leader) {
      for (int i = 0; i < kColumnsStages - 1; ++i) load_next();
    }
    const DepthwiseColumnsSegments segments(g, me);
    float acc[kTaps][4][4] = {}, bias[4] = {};
    uint32_t dy[kTaps][4][2] = {};
    for (int unit = me.part; unit < g.units; unit += g.parts) {
      for (int base = 0; base < steps; base += kTaps) {
#pragma unroll
        for (int j = 0; j < kTaps; ++j) {
          const int step = base + j;
          if (step >= steps) break;
          if (is_leader) load_next();
          ring.wait_full(at);
          const unsigned char* stage = me.stages + at.stage * g.stage_bytes;
          uint32_t a[4][4];
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            uint32_t pairs[4][2];
            segments.load(stage + half * 512, segments.x, pairs);
#pragma unroll
            for (int ch = 0; ch < 4; ++ch) {
              a[ch][half] = pairs[ch][0], a[ch][2 + half] = pairs[ch][1];
            }
          }
          if (step < s.p) {
            segments.load(stage, segments.dy, dy[j]);
#pragma unroll
            for (int ch = 0; ch < 4; ++ch) {
              const float2 low = widen_pair(dy[j][ch][0], T{}),
                           high = widen_pair(dy[j][ch][1], T{});
              bias[ch] += (low.x + low.y) + (high.x + high.y);
            }
          }
          release_loaded(ring, at);
          at.next();
#pragma unroll
          for (int r = 0; r < kTaps; ++r) {
            // Skips rows of dy outside of the image: their zeros times an infinity of x are NaN.
            if (step < r || step - r >= s.p) continue;
#pragma unroll
            for (int ch = 0; ch < 4; ++ch) {
              mma_m16n8k16(acc[r][ch], a[ch], dy[(j - r + kTaps) % kTaps][ch], T{});
            }
          }
        }
      }
    }
    unsigned char* const sums = me.stages + kColumnsStages * g.stage_bytes;
    leave_diagonals<kTaps>(acc, bias, me, s.c, reinterpret_cast<float*>(sums) + me.warp * (4 * 128),
                           partials, [&](int channel, int r, int tap) {
                             // A zero of the padding or past the row's end may have met an
                             // infinity.
                             const int width = g.segments * kColumnsRun;
                             return exact_depthwise_tap(
                                 x, grad, channel, r, tap, 1,
                                 {me.part, g.parts, g.units, g.col_tiles, width, g.images}, s);
                           });
  }
}

}  // namespace warpwright
