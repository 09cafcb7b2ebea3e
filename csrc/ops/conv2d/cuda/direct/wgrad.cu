// Weight gradient: a thread holds a few taps of kRunK outputs in registers while it walks pixels,
// so grad_output is read once (few taps) and the input's rows come from L1. CTAs leave partial sums
// in the workspace, which a second kernel adds in order. The bias gradient is one more tap, whose
// input is 1.
#include "ops/conv2d/cuda/depthwise/nchw.cuh"

namespace warpwright {
namespace {

// A tile is kRunK outputs x kR * kS taps of one input channel. Tile t has outputs
// (t % k_tiles) * kRunK and the taps of t / k_tiles, which counts channels first.
struct WgradPlan {
  int k_tiles, tiles;
  int cta_tiles, chunks;  // tiles of a CTA; CTAs that share a pixel
  int slices;             // runs of pixels a CTA has at once
  int parts, part_units;  // partial sums; units of each
  int smem_pitch;         // elements, from one value of all threads to the next
  bool has_bias;

  __host__ __device__ int64_t part_elements(int taps) const {
    return int64_t{taps + 1} * k_tiles * kRunK;
  }
};

// Taps whose sums over the slices go through shared memory together.
template <class A>
constexpr int kRoundTaps = sizeof(A) == 8 ? 1 : 3;

// Threads of a CTA with kR x kS taps a thread, and CTAs of an SM, so that no register is spilled.
constexpr int wgrad_threads(int r) { return r == 3 ? 128 : 256; }
constexpr int wgrad_ctas(int r, bool is_double) { return is_double ? 1 : r == 3 ? 3 : 2; }

// `count` values, `step` apart, in eight interleaved runs and those in pairs: one long chain would
// round at the size of the whole sum each time.
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

// kIsVec: dy, and x if kDepthwise (then NHWC), in vectors.
// kR x kS taps a thread with dilation 1 along the row and stride kStride; kR = kS = 1: any window.
// Layout: x (N, H, W, C) or (N, C, H, W), dy (N, P, Q, K) or (N, K, P, Q),
// partials (parts, taps + 1, k_tiles * kRunK).
// Grid: CTA b has chunk b % chunks of the tiles and part b / chunks of the pixels.
template <class T, int kR, int kS, int kStride, bool kDepthwise, bool kIsVec>
__global__ void __launch_bounds__(wgrad_threads(kR), wgrad_ctas(kR, sizeof(T) == 8))
    conv2d_direct_wgrad_kernel(const T* x, const T* dy, Accum<T>* partials, DirectShape g,
                               WgradPlan plan) {
  using A = Accum<T>;
  constexpr int kTaps = kR * kS;
  constexpr int kWindow = (kRunQ - 1) * kStride + kS;
  constexpr int kXs = kDepthwise ? kRunK : 1;
  extern __shared__ __align__(16) unsigned char shared[];
  A* sums = reinterpret_cast<A*>(shared);  // (kRoundTaps * kRunK, smem_pitch)

  // NHWC: neighbouring threads have neighbouring channels; NCHW: neighbouring pixels.
  const int tid = threadIdx.x;
  const int local_tile = g.channels_last ? tid % plan.cta_tiles : tid / plan.slices;
  const int slice = g.channels_last ? tid / plan.cta_tiles : tid % plan.slices;
  const int chunk = blockIdx.x % plan.chunks, part = blockIdx.x / plan.chunks;
  const int tile = chunk * plan.cta_tiles + local_tile;
  const int k = (tile % plan.k_tiles) * kRunK;
  const int tap_tile = tile / plan.k_tiles;
  const int c = tap_tile % g.group_c;
  const int first_tap = tap_tile / g.group_c * kTaps;  // of the window
  const int r0 = first_tap / g.s, s0 = first_tap % g.s;
  const bool is_active = local_tile < plan.cta_tiles && slice < plan.slices && tile < plan.tiles;
  const bool adds_bias = plan.has_bias && tap_tile == 0;

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
  const int end = is_active ? min((part + 1) * plan.part_units, g.units) : 0;
  for (int index = part * plan.part_units + slice; index < end; index += plan.slices) {
    const DirectUnit unit = direct_unit(g, index, kRunQ);
    const int run = min(g.q - unit.q, kRunQ);
    A rDy[kRunQ][kRunK];
    const T* from =
        dy + unit.image * g.y_image + unit.p * g.y_row + unit.q * g.y_col + k * g.y_chan;
    if (g.channels_last) {
#pragma unroll
      for (int j = 0; j < kRunQ; ++j) {
        load_run<kRunK, kIsVec>(from + j * g.y_col, dy, j < run ? g.k - k : 0, rDy[j]);
      }
    } else {
#pragma unroll
      for (int v = 0; v < kRunK; ++v) {
        A row[kRunQ];
        load_run<kRunQ, kIsVec>(from + v * g.y_chan, dy, k + v < g.k ? run : 0, row);
#pragma unroll
        for (int j = 0; j < kRunQ; ++j) rDy[j][v] = row[j];
      }
    }
    const int w0 = unit.q * g.stride_w - g.pad_w + s0 * g.dilation_w;
    const T* image = x + unit.image * g.x_image + c * g.x_chan + w0 * g.x_col;
    auto load_pixel = [&](int r, int i, A(&to)[kXs]) {
      const int h = unit.p * g.stride_h - g.pad_h + (r0 + r) * g.dilation_h;
      // A lone tap's columns are stride_w apart, which only the host knows.
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
    // Past the row's end dy is zero, but an infinite x would make it NaN: hence j < run.
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

  // Sum over the slices, a round of taps at a time, and leave it in the part's place.
  const int pitch_k = plan.k_tiles * kRunK;
  const int window = g.r * g.s;
  A* to = partials + int64_t{part} * plan.part_elements(g.group_c * window);
  constexpr int kRound = kRoundTaps<A>;
#pragma unroll
  for (int begin = 0; begin <= kTaps; begin += kRound) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kRound * kRunK; ++i) {
      const int tap = begin + i / kRunK;
      if (tap <= kTaps) sums[i * plan.smem_pitch + tid] = acc[tap][i % kRunK];
    }
    __syncthreads();
    for (int e = tid; e < kRound * kRunK * plan.cta_tiles; e += blockDim.x) {
      const int e_tile = e % plan.cta_tiles, value = e / plan.cta_tiles;
      const int t = chunk * plan.cta_tiles + e_tile;
      const int tap = begin + value / kRunK;
      const int group = t / plan.k_tiles;
      if (t >= plan.tiles || tap > kTaps || (tap == kTaps && group != 0)) continue;
      const A* column =
          sums + value * plan.smem_pitch + (g.channels_last ? e_tile : e_tile * plan.slices);
      const int step = g.channels_last ? plan.cta_tiles : 1;
      const A sum = sum_in_runs(column, plan.slices, step);
      const int place = tap == kTaps ? g.group_c * window
                                     : group % g.group_c * window + group / g.group_c * kTaps + tap;
      to[int64_t{place} * pitch_k + (t % plan.k_tiles) * kRunK + value % kRunK] = sum;
    }
  }
}

constexpr int kReduceOutputs = 32, kReduceLanes = 16;

// Layout: partials (parts, taps + 1, pitch_k); dw as the weight; db (K) or null.
// Grid: CTA b sums 32 neighbouring places, each in 16 interleaved runs and those in order; in
// double, which the reads hide.
template <class T>
__global__ void __launch_bounds__(kReduceOutputs* kReduceLanes)
    conv2d_direct_wgrad_sum_kernel(const Accum<T>* partials, T* dw, T* db, DirectShape g, int parts,
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
        convert<T>(static_cast<Accum<T>>(sum));
  } else if (db != nullptr) {
    db[k] = convert<T>(static_cast<Accum<T>>(sum));
  }
}

// Taps a thread: all of 3 x 3, or a row of 5, or a row of 3 (depthwise), or one.
struct TapTile {
  int r, s;
};

TapTile tap_tile(const Conv2dShape& g, bool depthwise, bool is_vec) {
  if (g.dilation_w != 1 || g.dtype == DType::kFloat64) return {1, 1};
  if (depthwise) return is_vec && g.s == 3 && g.stride_w <= 2 ? TapTile{1, 3} : TapTile{1, 1};
  if (g.r == 3 && g.s == 3 && g.stride_w == 1) return {3, 3};
  if (g.s == 5 && g.stride_w == 1) return {1, 5};
  return {1, 1};
}

WgradPlan plan_wgrad(const Conv2dShape& g, bool depthwise, bool is_vec, const DeviceInfo& device) {
  const TapTile taps = tap_tile(g, depthwise, is_vec);
  WgradPlan plan{};
  plan.k_tiles = static_cast<int>(ceil_div<int64_t>(g.k, kRunK));
  plan.tiles = static_cast<int>(plan.k_tiles * g.group_c() * g.taps() / (taps.r * taps.s));
  const int threads = wgrad_threads(taps.r);
  // NCHW needs a warp along the pixels for each tile.
  plan.cta_tiles = std::min(plan.tiles, g.channels_last ? threads : threads / 32);
  plan.chunks = ceil_div(plan.tiles, plan.cta_tiles);
  plan.slices = threads / plan.cta_tiles;
  const int units = static_cast<int>(g.n * g.p * ceil_div<int64_t>(g.q, kRunQ));
  const int ctas = device.num_sms * wgrad_ctas(taps.r, g.dtype == DType::kFloat64);
  plan.parts = std::clamp(ctas / plan.chunks, 1, std::max(1, ceil_div(units, plan.slices)));
  plan.part_units = ceil_div(ceil_div(units, plan.parts), plan.slices) * plan.slices;
  plan.smem_pitch = threads + (g.channels_last ? plan.cta_tiles % 32 : 1);
  return plan;
}

}  // namespace

void launch_conv2d_direct_wgrad_sum(const Conv2dBackwardParams& p, const DirectShape& g, int parts,
                                    int pitch_k, const void* partials, cudaStream_t stream) {
  const int64_t blocks = ceil_div<int64_t>(int64_t{g.taps() + 1} * pitch_k, kReduceOutputs);
  for_dtype(p.shape.dtype, [&]<class T>() {
    launch(conv2d_direct_wgrad_sum_kernel<T>, dim3(static_cast<unsigned>(blocks)),
           dim3(kReduceOutputs * kReduceLanes), 0, stream, static_cast<const Accum<T>*>(partials),
           static_cast<T*>(p.grad_weight), static_cast<T*>(p.grad_bias), g, parts, pitch_k);
  });
}

int64_t conv2d_direct_wgrad_workspace_bytes(const Conv2dShape& g, bool depthwise,
                                            const DeviceInfo& device) {
  if (g.k == 0 || g.group_c() * g.taps() == 0) return 0;
  if (depthwise && conv2d_depthwise_nchw_wgrad_supported(g)) {
    return conv2d_depthwise_nchw_wgrad_parts(g, device) * int64_t{10} * g.k *
           (g.dtype == DType::kFloat64 ? 8 : 4);
  }
  // Sized before it is known where the tensors lie.
  const int64_t parts = std::max(plan_wgrad(g, depthwise, false, device).parts,
                                 plan_wgrad(g, depthwise, true, device).parts);
  const WgradPlan plan = plan_wgrad(g, depthwise, false, device);
  return parts * plan.part_elements(static_cast<int>(g.group_c() * g.taps())) *
         (g.dtype == DType::kFloat64 ? 8 : 4);
}

void launch_conv2d_direct_wgrad(const Conv2dBackwardParams& p, bool depthwise, void* workspace,
                                cudaStream_t stream) {
  const DirectShape g(p.shape, kRunQ);
  if (g.k == 0 || g.taps() == 0) return;
  const DType dtype = p.shape.dtype;
  if (depthwise && conv2d_depthwise_nchw_wgrad_supported(p.shape)) {
    const int parts = conv2d_depthwise_nchw_wgrad_parts(p.shape, current_device_info());
    launch_conv2d_depthwise_nchw_wgrad(p, parts, workspace, stream);
    return launch_conv2d_direct_wgrad_sum(p, g, parts, g.k, workspace, stream);
  }
  const bool dy_in_vectors = g.channels_last
                                 ? runs_are_vectors(dtype, g.k, kRunK, address_of(p.grad_output))
                                 : runs_are_vectors(dtype, g.q, kRunQ, address_of(p.grad_output));
  const bool is_vec =
      dy_in_vectors &&
      (!depthwise || (g.channels_last && g.multiplier == 1 && p.shape.h * p.shape.w > 0 &&
                      runs_are_vectors(dtype, g.k, kRunK, address_of(p.input))));
  WgradPlan plan = plan_wgrad(p.shape, depthwise, is_vec, current_device_info());
  plan.has_bias = p.grad_bias != nullptr;
  const TapTile taps = tap_tile(p.shape, depthwise, is_vec);
  for_dtype(dtype, [&]<class T>() {
    using A = Accum<T>;
    auto run_kernel = [&]<int kR, int kS, int kStride, bool kDepthwise, bool kIsVec>() {
      const int64_t smem = int64_t{kRoundTaps<A>} * kRunK * plan.smem_pitch * sizeof(A);
      launch(conv2d_direct_wgrad_kernel<T, kR, kS, kStride, kDepthwise, kIsVec>,
             dim3(static_cast<unsigned>(plan.parts * plan.chunks)), dim3(wgrad_threads(kR)), smem,
             stream, static_cast<const T*>(p.input), static_cast<const T*>(p.grad_output),
             static_cast<A*>(workspace), g, plan);
    };
    for_bool(is_vec, [&]<bool kIsVec>() {
      if constexpr (sizeof(T) <= 4) {
        if constexpr (kIsVec) {
          if (depthwise && taps.s == 3) {
            return g.stride_w == 1 ? run_kernel.template operator()<1, 3, 1, true, true>()
                                   : run_kernel.template operator()<1, 3, 2, true, true>();
          }
        }
        if (taps.s == 3) return run_kernel.template operator()<3, 3, 1, false, kIsVec>();
        if (taps.s == 5) return run_kernel.template operator()<1, 5, 1, false, kIsVec>();
      }
      return depthwise ? run_kernel.template operator()<1, 1, 1, true, kIsVec>()
                       : run_kernel.template operator()<1, 1, 1, false, kIsVec>();
    });
  });
  launch_conv2d_direct_wgrad_sum(p, g, plan.parts, plan.k_tiles * kRunK, workspace, stream);
}

}  // namespace warpwright
