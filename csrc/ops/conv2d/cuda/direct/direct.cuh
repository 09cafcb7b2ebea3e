// Shared by the direct kernels: their shape in 32 bits, units of work, and accesses of runs.
#pragma once

#include <algorithm>

#include "device/access.cuh"
#include "device/math.cuh"
#include "device/vec.cuh"
#include "host/launch.h"
#include "ops/conv2d/cuda/direct/direct.h"

namespace warpwright {

constexpr int kDirectThreads = 256;

// A call in the kernels' form: 32-bit extents, pitches in elements. The weight's taps are numbered
// (c * R + r) * S + s, whatever its layout.
struct DirectShape {
  int c, h, w, k, r, s, p, q;
  int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  int group_c, multiplier;  // multiplier: outputs per input channel (depthwise)
  bool channels_last;
  int64_t x_image, x_chan, x_row, x_col;
  int64_t y_image, y_chan, y_row, y_col;
  int64_t w_chan, w_tap;  // of the group_c * R * S weights of one output channel
  FastDivmod columns, rows;
  int units;

  DirectShape(const Conv2dShape& g, int run_q)
      : c(static_cast<int>(g.c)),
        h(static_cast<int>(g.h)),
        w(static_cast<int>(g.w)),
        k(static_cast<int>(g.k)),
        r(static_cast<int>(g.r)),
        s(static_cast<int>(g.s)),
        p(static_cast<int>(g.p)),
        q(static_cast<int>(g.q)),
        stride_h(static_cast<int>(g.stride_h)),
        stride_w(static_cast<int>(g.stride_w)),
        pad_h(static_cast<int>(g.pad_h)),
        pad_w(static_cast<int>(g.pad_w)),
        dilation_h(static_cast<int>(g.dilation_h)),
        dilation_w(static_cast<int>(g.dilation_w)),
        group_c(static_cast<int>(g.group_c())),
        multiplier(static_cast<int>(g.group_k())),
        channels_last(g.channels_last) {
    const bool last = g.channels_last;
    x_image = g.c * g.h * g.w;
    x_chan = last ? 1 : g.h * g.w;
    x_row = last ? g.w * g.c : g.w;
    x_col = last ? g.c : 1;
    y_image = g.k * g.p * g.q;
    y_chan = last ? 1 : g.p * g.q;
    y_row = last ? g.q * g.k : g.q;
    y_col = last ? g.k : 1;
    w_chan = last ? 1 : g.taps();
    w_tap = last ? g.group_c() : 1;
    columns = FastDivmod(std::max<int64_t>(1, ceil_div<int64_t>(g.q, run_q)));
    rows = FastDivmod(std::max<int64_t>(1, g.p));
    units = static_cast<int>(g.n * g.p * ceil_div<int64_t>(g.q, run_q));
  }

  int taps() const { return group_c * r * s; }
  __device__ __forceinline__ int units_per_row() const { return static_cast<int>(columns.divisor); }
};

struct DirectUnit {
  int64_t image;
  int p, q;
};

__device__ __forceinline__ DirectUnit direct_unit(const DirectShape& g, int unit, int run_q) {
  DirectUnit result;
  int row, image;
  g.columns.divmod(unit, row, result.q);
  g.rows.divmod(row, image, result.p);
  result.image = image;
  result.q *= run_q;
  return result;
}

__device__ __forceinline__ bool is_inside(int x, int extent) {
  return static_cast<unsigned>(x) < static_cast<unsigned>(extent);
}

// Loads the first `valid` of kCount elements; the others become zero. kIsVec: every access has 16
// bytes, or the whole run if that is less, and `from`, `safe` and `valid` are aligned to it. An
// access past `valid` reads `safe`: loads in branches would wait for one another.
template <int kCount, bool kIsVec, class T, class A>
__device__ __forceinline__ void load_run(const T* from, const T* safe, int valid, A (&to)[kCount]) {
  if constexpr (kIsVec) {
    constexpr int kVec = kVecSize<T> < kCount ? kVecSize<T> : kCount;
    Vec<T, kVec> loaded[kCount / kVec];
#pragma unroll
    for (int i = 0; i < kCount; i += kVec) {
      loaded[i / kVec] = load_vec<kVec>(i < valid ? from + i : safe);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const A value = convert<A>(loaded[i / kVec][i % kVec]);
      to[i] = i / kVec * kVec < valid ? value : A(0);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i] = i < valid ? convert<A>(from[i]) : A(0);
  }
}

// copy_row_of_pairs() with lanes along the dense direction. A whole batch is loaded before its
// first value is stored. The batch is written out: a loop unrolled by the compiler would end in
// single iterations, and each would wait for memory.
template <bool kChannelsLast, class T, class Place>
__device__ __forceinline__ void copy_dense_pairs(const T* source, bool row_exists, int q0, int cols,
                                                 int channels, int pairs, const DirectShape& g,
                                                 Place&& place) {
  constexpr int kBatch = 8;
  const int inners = kChannelsLast ? pairs : cols, outers = kChannelsLast ? cols : pairs;
  const int64_t inner_pitch = kChannelsLast ? 2 : g.y_col;
  const int64_t outer_pitch = kChannelsLast ? g.y_col : 2 * g.y_chan;
  const int limit = row_exists ? min(channels, 2 * pairs) : 0;
  const int log_width = min(5, 32 - __clz(inners - 1));  // lanes along `inners`
  const int lane = threadIdx.x % 32, step = 32 >> log_width;
  for (int inner = lane & ((1 << log_width) - 1); inner < inners; inner += 1 << log_width) {
    T* const pixel = place(kChannelsLast ? 0 : inner);
    for (int first = lane >> log_width; first < outers; first += step * kBatch) {
      const T* from = source + inner * inner_pitch + first * outer_pitch;
      Vec<T, 2> loaded[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int outer = first + i * step;
        const int k = 2 * (kChannelsLast ? inner : outer);
        const bool exists = kChannelsLast ? outer < outers && is_inside(q0 + outer, g.q)
                                          : is_inside(q0 + inner, g.q);
        loaded[i][0] = exists && k < limit ? from[0] : convert<T>(0.f);
        loaded[i][1] = exists && k + 1 < limit ? from[g.y_chan] : convert<T>(0.f);
        from += step * outer_pitch;
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int outer = first + i * step;
        if (outer >= outers) continue;
        store_vec(kChannelsLast ? place(outer) + 2 * inner : pixel + 2 * outer, loaded[i]);
      }
    }
  }
}

// Copies columns q0 .. q0 + cols - 1 of a row of grad_output to shared memory, by one warp, two
// channels per store: for tensors whose channels cannot be read as 16-byte vectors. `source` is the
// first channel at column q0. The copy has 2 * `pairs` channels; those from `channels` on and the
// columns outside of the image are zero. place(column) is the target of a column's first channel.
template <class T, class Place>
__device__ __forceinline__ void copy_row_of_pairs(const T* source, bool row_exists, int q0,
                                                  int cols, int channels, int pairs,
                                                  const DirectShape& g, Place&& place) {
  if (g.channels_last) {
    copy_dense_pairs<true>(source, row_exists, q0, cols, channels, pairs, g, place);
  } else {
    copy_dense_pairs<false>(source, row_exists, q0, cols, channels, pairs, g, place);
  }
}

// Stores the first `valid` of kCount elements. `vec`: as kIsVec of load_run.
template <int kCount, class T, class A>
__device__ __forceinline__ void store_run(T* to, int valid, bool vec, const A (&from)[kCount]) {
  constexpr int kVec = kVecSize<T> < kCount ? kVecSize<T> : kCount;
  if (vec) {
#pragma unroll
    for (int i = 0; i < kCount; i += kVec) {
      if (i >= valid) break;
      Vec<T, kVec> packed;
#pragma unroll
      for (int j = 0; j < kVec; ++j) packed[j] = convert<T>(from[i + j]);
      store_vec_global(to + i, packed);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < valid) to[i] = convert<T>(from[i]);
    }
  }
}

}  // namespace warpwright
