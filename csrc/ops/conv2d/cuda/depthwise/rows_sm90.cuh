// Depthwise kernels of channels-last images on sm_90a: fprop, dgrad of stride 2, and wgrad. One
// warp copies rows of a box to a ring of stages by TMA; the other warps walk down the rows.
#pragma once

#include "device/mma_sm80.cuh"
#include "device/sm90/arch.cuh"
#include "device/sm90/tma.cuh"
#include "device/vec.cuh"
#include "ops/conv2d/cuda/depthwise/exact.cuh"
#include "ops/conv2d/cuda/depthwise/rows.h"
#include "tile/loaded_stage_sm90.cuh"
#include "tile/stage_ring_sm90.cuh"

namespace warpwright {

// The call's extents in 32 bits. x and y are what TMA reads and the threads write.
struct DepthwiseRowsShape {
  int n, c;
  int rows, cols;  // of the tensor that is written (wgrad: of dy)
  int pad_h, pad_w;
};

// One walk of a CTA: `rows` rows from `row` on, of the strips from column `col` on.
struct DepthwiseRowsUnit {
  int image, row, col, rows;

  __device__ __forceinline__ DepthwiseRowsUnit(const DepthwiseRowsWalk& g, int unit, int all_rows,
                                               int run) {
    col = unit % g.col_tiles * g.strips * run;
    const int rest = unit / g.col_tiles;
    row = rest % g.row_tiles * g.tile_rows;
    rows = min(g.tile_rows, all_rows - row);
    image = rest / g.row_tiles * g.images;
  }
};

// The part of a box that a consumer thread has.
struct DepthwiseRowsThread {
  int channel, strip, image;  // within the box
  bool is_active;

  __device__ __forceinline__ explicit DepthwiseRowsThread(const DepthwiseRowsWalk& g) {
    const int pairs = g.box_channels / kRowsPair;
    const int rest = threadIdx.x / pairs;
    channel = static_cast<int>(threadIdx.x) % pairs * kRowsPair;
    strip = rest % g.strips;
    image = rest / g.strips;
    is_active = image < g.images;
    if (!is_active) channel = strip = image = 0;
  }
};

template <class T>
using DepthwiseRing = StageRing<depthwise_rows_stages(sizeof(T))>;

// Initialises the ring's barriers; all threads of the CTA call it. The last warp is the producer.
template <class T>
__device__ __forceinline__ DepthwiseRing<T> make_depthwise_ring(uint64_t* barriers) {
  const DepthwiseRing<T> ring{smem_address(barriers)};
  if (threadIdx.x == 0) {
    ring.init(static_cast<int>(blockDim.x / 32) - 1);
    fence_mbarrier_init();
  }
  __syncthreads();
  return ring;
}
__device__ __forceinline__ bool is_producer_warp() {
  return threadIdx.x / 32 == blockDim.x / 32 - 1;
}

// The rows of a unit that the producer copies: `steps` from `row` on, of columns from `col` on.
struct DepthwiseRowsWindow {
  int steps, row, col;
};

// The producer's part of a kernel with one tensor: window(unit) says what the unit reads.
template <class T, class Window>
__device__ __forceinline__ void send_depthwise_rows(const DepthwiseRing<T>& ring,
                                                    const CUtensorMap* map,
                                                    const DepthwiseRowsWalk& g, int all_rows,
                                                    int run, unsigned char* stages,
                                                    Window&& window) {
  if (threadIdx.x % 32 != 0) return;
  const int first_channel = static_cast<int>(blockIdx.x) % g.chunks * g.box_channels;
  const int bytes = g.box_channels * g.box_cols * g.images * static_cast<int>(sizeof(T));
  typename DepthwiseRing<T>::Cursor at;
  for (int unit = static_cast<int>(blockIdx.x) / g.chunks; unit < g.units; unit += g.parts) {
    const DepthwiseRowsUnit u(g, unit, all_rows, run);
    const DepthwiseRowsWindow w = window(u);
    for (int i = 0; i < w.steps; ++i) {
      ring.wait_empty(at);
      ring.expect(at, bytes);
      tma_load_4d(smem_address(stages + at.stage * g.stage_bytes), map, first_channel, w.col,
                  w.row + i, u.image, ring.full(at.stage));
      at.next();
    }
  }
}

// Loads kCount columns of a thread's two channels from a stage, and hands the stage back.
template <int kCount, class T>
__device__ __forceinline__ void load_columns(const T* from, int pitch, Vec<T, 2> (&to)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) to[i] = load_vec<2>(from + i * pitch);
}

template <int kTaps, class T>
__device__ __forceinline__ void load_depthwise_weights(const T* w, int channel, int channels,
                                                       bool flip,
                                                       float (&to)[kTaps * kTaps][kRowsPair]) {
  constexpr int kWindow = kTaps * kTaps;
#pragma unroll
  for (int t = 0; t < kWindow; ++t) {
#pragma unroll
    for (int v = 0; v < kRowsPair; ++v) {
      const bool exists = channel + v < channels;
      const int64_t at = int64_t{channel + v} * kWindow + (flip ? kWindow - 1 - t : t);
      to[t][v] = exists ? convert<float>(w[at]) : 0.f;
    }
  }
}

template <class T>
__device__ __forceinline__ void store_channels(T* to, const float (&values)[kRowsPair]) {
  Vec<T, kRowsPair> packed;
#pragma unroll
  for (int v = 0; v < kRowsPair; ++v) packed[v] = convert<T>(values[v]);
  store_vec(to, packed);
}

// Layout: x (N, H, W, C) by `map`, w (C, kTaps, kTaps), bias (C) or null, y (N, P, Q, C).
// Grid: CTA b has the channels of chunk b % chunks and the units b / chunks + i * parts.
template <class T, int kTaps, int kStride>
__global__ void __launch_bounds__(depthwise_rows_threads(kTaps) + 32, depthwise_rows_ctas(kTaps))
    conv2d_depthwise_rows_fprop_kernel(const __grid_constant__ CUtensorMap map, const T* w,
                                       const T* bias, T* y, DepthwiseRowsShape s,
                                       DepthwiseRowsWalk g, bool flip) {
  if constexpr (kHasSm90a) {
    constexpr int kLive = (kTaps + kStride - 1) / kStride;  // rows of y that a row of x reaches
    constexpr int kPeriod = kLive * kStride;
    constexpr int kCols = (kRowsRun - 1) * kStride + kTaps;
    using Ring = DepthwiseRing<T>;
    extern __shared__ __align__(128) unsigned char stages[];
    __shared__ __align__(8) uint64_t barriers[Ring::kBarrierBytes / 8];
    const Ring ring = make_depthwise_ring<T>(barriers);
    const int first_channel = static_cast<int>(blockIdx.x) % g.chunks * g.box_channels;
    const int part = static_cast<int>(blockIdx.x) / g.chunks;
    typename Ring::Cursor at;

    if (is_producer_warp()) {
      send_depthwise_rows<T>(ring, &map, g, s.rows, kRowsRun, stages,
                             [&](const DepthwiseRowsUnit& u) -> DepthwiseRowsWindow {
                               return {(u.rows - 1) * kStride + kTaps, u.row * kStride - s.pad_h,
                                       u.col * kStride - s.pad_w};
                             });
      return;
    }

    const DepthwiseRowsThread me(g);
    const int channel = first_channel + me.channel;
    const bool has_channel = me.is_active && channel < s.c;
    float weights[kTaps * kTaps][kRowsPair], b[kRowsPair];
    load_depthwise_weights<kTaps>(w, channel, s.c, flip, weights);
#pragma unroll
    for (int v = 0; v < kRowsPair; ++v) {
      b[v] = bias != nullptr && channel + v < s.c ? convert<float>(bias[channel + v]) : 0.f;
    }
    const T* mine = reinterpret_cast<const T*>(stages) +
                    (me.image * g.box_cols + me.strip * kRowsRun * kStride) * g.box_channels +
                    me.channel;
    float acc[kLive][kRowsRun][kRowsPair];
    for (int unit = part; unit < g.units; unit += g.parts) {
      const DepthwiseRowsUnit u(g, unit, s.rows, kRowsRun);
      const int steps = (u.rows - 1) * kStride + kTaps;
      const int image = u.image + me.image, col = u.col + me.strip * kRowsRun;
      const int run = has_channel && image < s.n ? s.cols - col : 0;  // columns that exist
      const int64_t row_pitch = int64_t{s.cols} * s.c;
      T* out = y + (int64_t{image} * s.rows + u.row) * row_pitch + int64_t{col} * s.c + channel;
      for (int base = 0; base < steps; base += kPeriod) {
#pragma unroll
        for (int j = 0; j < kPeriod; ++j) {
          if (base + j >= steps) break;
          Vec<T, 2> loaded[kCols];
          ring.wait_full(at);
          load_columns(mine + at.stage * (g.stage_bytes / static_cast<int>(sizeof(T))),
                       g.box_channels, loaded);
          release_loaded(ring, at);
          at.next();
          if (j % kStride == 0) {
#pragma unroll
            for (int q = 0; q < kRowsRun; ++q) {
#pragma unroll
              for (int v = 0; v < kRowsPair; ++v) acc[j / kStride][q][v] = b[v];
            }
          }
#pragma unroll
          for (int i = 0; i < kCols; ++i) {
            const Vec<float, 2> value = widen(loaded[i]);
#pragma unroll
            for (int r = 0; r < kTaps; ++r) {
              if ((j + kPeriod * kTaps - r) % kStride != 0) continue;
              const int slot = (j + kPeriod * kTaps - r) / kStride % kLive;
#pragma unroll
              for (int q = 0; q < kRowsRun; ++q) {
                const int tap = i - q * kStride;
                if (tap < 0 || tap >= kTaps) continue;
#pragma unroll
                for (int v = 0; v < kRowsPair; ++v) {
                  acc[slot][q][v] += value[v] * weights[r * kTaps + tap][v];
                }
              }
            }
          }
          if ((j + kPeriod * kTaps - (kTaps - 1)) % kStride == 0 && base + j >= kTaps - 1) {
            constexpr int kLast = kTaps - 1;
            const int slot = (j + kPeriod * kTaps - kLast) / kStride % kLive;
#pragma unroll
            for (int q = 0; q < kRowsRun; ++q) {
              if (q < run) store_channels(out + int64_t{q} * s.c, acc[slot][q]);
            }
            out += row_pitch;
          }
        }
      }
    }
  }
}

// dgrad of stride 2. In the padded dx, dy (p, q) reaches rows 2p .. 2p + kTaps - 1. A thread has
// pairs of rows and columns: one element of each phase.
// Layout: dy (N, P, Q, C) by `map`, w (C, kTaps, kTaps), dx (N, H, W, C). Grid: as fprop.
template <class T, int kTaps>
__global__ void __launch_bounds__(depthwise_rows_threads(kTaps) + 32, depthwise_rows_ctas(kTaps))
    conv2d_depthwise_rows_dgrad_kernel(const __grid_constant__ CUtensorMap map, const T* w, T* dx,
                                       DepthwiseRowsShape s, DepthwiseRowsWalk g, int pair_rows) {
  if constexpr (kHasSm90a) {
    constexpr int kLive = (kTaps + 1) / 2;
    constexpr int kRun = kRowsRun / 2;
    constexpr int kCols = kRun + kLive - 1;
    using Ring = DepthwiseRing<T>;
    extern __shared__ __align__(128) unsigned char stages[];
    __shared__ __align__(8) uint64_t barriers[Ring::kBarrierBytes / 8];
    const Ring ring = make_depthwise_ring<T>(barriers);
    const int first_channel = static_cast<int>(blockIdx.x) % g.chunks * g.box_channels;
    const int part = static_cast<int>(blockIdx.x) / g.chunks;
    const int first_row = s.pad_h / 2, first_col = s.pad_w / 2;  // pairs before dx
    typename Ring::Cursor at;

    if (is_producer_warp()) {
      send_depthwise_rows<T>(ring, &map, g, pair_rows, kRun, stages,
                             [&](const DepthwiseRowsUnit& u) -> DepthwiseRowsWindow {
                               return {u.rows + kLive - 1, first_row + u.row - (kLive - 1),
                                       first_col + u.col - (kLive - 1)};
                             });
      return;
    }

    const DepthwiseRowsThread me(g);
    const int channel = first_channel + me.channel;
    const bool has_channel = me.is_active && channel < s.c;
    float weights[kTaps * kTaps][kRowsPair];
    load_depthwise_weights<kTaps>(w, channel, s.c, false, weights);
    const T* mine = reinterpret_cast<const T*>(stages) +
                    (me.image * g.box_cols + me.strip * kRun) * g.box_channels + me.channel;
    float acc[kLive][2][kRowsRun][kRowsPair];
    for (int unit = part; unit < g.units; unit += g.parts) {
      const DepthwiseRowsUnit u(g, unit, pair_rows, kRun);
      const int image = u.image + me.image;
      const bool exists = has_channel && image < s.n;
      const int col = 2 * (first_col + u.col + me.strip * kRun) - s.pad_w;
      const int row = 2 * (first_row + u.row) - s.pad_h;
      T* plane = dx + int64_t{image} * s.rows * s.cols * s.c + channel;
      const int steps = u.rows + kLive - 1;
      for (int base = 0; base < steps; base += kLive) {
#pragma unroll
        for (int j = 0; j < kLive; ++j) {
          if (base + j >= steps) break;
          Vec<T, 2> loaded[kCols];
          ring.wait_full(at);
          load_columns(mine + at.stage * (g.stage_bytes / static_cast<int>(sizeof(T))),
                       g.box_channels, loaded);
          release_loaded(ring, at);
          at.next();
          // Step i brings dy's row i - (kLive - 1); the pair i is new, its rows are in slot j.
#pragma unroll
          for (int a = 0; a < 2; ++a) {
#pragma unroll
            for (int q = 0; q < kRowsRun; ++q) {
#pragma unroll
              for (int v = 0; v < kRowsPair; ++v) acc[j][a][q][v] = 0.f;
            }
          }
#pragma unroll
          for (int i = 0; i < kCols; ++i) {
            const Vec<float, 2> value = widen(loaded[i]);
#pragma unroll
            for (int r = 0; r < kTaps; ++r) {
              const int slot = (j + 1 + r / 2) % kLive;
#pragma unroll
              for (int tap = 0; tap < kTaps; ++tap) {
                const int pair = i - (kLive - 1) + tap / 2;
                if (pair < 0 || pair >= kRun) continue;
#pragma unroll
                for (int v = 0; v < kRowsPair; ++v) {
                  acc[slot][r % 2][2 * pair + tap % 2][v] += value[v] * weights[r * kTaps + tap][v];
                }
              }
            }
          }
          const int done = base + j - (kLive - 1);
          if (done < 0) continue;
#pragma unroll
          for (int a = 0; a < 2; ++a) {
            const int h = row + 2 * done + a;
            if (static_cast<unsigned>(h) >= static_cast<unsigned>(s.rows)) continue;
            T* out = plane + (int64_t{h} * s.cols + col) * s.c;
#pragma unroll
            for (int q = 0; q < kRowsRun; ++q) {
              if (exists && static_cast<unsigned>(col + q) < static_cast<unsigned>(s.cols)) {
                store_channels(out + int64_t{q} * s.c, acc[(j + 1) % kLive][a][q]);
              }
            }
          }
        }
      }
    }
  }
}

// Adds the sums of a CTA's strips and images in order, some taps at a time, and stores the part's.
// All threads of the CTA call it. `shared` (kRound, threads, kRowsPair). exact(channel, place): the
// sum of a tap from its own products.
template <int kSums, class F>
__device__ __forceinline__ void leave_depthwise_sums(const float (&acc)[kSums][kRowsPair],
                                                     const DepthwiseRowsWalk& g, int channels,
                                                     int first_channel, int part, float* shared,
                                                     float* partials, F&& exact) {
  constexpr int kRound = 5;
  const int threads = static_cast<int>(blockDim.x), tid = static_cast<int>(threadIdx.x);
  const int rest = g.strips * g.images;
#pragma unroll
  for (int begin = 0; begin < kSums; begin += kRound) {
    __syncthreads();
#pragma unroll
    for (int t = 0; t < kRound; ++t) {
      if (begin + t >= kSums) continue;
#pragma unroll
      for (int v = 0; v < kRowsPair; ++v) {
        shared[(t * threads + tid) * kRowsPair + v] = acc[begin + t][v];
      }
    }
    __syncthreads();
    for (int e = tid; e < kRound * g.box_channels; e += threads) {
      const int t = e / g.box_channels, c = e % g.box_channels;
      if (begin + t >= kSums || first_channel + c >= channels) continue;
      float sum = 0;
      for (int i = 0; i < rest; ++i) {
        sum += shared[t * threads * kRowsPair + i * g.box_channels + c];
      }
      if (sum != sum && begin + t < kSums - 1) sum = exact(first_channel + c, begin + t);
      partials[(int64_t{part} * kSums + begin + t) * channels + first_channel + c] = sum;
    }
  }
}

// The producer's part of wgrad.
template <class T, int kStride>
__device__ __forceinline__ void send_depthwise_pairs(
    const DepthwiseRing<T>& ring, const CUtensorMap* x_map, const CUtensorMap* dy_map,
    const DepthwiseImage& s, const DepthwiseRowsWalk& g, int steps, unsigned char* stages) {
  if (threadIdx.x % 32 != 0) return;
  const int first_channel = static_cast<int>(blockIdx.x) % g.chunks * g.box_channels;
  const int size = g.box_channels * g.images * static_cast<int>(sizeof(T));
  typename DepthwiseRing<T>::Cursor at;
  for (int unit = static_cast<int>(blockIdx.x) / g.chunks; unit < g.units; unit += g.parts) {
    const DepthwiseRowsUnit u(g, unit, s.p, kRowsRun);
    for (int i = 0; i < steps; ++i) {
      const bool has_dy = i % kStride == 0 && i / kStride < s.p;
      unsigned char* stage = stages + at.stage * g.stage_bytes;
      ring.wait_empty(at);
      ring.expect(at, size * (g.box_cols + (has_dy ? g.strips * kRowsRun : 0)));
      tma_load_4d(smem_address(stage), x_map, first_channel, u.col * kStride - s.pad_w, i - s.pad_h,
                  u.image, ring.full(at.stage));
      if (has_dy) {
        tma_load_4d(smem_address(stage + g.stage_bytes - g.dy_bytes), dy_map, first_channel, u.col,
                    i / kStride, u.image, ring.full(at.stage));
      }
      at.next();
    }
  }
}

// Layout: x (N, H, W, C) by `x_map`, dy (N, P, Q, C) by `dy_map`, partials (parts, taps + 1, C);
// the last is the bias. Grid: as fprop. A stage has a row of x, and every kStride-th a row of dy.
// x_tensor and dy_tensor are read only if a sum is NaN.
template <class T, int kTaps, int kStride>
__global__ void __launch_bounds__(depthwise_rows_threads(kTaps) + 32, depthwise_rows_ctas(kTaps))
    conv2d_depthwise_rows_wgrad_kernel(const __grid_constant__ CUtensorMap x_map,
                                       const __grid_constant__ CUtensorMap dy_map,
                                       const T* x_tensor, const T* dy_tensor, float* partials,
                                       DepthwiseImage s, DepthwiseRowsWalk g) {
  if constexpr (kHasSm90a) {
    constexpr int kLive = (kTaps + kStride - 1) / kStride;  // rows of dy that a row of x meets
    constexpr int kPeriod = kLive * kStride;
    constexpr int kCols = (kRowsRun - 1) * kStride + kTaps;
    constexpr int kSums = kTaps * kTaps + 1;
    using Ring = DepthwiseRing<T>;
    extern __shared__ __align__(128) unsigned char stages[];
    __shared__ __align__(8) uint64_t barriers[Ring::kBarrierBytes / 8];
    const Ring ring = make_depthwise_ring<T>(barriers);
    const int first_channel = static_cast<int>(blockIdx.x) % g.chunks * g.box_channels;
    const int part = static_cast<int>(blockIdx.x) / g.chunks;
    const int steps = (s.p - 1) * kStride + kTaps;
    typename Ring::Cursor at;
    float acc[kSums][kRowsPair] = {};

    if (is_producer_warp()) {
      send_depthwise_pairs<T, kStride>(ring, &x_map, &dy_map, s, g, steps, stages);
    } else {
      const DepthwiseRowsThread me(g);
      const T* my_x = reinterpret_cast<const T*>(stages) +
                      (me.image * g.box_cols + me.strip * kRowsRun * kStride) * g.box_channels +
                      me.channel;
      const T* my_dy = reinterpret_cast<const T*>(stages + g.stage_bytes - g.dy_bytes) +
                       (me.image * g.strips + me.strip) * kRowsRun * g.box_channels + me.channel;
      float dy[kLive][kRowsRun][kRowsPair];
      for (int unit = part; unit < g.units; unit += g.parts) {
        const DepthwiseRowsUnit u(g, unit, s.p, kRowsRun);
        const int run = s.q - (u.col + me.strip * kRowsRun);  // columns that exist
        for (int base = 0; base < steps; base += kPeriod) {
#pragma unroll
          for (int j = 0; j < kPeriod; ++j) {
            const int step = base + j;
            if (step >= steps) break;
            const int stage = at.stage * (g.stage_bytes / static_cast<int>(sizeof(T)));
            Vec<T, 2> loaded[kCols], loaded_dy[kRowsRun];
            const bool has_dy = j % kStride == 0 && step / kStride < s.p;
            ring.wait_full(at);
            load_columns(my_x + stage, g.box_channels, loaded);
            if (has_dy) load_columns(my_dy + stage, g.box_channels, loaded_dy);
            release_loaded(ring, at);
            at.next();
            if (has_dy) {
#pragma unroll
              for (int q = 0; q < kRowsRun; ++q) {
                const Vec<float, 2> value = widen(loaded_dy[q]);
#pragma unroll
                for (int v = 0; v < kRowsPair; ++v) {
                  dy[j / kStride][q][v] = value[v];
                  acc[kSums - 1][v] += value[v];
                }
              }
            }
            float x[kCols][kRowsPair];
#pragma unroll
            for (int i = 0; i < kCols; ++i) {
              const Vec<float, 2> value = widen(loaded[i]);
              x[i][0] = value[0], x[i][1] = value[1];
            }
#pragma unroll
            for (int r = 0; r < kTaps; ++r) {
              if ((j + kPeriod * kTaps - r) % kStride != 0) continue;
              const int slot = (j + kPeriod * kTaps - r) / kStride % kLive;
              // A row of dy outside of the image meets rows of x that exist, maybe with infinities.
              if (step < r || (step - r) / kStride >= s.p) continue;
#pragma unroll
              for (int q = 0; q < kRowsRun; ++q) {
                if (q >= run) continue;
#pragma unroll
                for (int tap = 0; tap < kTaps; ++tap) {
#pragma unroll
                  for (int v = 0; v < kRowsPair; ++v) {
                    acc[r * kTaps + tap][v] += dy[slot][q][v] * x[q * kStride + tap][v];
                  }
                }
              }
            }
          }
        }
      }
    }
    leave_depthwise_sums(acc, g, s.c, first_channel, part, reinterpret_cast<float*>(stages),
                         partials, [&](int channel, int place) {
                           // A zero of the padding or past the row's end may have met an infinity.
                           const DepthwisePart sums_of{
                               part, g.parts, g.units, g.col_tiles, g.strips * kRowsRun, g.images};
                           return exact_depthwise_tap(x_tensor, dy_tensor, channel, place / kTaps,
                                                      place % kTaps, kStride, sums_of, s);
                         });
  }
}

}  // namespace warpwright
