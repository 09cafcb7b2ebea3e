// Weight gradient: a thread holds a few taps of kRunK outputs in registers while it walks pixels.
// With few taps grad_output is read once, and the input's rows come from L1. CTAs write partial
// sums to the workspace, which a second kernel adds in order. The bias gradient is one more tap,
// with input 1.
#include "common/switch.h"
#include "ops/conv2d/cuda/direct/direct.cuh"
#include "ops/conv2d/cuda/direct/wgrad.h"

namespace warpwright {
namespace {

// Taps whose sums over the slices pass through shared memory together.
template <class A>
constexpr int kRoundTaps = sizeof(A) == 8 ? 1 : 3;

// Sums `count` values, `step` apart, as eight interleaved runs, which are added in pairs. In one
// long chain, every addition would round at the size of the whole sum.
template <class A>
__device__ __forceinline__ A sum_in_runs(const A* values, int count, int step) {
  constexpr int kRuns = 8;
  A runs[kRuns] = {};
  for (int first = 0; first < count; first += kRuns) {
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      if (first + i < count) runs[i] += values[(first + i) * step];
    }
  }
#pragma unroll
  for (int width = kRuns / 2; width > 0; width /= 2) {
#pragma unroll
    for (int i = 0; i < width; ++i) runs[i] += runs[i + width];
  }
  return runs[0];
}

// Loads a thread's kRunQ outputs of kRunK channels from k on. Only `run` outputs exist; the others
// are zeros.
template <bool kIsVec, class T, class A>
__device__ __forceinline__ void load_dy(const T* dy, const DirectUnit& unit, int k, int run,
                                        const DirectShape& g, A (&to)[kRunQ][kRunK]) {
  const T* from = dy + unit.image * g.y_image + unit.p * g.y_row + unit.q * g.y_col + k * g.y_chan;
  if (g.channels_last) {
#pragma unroll
    for (int j = 0; j < kRunQ; ++j) {
      load_run<kRunK, kIsVec>(from + j * g.y_col, dy, j < run ? g.k - k : 0, to[j]);
    }
  } else {
#pragma unroll
    for (int v = 0; v < kRunK; ++v) {
      A row[kRunQ];
      load_run<kRunQ, kIsVec>(from + v * g.y_chan, dy, k + v < g.k ? run : 0, row);
#pragma unroll
      for (int j = 0; j < kRunQ; ++j) to[j][v] = row[j];
    }
  }
}

// Sums acc over the slices, a round of taps at a time, and stores the part's sums. `sums`: shared
// memory (kRoundTaps * kRunK, smem_pitch).
template <int kTaps, class A>
__device__ __forceinline__ void leave_sums(const A (&acc)[kTaps + 1][kRunK], const DirectShape& g,
                                           const DirectWgradWalk& walk, int chunk, int part,
                                           A* sums, A* partials) {
  const int tid = threadIdx.x;
  const int pitch_k = walk.k_tiles * kRunK;
  const int window = g.r * g.s;
  A* to = partials + int64_t{part} * int64_t{g.group_c * window + 1} * pitch_k;
  constexpr int kRound = kRoundTaps<A>;
#pragma unroll
  for (int begin = 0; begin <= kTaps; begin += kRound) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kRound * kRunK; ++i) {
      const int tap = begin + i / kRunK;
      if (tap <= kTaps) sums[i * walk.smem_pitch + tid] = acc[tap][i % kRunK];
    }
    __syncthreads();
    for (int e = tid; e < kRound * kRunK * walk.cta_tiles; e += blockDim.x) {
      const int e_tile = e % walk.cta_tiles, value = e / walk.cta_tiles;
      const int t = chunk * walk.cta_tiles + e_tile;
      const int tap = begin + value / kRunK;
      const int group = t / walk.k_tiles;
      if (t >= walk.tiles || tap > kTaps || (tap == kTaps && group != 0)) continue;
      const A* column =
          sums + value * walk.smem_pitch + (g.channels_last ? e_tile : e_tile * walk.slices);
      const int step = g.channels_last ? walk.cta_tiles : 1;
      const A sum = sum_in_runs(column, walk.slices, step);
      const int place = tap == kTaps ? g.group_c * window
                                     : group % g.group_c * window + group / g.group_c * kTaps + tap;
      to[int64_t{place} * pitch_k + (t % walk.k_tiles) * kRunK + value % kRunK] = sum;
    }
  }
}

// kIsVec: dy, and x if kDepthwise (then NHWC), in vectors.
// kR x kS taps per thread, with dilation 1 along the row and stride kStride; kR = kS = 1: any
// window. Layout: x (N, H, W, C) or (N, C, H, W), dy (N, P, Q, K) or (N, K, P, Q), partials (parts,
// taps + 1, k_tiles * kRunK). Grid: CTA b has chunk b % chunks of the tiles and part b / chunks of
// the pixels.
template <class T, int kR, int kS, int kStride, bool kDepthwise, bool kIsVec>
__global__ void __launch_bounds__(direct_wgrad_threads(kR), direct_wgrad_ctas(kR, sizeof(T) == 8))
    conv2d_direct_wgrad_kernel(const T* x, const T* dy, Accum<T>* partials, DirectShape g,
                               DirectWgradWalk walk) {
  using A = Accum<T>;
  constexpr int kTaps = kR * kS;
  constexpr int kWindow = (kRunQ - 1) * kStride + kS;
  constexpr int kXs = kDepthwise ? kRunK : 1;
  extern __shared__ __align__(16) unsigned char shared[];

  // NHWC: neighbouring threads have neighbouring channels; NCHW: neighbouring pixels.
  const int tid = threadIdx.x;
  const int local_tile = g.channels_last ? tid % walk.cta_tiles : tid / walk.slices;
  const int slice = g.channels_last ? tid / walk.cta_tiles : tid % walk.slices;
  const int chunk = blockIdx.x % walk.chunks, part = blockIdx.x / walk.chunks;
  const int tile = chunk * walk.cta_tiles + local_tile;
  const int k = (tile % walk.k_tiles) * kRunK;
  const int tap_tile = tile / walk.k_tiles;
  const int c = tap_tile % g.group_c;
  const int first_tap = tap_tile / g.group_c * kTaps;  // of the window
  const int r0 = first_tap / g.s, s0 = first_tap % g.s;
  const bool is_active = local_tile < walk.cta_tiles && slice < walk.slices && tile < walk.tiles;
  const bool adds_bias = walk.has_bias && tap_tile == 0;

  auto load_x = [&](const T* pixel, bool exists, A(&to)[kXs]) {
    if constexpr (!kDepthwise) {
      to[0] = exists ? convert<A>(*pixel) : A(0);
    } else if constexpr (kIsVec) {
      load_run<kRunK, true>(pixel + k, x, exists ? g.k - k : 0, to);
    } else {
#pragma unroll
      for (int v = 0; v < kRunK; ++v) {
        to[v] =
            exists && k + v < g.k ? convert<A>(pixel[((k + v) / g.multiplier) * g.x_chan]) : A(0);
      }
    }
  };

  A acc[kTaps + 1][kRunK] = {};  // the last is the bias
  const int end = is_active ? min((part + 1) * walk.part_units, g.units) : 0;
  for (int index = part * walk.part_units + slice; index < end; index += walk.slices) {
    const DirectUnit unit = direct_unit(g, index, kRunQ);
    const int run = min(g.q - unit.q, kRunQ);
    A rDy[kRunQ][kRunK];
    load_dy<kIsVec>(dy, unit, k, run, g, rDy);
    const int w0 = unit.q * g.stride_w - g.pad_w + s0 * g.dilation_w;
    const T* image = x + unit.image * g.x_image + c * g.x_chan + w0 * g.x_col;
    auto load_pixel = [&](int r, int i, A(&to)[kXs]) {
      const int h = unit.p * g.stride_h - g.pad_h + (r0 + r) * g.dilation_h;
      // The columns of a single tap are stride_w apart, which only the host knows.
      const int column = kTaps == 1 ? i * g.stride_w : i;
      load_x(image + h * g.x_row + column * g.x_col,
             is_inside(h, g.h) && is_inside(w0 + column, g.w), to);
    };
    if (adds_bias) {
#pragma unroll
      for (int j = 0; j < kRunQ; ++j) {
#pragma unroll
        for (int v = 0; v < kRunK; ++v) acc[kTaps][v] += rDy[j][v];
      }
    }
    // j < run: past the row's end dy is zero, but an infinite x would make the product NaN.
#pragma unroll
    for (int r = 0; r < kR; ++r) {
      if constexpr (kDepthwise) {
#pragma unroll
        for (int i = 0; i < kWindow; ++i) {
          A rX[kXs];
          load_pixel(r, i, rX);
#pragma unroll
          for (int s = 0; s < kS; ++s) {
            const int j = (i - s) / kStride;
            if (i < s || (i - s) % kStride != 0 || j >= kRunQ) continue;
#pragma unroll
            for (int v = 0; v < kRunK; ++v) {
              acc[r * kS + s][v] += rDy[j][v] * (j < run ? rX[v] : A(0));
            }
          }
        }
      } else {
        A rX[kWindow][kXs];
#pragma unroll
        for (int i = 0; i < kWindow; ++i) load_pixel(r, i, rX[i]);
#pragma unroll
        for (int j = 0; j < kRunQ; ++j) {
          if (j >= run) break;
#pragma unroll
          for (int s = 0; s < kS; ++s) {
#pragma unroll
            for (int v = 0; v < kRunK; ++v) {
              acc[r * kS + s][v] += rDy[j][v] * rX[j * kStride + s][0];
            }
          }
        }
      }
    }
  }

  leave_sums<kTaps>(acc, g, walk, chunk, part, reinterpret_cast<A*>(shared), partials);
}

constexpr int kReduceOutputs = 32, kReduceLanes = 16;

// Layout: partials (parts, taps + 1, pitch_k); dw like the weight; db (K) or null.
// Grid: CTA b sums 32 neighbouring places, each in 16 interleaved runs that are added in order.
// Sums are in double, which the reads hide.
template <class A, class Out>
__global__ void __launch_bounds__(kReduceOutputs* kReduceLanes)
    conv2d_direct_wgrad_sum_kernel(const A* partials, Out* dw, Out* db, DirectShape g, int parts,
                                   int pitch_k) {
  __shared__ double shared[kReduceLanes][kReduceOutputs];
  const int column = threadIdx.x % kReduceOutputs, lane = threadIdx.x / kReduceOutputs;
  const int window = g.r * g.s, taps = g.group_c * window;
  const int64_t part_elements = int64_t{taps + 1} * pitch_k;
  const int64_t place = int64_t{blockIdx.x} * kReduceOutputs + column;
  double sum = 0;
  if (place < part_elements) {
#pragma unroll 8
    for (int part = lane; part < parts; part += kReduceLanes) {
      sum += partials[part * part_elements + place];
    }
  }
  shared[lane][column] = sum;
  __syncthreads();
  if (lane != 0 || place >= part_elements) return;
#pragma unroll
  for (int i = 1; i < kReduceLanes; ++i) sum += shared[i][column];
  const int tap = static_cast<int>(place / pitch_k), k = static_cast<int>(place % pitch_k);
  if (k >= g.k) return;
  if (tap < taps) {
    dw[int64_t{k} * taps + tap / window * g.w_chan + tap % window * g.w_tap] =
        convert<Out>(static_cast<A>(sum));
  } else if (db != nullptr) {
    db[k] = convert<Out>(static_cast<A>(sum));
  }
}

}  // namespace

void launch_direct_wgrad_sum(const Conv2dBackwardParams& p, int parts, int pitch_k,
                             const void* partials, cudaStream_t stream) {
  const DirectShape g(p.shape, kRunQ);
  const int64_t blocks = ceil_div<int64_t>(int64_t{g.taps() + 1} * pitch_k, kReduceOutputs);
  for_dtype(p.shape.dtype, [&]<class T>() {
    using A = Accum<T>;
    auto launch_to = [&]<class Out>() {
      launch(conv2d_direct_wgrad_sum_kernel<A, Out>, dim3(static_cast<unsigned>(blocks)),
             dim3(kReduceOutputs * kReduceLanes), 0, stream, static_cast<const A*>(partials),
             static_cast<Out*>(p.grad_weight), static_cast<Out*>(p.grad_bias), g, parts, pitch_k);
    };
    p.float32_parameters ? launch_to.template operator()<A>() : launch_to.template operator()<T>();
  });
}

void launch_direct_wgrad(const Conv2dBackwardParams& p, const DirectWgradConfig& config,
                         void* workspace, cudaStream_t stream) {
  const DirectShape g(p.shape, kRunQ);
  DirectWgradWalk walk = config.walk;
  walk.has_bias = p.grad_bias != nullptr;
  for_dtype(p.shape.dtype, [&]<class T>() {
    using A = Accum<T>;
    auto run = [&]<int kR, int kS, int kStride, bool kDepthwise, bool kIsVec>() {
      const int64_t smem = int64_t{kRoundTaps<A>} * kRunK * walk.smem_pitch * sizeof(A);
      launch(conv2d_direct_wgrad_kernel<T, kR, kS, kStride, kDepthwise, kIsVec>,
             dim3(static_cast<unsigned>(walk.parts * walk.chunks)), dim3(direct_wgrad_threads(kR)),
             smem, stream, static_cast<const T*>(p.input), static_cast<const T*>(p.grad_output),
             static_cast<A*>(workspace), g, walk);
    };
    for_bool(config.vectorized, [&]<bool kIsVec>() {
      if constexpr (sizeof(T) <= 4) {
        if constexpr (kIsVec) {
          if (config.depthwise && config.tap_cols == 3) {
            return g.stride_w == 1 ? run.template operator()<1, 3, 1, true, true>()
                                   : run.template operator()<1, 3, 2, true, true>();
          }
        }
        if (config.tap_cols == 3) return run.template operator()<3, 3, 1, false, kIsVec>();
        if (config.tap_cols == 5) return run.template operator()<1, 5, 1, false, kIsVec>();
      }
      return config.depthwise ? run.template operator()<1, 1, 1, true, kIsVec>()
                              : run.template operator()<1, 1, 1, false, kIsVec>();
    });
  });
  launch_direct_wgrad_sum(p, walk.parts, config.pitch_k(), workspace, stream);
}

}  // namespace warpwright
