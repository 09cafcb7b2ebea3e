// Depthwise kernels of NCHW images, windows of 3 x 3, 5 x 5 and 7 x 7 without dilation. A thread
// has a tile of one plane, so it loads each row once for all outputs or taps that the row
// contributes to.
#pragma once

#include "common/switch.h"
#include "ops/conv2d/cuda/depthwise/depthwise.h"
#include "ops/conv2d/cuda/direct/direct.cuh"

namespace warpwright {

// Columns w0 + [0, kWindow) of an input row. kIsVec: stride 1, the padding of `same` and rows of
// whole vectors, so that the middle kRunQ columns are one aligned access. The columns next to it
// are single elements of a 3 x 3 window, and one more access on each side of a larger one.
template <int kWindow, bool kIsVec, class T, class A>
__device__ __forceinline__ void load_window(const T* row, const T* safe, bool exists, int w0,
                                            int width, A (&to)[kWindow]) {
  if constexpr (kIsVec) {
    constexpr int kSide = (kWindow - kRunQ) / 2;
    auto load_vector = [&]<int kFirst>() {
      A loaded[kRunQ];
      const int first = w0 + kFirst;
      load_run<kRunQ, true>(row + first, safe, exists && first >= 0 ? width - first : 0, loaded);
#pragma unroll
      for (int i = 0; i < kRunQ; ++i) {
        if (kFirst + i >= 0 && kFirst + i < kWindow) to[kFirst + i] = loaded[i];
      }
    };
    load_vector.template operator()<kSide>();
    if constexpr (kSide == 1) {
      to[0] = exists && w0 >= 0 ? convert<A>(row[w0]) : A(0);
      to[kWindow - 1] =
          exists && w0 + kWindow - 1 < width ? convert<A>(row[w0 + kWindow - 1]) : A(0);
    } else {
      load_vector.template operator()<kSide - kRunQ>();
      load_vector.template operator()<kSide + kRunQ>();
    }
  } else {
#pragma unroll
    for (int i = 0; i < kWindow; ++i) {
      to[i] = exists && is_inside(w0 + i, width) ? convert<A>(row[w0 + i]) : A(0);
    }
  }
}

// Calls f.operator()<T, kTaps>() for the types and windows of is_depthwise_nchw().
template <class F>
void for_nchw_window(const Conv2dShape& s, F&& f) {
  for_dtype(s.dtype, [&]<class T>() {
    if constexpr (sizeof(T) == 8) {
      f.template operator()<T, 3>();
    } else {
      for_int<3, 5, 7>(static_cast<int>(s.s),
                       [&]<int kTaps>() { f.template operator()<T, kTaps>(); });
    }
  });
}

// Calls f.operator()<kStride, kIsVec>(): strides of 2 read single elements.
template <class F>
void for_nchw_stride(int64_t stride, bool is_vec, F&& f) {
  if (stride == 2) return f.template operator()<2, false>();
  for_bool(is_vec, [&]<bool kIsVec>() { f.template operator()<1, kIsVec>(); });
}

inline dim3 grid_of_tiles(int64_t tiles) {
  return dim3(static_cast<unsigned>(ceil_div<int64_t>(tiles, kDirectThreads)));
}

}  // namespace warpwright
