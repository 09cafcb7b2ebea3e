// Forward: the weights of a few dozen outputs stay in shared memory (in registers for 3 x 3 and one
// input channel) while a CTA walks neighbouring runs of pixels. The input's rows then come from L1,
// and the output is the traffic. FMAs in the accumulator's type.
#include "common/switch.h"
#include "ops/conv2d/cuda/direct/direct.cuh"
#include "ops/conv2d/cuda/direct/fprop.h"

namespace warpwright {
namespace {

// Channel `v` of a thread's kRunK, counted within the chunk: neighbouring threads are 16 bytes
// apart.
template <class T>
__device__ __forceinline__ int local_channel(int groups, int group, int v) {
  constexpr int kRun = kVecSize<T> < kRunK ? kVecSize<T> : kRunK;
  return (v / kRun) * (groups * kRun) + group * kRun + v % kRun;
}

// Stages the weights and the bias of a chunk of channels: `shared` (taps + 1, kRunK / 4, groups,
// 4). The 16-byte reads of a warp are then neighbours.
template <int kThreads, class T>
__device__ __forceinline__ void stage_weights(const T* w, const T* bias, const DirectShape& g,
                                              const DirectFpropWalk& walk, int first_k,
                                              Accum<T>* shared) {
  using A = Accum<T>;
  constexpr int kAccVec = kVecSize<A>;
  const int chunk_channels = walk.groups * kRunK;
  const int window = g.r * g.s;
  const int taps = g.group_c * window;
  for (int e = threadIdx.x; e < (taps + 1) * chunk_channels; e += kThreads) {
    const int tap = e / chunk_channels, place = e % chunk_channels;
    const int quarter = place / (walk.groups * kAccVec);
    const int rest = place % (walk.groups * kAccVec);
    const int v = quarter * kAccVec + rest % kAccVec;
    const int k = first_k + local_channel<T>(walk.groups, rest / kAccVec, v);
    const int c = tap / window, rs = walk.flip ? window - 1 - tap % window : tap % window;
    if (k >= g.k) {
      shared[e] = A(0);
    } else if (tap == taps) {
      shared[e] = bias != nullptr ? convert<A>(bias[k]) : A(0);
    } else {
      shared[e] = convert<A>(w[int64_t{k} * taps + c * g.w_chan + rs * g.w_tap]);
    }
  }
}

// The kernel's variant. kS > 0: rows of kS taps, dilation 1, stride kStride. kS = 0: any window,
// tap by tap. kWeightsInRegisters: group_c = 1 and R = S = 3. kIsVec: x in vectors (depthwise,
// NHWC).
template <int kS_, int kStride_, bool kDepthwise_, bool kIsVec_, bool kWeightsInRegisters_>
struct FpropKind {
  static constexpr int kS = kS_, kStride = kStride_;
  static constexpr bool kDepthwise = kDepthwise_, kIsVec = kIsVec_;
  static constexpr bool kWeightsInRegisters = kWeightsInRegisters_;
  static constexpr bool kIsLarge = kDepthwise || kWeightsInRegisters;
  static constexpr int kXs = kDepthwise ? kRunK : 1;  // inputs of one pixel and tap
  static_assert((kS > 0) == (kStride > 0) && (kDepthwise || !kIsVec));
};

// A thread's kRunK channels: their weights in shared memory, and the sums over the window.
template <class T, class Kind>
struct FpropChannels {
  using A = Accum<T>;
  using Sums = A[kRunQ][kRunK];
  static constexpr int kAccVec = kVecSize<A>;
  static constexpr int kRun = kVecSize<T> < kRunK ? kVecSize<T> : kRunK;
  static constexpr int kXs = Kind::kXs;

  const DirectShape& g;
  const T* x;
  const A* weights;    // of the thread's first channel
  int groups;          // groups of kRunK channels per CTA
  int chunk_channels;  // channels per CTA
  int first_k;         // of v = 0
  int run_pitch;       // from v = 0 to v = kRun
  A kept[Kind::kWeightsInRegisters ? 9 : 1][kRunK];

  __device__ __forceinline__ void load_weights(int tap, A (&to)[kRunK]) const {
#pragma unroll
    for (int v = 0; v < kRunK; v += kAccVec) {
      const Vec<A, kAccVec> part = load_vec<kAccVec>(weights + tap * chunk_channels + v * groups);
#pragma unroll
      for (int i = 0; i < kAccVec; ++i) to[v + i] = part[i];
    }
  }

  // Loads one input pixel: one channel, or the channels of the thread's outputs.
  __device__ __forceinline__ void load_x(const T* pixel, bool exists, A (&to)[kXs]) const {
    if constexpr (!Kind::kDepthwise) {
      to[0] = exists ? convert<A>(*pixel) : A(0);
    } else {
#pragma unroll
      for (int v = 0; v < kRunK; v += kRun) {
        const int k = first_k + (v / kRun) * run_pitch;
        if constexpr (Kind::kIsVec) {
          A run[kRun];
          load_run<kRun, true>(pixel + k, x, exists ? g.k - k : 0, run);
#pragma unroll
          for (int i = 0; i < kRun; ++i) to[v + i] = run[i];
        } else {
#pragma unroll
          for (int i = 0; i < kRun; ++i) {
            to[v + i] = exists && k + i < g.k
                            ? convert<A>(pixel[((k + i) / g.multiplier) * g.x_chan])
                            : A(0);
          }
        }
      }
    }
  }

  // Adds the products of one row of the window, whose first tap is `tap`, from columns w0 on.
  __device__ __forceinline__ void add_row(const T* row, bool row_exists, int w0, int64_t x_col,
                                          int tap, Sums& acc) const {
    if constexpr (Kind::kS > 0 && Kind::kDepthwise) {
      add_row_of_vectors(row, row_exists, w0, x_col, tap, acc);
    } else if constexpr (Kind::kS > 0) {
      add_row_of_pixels(row, row_exists, w0, x_col, tap, acc);
    } else {
      for (int s = 0; s < g.s; ++s) {
        A rW[kRunK];
        load_weights(tap + s, rW);
#pragma unroll
        for (int j = 0; j < kRunQ; ++j) {
          const int column = j * g.stride_w + s * g.dilation_w;
          A rX[kXs];
          load_x(row + column * x_col, row_exists && is_inside(w0 + column, g.w), rX);
#pragma unroll
          for (int v = 0; v < kRunK; ++v) acc[j][v] += rX[Kind::kDepthwise ? v : 0] * rW[v];
        }
      }
    }
  }

  // Column by column: an input is a vector here, and a row of them would not fit in registers.
  __device__ __forceinline__ void add_row_of_vectors(const T* row, bool row_exists, int w0,
                                                     int64_t x_col, int tap, Sums& acc) const {
    constexpr int kS = Kind::kS, kStride = Kind::kStride;
    A rW[kS][kRunK];
#pragma unroll
    for (int s = 0; s < kS; ++s) load_weights(tap + s, rW[s]);
#pragma unroll
    for (int i = 0; i < (kRunQ - 1) * kStride + kS; ++i) {
      A rX[kXs];
      load_x(row + i * x_col, row_exists && is_inside(w0 + i, g.w), rX);
#pragma unroll
      for (int s = 0; s < kS; ++s) {
        const int j = (i - s) / kStride;
        if (i < s || (i - s) % kStride != 0 || j >= kRunQ) continue;
#pragma unroll
        for (int v = 0; v < kRunK; ++v) acc[j][v] += rX[v] * rW[s][v];
      }
    }
  }

  __device__ __forceinline__ void add_row_of_pixels(const T* row, bool row_exists, int w0,
                                                    int64_t x_col, int tap, Sums& acc) const {
    constexpr int kS = Kind::kS, kStride = Kind::kStride;
    constexpr int kWindow = (kRunQ - 1) * kStride + kS;
    A rX[kWindow][kXs];
#pragma unroll
    for (int i = 0; i < kWindow; ++i) {
      load_x(row + i * x_col, row_exists && is_inside(w0 + i, g.w), rX[i]);
    }
#pragma unroll
    for (int s = 0; s < kS; ++s) {
      A rW[kRunK];
      if constexpr (!Kind::kWeightsInRegisters) load_weights(tap + s, rW);
#pragma unroll
      for (int j = 0; j < kRunQ; ++j) {
#pragma unroll
        for (int v = 0; v < kRunK; ++v) {
          const A weight = Kind::kWeightsInRegisters ? kept[tap + s][v] : rW[v];
          acc[j][v] += rX[j * kStride + s][0] * weight;
        }
      }
    }
  }

  // Stores a run of outputs from column q on. `out` is the address of column q, channel 0.
  __device__ __forceinline__ void store(T* out, int q, bool vec_y, const Sums& acc) const {
    if (g.channels_last) {
#pragma unroll
      for (int j = 0; j < kRunQ; ++j) {
        if (q + j >= g.q) break;
#pragma unroll
        for (int v = 0; v < kRunK; v += kRun) {
          const int k = first_k + (v / kRun) * run_pitch;
          A run[kRun];
#pragma unroll
          for (int i = 0; i < kRun; ++i) run[i] = acc[j][v + i];
          store_run<kRun>(out + j * g.y_col + k, g.k - k, vec_y, run);
        }
      }
    } else {
#pragma unroll
      for (int v = 0; v < kRunK; ++v) {
        const int k = first_k + (v / kRun) * run_pitch + v % kRun;
        if (k >= g.k) continue;
        A run[kRunQ];
#pragma unroll
        for (int j = 0; j < kRunQ; ++j) run[j] = acc[j][v];
        store_run<kRunQ>(out + k * g.y_chan, g.q - q, vec_y, run);
      }
    }
  }
};

// Layout: x (N, H, W, C) or (N, C, H, W), w (K, R, S, group_c) or (K, group_c, R, S), y as x.
// Grid: CTA b has chunk b % chunks and units (b / chunks) * part_units + [0, part_units).
template <class T, class Kind>
__global__ void __launch_bounds__(direct_fprop_threads(Kind::kIsLarge),
                                  direct_fprop_ctas(Kind::kIsLarge, sizeof(T) == 8))
    conv2d_direct_fprop_kernel(const T* x, const T* w, const T* bias, T* y, DirectShape g,
                               DirectFpropWalk walk) {
  using Channels = FpropChannels<T, Kind>;
  using A = typename Channels::A;
  extern __shared__ __align__(16) unsigned char shared[];
  A* sW = reinterpret_cast<A*>(shared);
  const int chunk_channels = walk.groups * kRunK;
  const int first_k = blockIdx.x % walk.chunks * chunk_channels;
  const int taps = g.group_c * g.r * g.s;
  stage_weights<direct_fprop_threads(Kind::kIsLarge)>(w, bias, g, walk, first_k, sW);
  __syncthreads();

  // NHWC: neighbouring threads have neighbouring channels; NCHW: neighbouring pixels.
  const int warp = threadIdx.x / 32;
  const int group = g.channels_last ? threadIdx.x % walk.groups : warp % walk.groups;
  const int slot =
      g.channels_last ? threadIdx.x / walk.groups : (warp / walk.groups) * 32 + threadIdx.x % 32;
  Channels channels{g,
                    x,
                    sW + group * Channels::kAccVec,
                    walk.groups,
                    chunk_channels,
                    first_k + group * Channels::kRun,
                    walk.groups * Channels::kRun};
  if constexpr (Kind::kWeightsInRegisters) {
#pragma unroll
    for (int tap = 0; tap < 9; ++tap) channels.load_weights(tap, channels.kept[tap]);
  }

  // One channel's columns are neighbours. As a constant, the pitch turns them into one address and
  // offsets.
  const int64_t x_col = Kind::kWeightsInRegisters ? 1 : g.x_col;
  const int begin = (blockIdx.x / walk.chunks) * walk.part_units;
  const int end = min(begin + walk.part_units, g.units);
  for (int index = begin + slot; index < end; index += walk.slots) {
    const DirectUnit unit = direct_unit(g, index, kRunQ);
    A acc[kRunQ][kRunK] = {};
    T* out = y + unit.image * g.y_image + unit.p * g.y_row + unit.q * g.y_col;
    const int h0 = unit.p * g.stride_h - g.pad_h;
    const int w0 = unit.q * g.stride_w - g.pad_w;
    const T* image = x + unit.image * g.x_image + w0 * x_col;
    if constexpr (Kind::kWeightsInRegisters) {
      const T* row = image + h0 * g.x_row;
#pragma unroll
      for (int r = 0; r < 3; ++r) {
        channels.add_row(row, is_inside(h0 + r * g.dilation_h, g.h), w0, x_col, r * 3, acc);
        row += g.dilation_h * g.x_row;
      }
    } else {
      for (int c = 0; c < g.group_c; ++c) {
#pragma unroll 1
        for (int r = 0; r < g.r; ++r) {
          const int h = h0 + r * g.dilation_h;
          channels.add_row(image + c * g.x_chan + h * g.x_row, is_inside(h, g.h), w0, x_col,
                           (c * g.r + r) * g.s, acc);
        }
      }
    }

    A rBias[kRunK];
    channels.load_weights(taps, rBias);
#pragma unroll
    for (int j = 0; j < kRunQ; ++j) {
#pragma unroll
      for (int v = 0; v < kRunK; ++v) acc[j][v] += rBias[v];
    }
    channels.store(out, unit.q, walk.vec_y, acc);
  }
}

}  // namespace

void launch_direct_fprop(const Conv2dParams& p, const DirectFpropConfig& config,
                         cudaStream_t stream) {
  if (config.blocks == 0) return;
  const DirectShape g(p.shape, kRunQ);
  for_dtype(p.shape.dtype, [&]<class T>() {
    auto run = [&]<int kS, int kStride, bool kDepthwise, bool kIsVec, bool kWeightsInRegisters>() {
      const int64_t smem = int64_t{g.taps() + 1} * config.walk.groups * kRunK * sizeof(Accum<T>);
      launch(conv2d_direct_fprop_kernel<
                 T, FpropKind<kS, kStride, kDepthwise, kIsVec, kWeightsInRegisters>>,
             dim3(static_cast<unsigned>(config.blocks)),
             dim3(direct_fprop_threads(config.is_large())), smem, stream,
             static_cast<const T*>(p.input), static_cast<const T*>(p.weight),
             static_cast<const T*>(p.bias), static_cast<T*>(p.output), g, config.walk);
    };
    if (config.depthwise) {
      if (!config.vectorized_x) return run.template operator()<0, 0, true, false, false>();
      return config.row_taps == 3 ? run.template operator()<3, 1, true, true, false>()
                                  : run.template operator()<0, 0, true, true, false>();
    }
    if constexpr (sizeof(T) <= 4) {
      if (config.weights_in_registers) {
        return run.template operator()<3, 1, false, false, true>();
      }
      if (config.row_taps == 7) return run.template operator()<7, 2, false, false, false>();
    }
    return config.row_taps == 3 ? run.template operator()<3, 1, false, false, false>()
                                : run.template operator()<0, 0, false, false, false>();
  });
}

}  // namespace warpwright
