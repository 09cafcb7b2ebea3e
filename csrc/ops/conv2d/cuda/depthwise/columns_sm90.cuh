// Depthwise fprop of stride 1 by tensor cores. D (segments, 8 outputs) += A (segments, 16 columns
// of a row of x) B (16 columns, 8 outputs) for each channel and each row of the window. B holds the
// row's weights along its diagonals. A is loaded once and meets kTaps live rows of sums.
#pragma once

#include "device/mma_sm80.cuh"
#include "device/reduce.cuh"
#include "device/sm90/arch.cuh"
#include "device/sm90/tma.cuh"
#include "device/vec.cuh"
#include "ops/conv2d/cuda/depthwise/columns.h"
#include "ops/conv2d/cuda/depthwise/exact.cuh"
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

// Layout: x (N, H, W, C) by `x_map`, w (C, kTaps, kTaps), bias (C) or null, y (N, P, Q, C) by
// `y_map`. Grid: CTA b has channels b % chunks * 32 and the units b / chunks + i * parts.
template <class T, int kTaps>
__global__ void __launch_bounds__(kColumnsThreads, 1)
    conv2d_depthwise_columns_fprop_kernel(const __grid_constant__ CUtensorMap x_map,
                                          const __grid_constant__ CUtensorMap y_map, const T* x,
                                          const T* w, const T* bias, DepthwiseImage s,
                                          DepthwiseColumnsWalk g, bool flip) {
  if constexpr (kHasSm90a) {
    using Ring = StageRing<kColumnsStages>;
    constexpr int kLoads = ceil_div(kColumnsRun + kTaps - 1, 4);  // columns per thread and segment
    extern __shared__ unsigned char shared[];
    __shared__ __align__(8) uint64_t barriers[Ring::kBarrierBytes / 8];
    const uint32_t padding = (512 - smem_address(shared) % 512) % 512;
    unsigned char* const stages = shared + padding;
    unsigned char* const outputs = stages + kColumnsStages * g.stage_bytes;
    const Ring ring{smem_address(barriers)};
    const bool is_leader = threadIdx.x == 0;
    if (is_leader) {
      ring.init(1);
      fence_mbarrier_init();
    }
    __syncthreads();

    const int first_channel = static_cast<int>(blockIdx.x) % g.chunks * kColumnsChannels;
    const int part = static_cast<int>(blockIdx.x) / g.chunks;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane % 4;
    const int channel = first_channel + warp * 4;
    typename Ring::Cursor at, filled;
    DepthwiseColumnsProducer producer{part};
    if (is_leader) {
      for (int i = 0; i < kColumnsStages; ++i) {
        producer.load_next<kTaps>(&x_map, s, g, first_channel, ring, filled, smem_address(stages));
      }
    }
    uint32_t bands[kTaps][4][2];
    load_bands<kTaps>(w, channel, s.c, flip, bands);
    float b[4];
#pragma unroll
    for (int ch = 0; ch < 4; ++ch) {
      b[ch] = bias != nullptr && channel + ch < s.c ? convert<float>(bias[channel + ch]) : 0.f;
    }

    // Rows lane / 4 and lane / 4 + 8 of the product. Neighbouring rows are of different images.
    int image[2], segment[2], from[2][2], to[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int m = lane / 4 + half * 8;
      const bool exists = m < g.segments * g.images;
      if (!exists) m = 0;
      image[half] = m % g.images;
      segment[half] = m / g.images;
      const int pixel = image[half] * g.box_cols + segment[half] * kColumnsRun + t;
      from[half][0] = swizzled_pixel(pixel, warp);
      from[half][1] = swizzled_pixel(pixel + 4, warp);
      to[half] = exists ? (image[half] * g.segments + segment[half]) * kColumnsRun + 2 * t : -1;
    }

    float acc[kTaps][4][4];
    int buffer = 0;
    for (int unit = part; unit < g.units; unit += g.parts) {
      const DepthwiseColumnsUnit u(g, unit, s.p);
      const int steps = u.rows + kTaps - 1;
      for (int base = 0; base < steps; base += kTaps) {
#pragma unroll
        for (int j = 0; j < kTaps; ++j) {
          if (base + j >= steps) break;
          ring.wait_full(at);
          const unsigned char* stage = stages + at.stage * g.stage_bytes;
          at.next();
          uint32_t a[4][4];
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            uint2 loaded[4];
            uint32_t pairs[4][2];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              loaded[i] = make_uint2(0, 0);
              // Columns past the window may be anything, and anything times zero may be NaN.
              if (i >= kLoads ||
                  (4 * i + 3 >= kColumnsRun + kTaps - 1 && 4 * i + t >= kColumnsRun + kTaps - 1)) {
                continue;
              }
              loaded[i] = *reinterpret_cast<const uint2*>(stage + from[half][i % 2] + i / 2 * 512);
            }
            pair_pixels(loaded, pairs);
#pragma unroll
            for (int ch = 0; ch < 4; ++ch)
              a[ch][half] = pairs[ch][0], a[ch][2 + half] = pairs[ch][1];
          }
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
          constexpr int kLast = kTaps - 1;
          const int done = base + j - kLast;  // the row of the unit that is complete
          if (done >= 0) {
            float(&sums)[4][4] = acc[(j + 1) % kTaps];
            float total = 0;
#pragma unroll
            for (int ch = 0; ch < 4; ++ch) {
#pragma unroll
              for (int e = 0; e < 4; ++e) total += sums[ch][e];
            }
            if (total != total) {  // maybe a zero of the band times a neighbour's infinity
#pragma unroll
              for (int e = 0; e < 4; ++e) {
                const int n = u.image + image[e / 2];
                const int col = u.col + segment[e / 2] * kColumnsRun + 2 * t + e % 2;
#pragma unroll
                for (int ch = 0; ch < 4; ++ch) {
                  if (sums[ch][e] == sums[ch][e] || n >= s.n || col >= s.q || channel + ch >= s.c) {
                    continue;
                  }
                  sums[ch][e] = exact_depthwise_output<kTaps>(x, w, b[ch], n, channel + ch,
                                                              u.row + done, col, flip, s);
                }
              }
            }
            unsigned char* output = outputs + buffer * g.output_bytes;
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              Vec<T, 4> packed;
#pragma unroll
              for (int ch = 0; ch < 4; ++ch) packed[ch] = convert<T>(sums[ch][e]);
              const int pixel = to[e / 2] + e % 2;
              if (to[e / 2] >= 0) {
                store_vec(reinterpret_cast<T*>(output + swizzled_pixel(pixel, warp)), packed);
              }
            }
            fence_proxy_async();
          }
          __syncthreads();
          if (is_leader) {
            if (done >= 0) {
              tma_store_4d(&y_map, first_channel, u.col, u.row + done, u.image,
                           smem_address(outputs + buffer * g.output_bytes));
              tma_store_commit();
              // A buffer is written again after two more barriers.
              tma_store_wait_read<1>();
            }
            producer.load_next<kTaps>(&x_map, s, g, first_channel, ring, filled,
                                      smem_address(stages));
          }
          if (done >= 0) buffer = buffer == kColumnsOutputs - 1 ? 0 : buffer + 1;
        }
      }
    }
    if (is_leader) tma_store_wait<0>();
  }
}

// wgrad. D (16 columns of x, 8 columns of dy) += A (columns of x, segments) B (segments, columns of
// dy) for each channel and each row of the window. A tap is a diagonal of D, summed at the end.
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
    constexpr int kSums = kTaps * kTaps + 1;
    extern __shared__ unsigned char shared[];
    __shared__ __align__(8) uint64_t barriers[Ring::kBarrierBytes / 8];
    const uint32_t padding = (512 - smem_address(shared) % 512) % 512;
    unsigned char* const stages = shared + padding;
    const Ring ring{smem_address(barriers)};
    const bool is_leader = threadIdx.x == 0;
    if (is_leader) {
      ring.init(kColumnsThreads / 32);
      fence_mbarrier_init();
    }
    __syncthreads();

    const int first_channel = static_cast<int>(blockIdx.x) % g.chunks * kColumnsChannels;
    const int part = static_cast<int>(blockIdx.x) / g.chunks;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, t = lane % 4;
    const int channel = first_channel + warp * 4;
    const int steps = s.p + kTaps - 1;
    typename Ring::Cursor at, filled;
    int next_unit = part, next_step = 0;
    auto load_next = [&] {
      if (next_unit >= g.units) return;
      const DepthwiseColumnsUnit u(g, next_unit, s.p);
      const bool has_dy = next_step < s.p;
      const uint32_t stage = smem_address(stages) + filled.stage * g.stage_bytes;
      ring.wait_empty(filled);
      ring.expect(filled, g.images * 64 * (g.box_cols + (has_dy ? g.segments * kColumnsRun : 0)));
      tma_load_4d(stage, &x_map, first_channel, u.col - s.pad_w, next_step - s.pad_h, u.image,
                  ring.full(filled.stage));
      if (has_dy) {
        tma_load_4d(stage + g.x_bytes, &dy_map, first_channel, u.col, next_step, u.image,
                    ring.full(filled.stage));
      }
      filled.next();
      if (++next_step == steps) next_step = 0, next_unit += g.parts;
    };
    // One stage stays free, so that a load never waits for the slowest warp of this step.
    if (is_leader) {
      for (int i = 0; i < kColumnsStages - 1; ++i) load_next();
    }

    // Segments t, t + 4, t + 8, t + 12: neighbours are of different images.
    int from_x[4], from_dy[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int m = t + 4 * i, image = m % g.images, segment = m / g.images;
      const bool exists = m < g.segments * g.images;
      from_x[i] =
          exists ? swizzled_pixel(image * g.box_cols + segment * kColumnsRun + row, warp) : -1;
      from_dy[i] =
          g.x_bytes + swizzled_pixel((image * g.segments + segment) * kColumnsRun + row, warp);
    }

    float acc[kTaps][4][4] = {}, bias[4] = {};
    uint32_t dy[kTaps][4][2] = {};
    for (int unit = part; unit < g.units; unit += g.parts) {
      for (int base = 0; base < steps; base += kTaps) {
#pragma unroll
        for (int j = 0; j < kTaps; ++j) {
          const int step = base + j;
          if (step >= steps) break;
          if (is_leader) load_next();
          ring.wait_full(at);
          const unsigned char* stage = stages + at.stage * g.stage_bytes;
          uint32_t a[4][4];
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            uint2 pixels[4];
            uint32_t pairs[4][2];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              pixels[i] = make_uint2(0, 0);
              if (from_x[i] < 0) continue;
              pixels[i] = *reinterpret_cast<const uint2*>(stage + from_x[i] + half * 512);
            }
            pair_pixels(pixels, pairs);
#pragma unroll
            for (int ch = 0; ch < 4; ++ch)
              a[ch][half] = pairs[ch][0], a[ch][2 + half] = pairs[ch][1];
          }
          if (step < s.p) {
            uint2 pixels[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              pixels[i] = make_uint2(0, 0);
              if (from_x[i] < 0) continue;
              pixels[i] = *reinterpret_cast<const uint2*>(stage + from_dy[i]);
            }
            pair_pixels(pixels, dy[j]);
#pragma unroll
            for (int ch = 0; ch < 4; ++ch) {
              const float2 low = widen_pair(dy[j][ch][0], T{}),
                           high = widen_pair(dy[j][ch][1], T{});
              bias[ch] += (low.x + low.y) + (high.x + high.y);
            }
          }
          __syncwarp();
          ring.release(at);
          at.next();
#pragma unroll
          for (int r = 0; r < kTaps; ++r) {
            // A row of dy outside of the image meets rows of x that exist, maybe with infinities.
            if (step < r || step - r >= s.p) continue;
#pragma unroll
            for (int ch = 0; ch < 4; ++ch) {
              mma_m16n8k16(acc[r][ch], a[ch], dy[(j - r + kTaps) % kTaps][ch], T{});
            }
          }
        }
      }
    }

    float* const sums =
        reinterpret_cast<float*>(stages + kColumnsStages * g.stage_bytes) + warp * (4 * 128);
    float* const mine = partials + int64_t{part} * kSums * s.c + channel;
    const DepthwisePart sums_of{part,    g.parts, g.units, g.col_tiles, g.segments * kColumnsRun,
                                g.images};
#pragma unroll
    for (int r = 0; r < kTaps; ++r) {
      __syncwarp();
#pragma unroll
      for (int ch = 0; ch < 4; ++ch) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          sums[ch * 128 + (row + e / 2 * 8) * 8 + 2 * t + e % 2] = acc[r][ch][e];
        }
      }
      __syncwarp();
      for (int e = lane; e < 4 * kTaps; e += 32) {
        const int ch = e / kTaps, tap = e % kTaps;
        const float* diagonal = sums + ch * 128 + tap * 8;
        float sum = tree_sum<8>([&](int q) { return diagonal[q * 9]; });
        if (channel + ch >= s.c) continue;
        if (sum != sum) {  // maybe a zero past the row's end times an infinity
          sum = exact_depthwise_tap(x, grad, channel + ch, r, tap, 1, sums_of, s);
        }
        mine[int64_t{r * kTaps + tap} * s.c + ch] = sum;
      }
    }
#pragma unroll
    for (int ch = 0; ch < 4; ++ch) {
      const float sum = warp_reduce(bias[ch], Sum{});
      if (lane == 0 && channel + ch < s.c) mine[int64_t{kSums - 1} * s.c + ch] = sum;
    }
  }
}

}  // namespace warpwright
