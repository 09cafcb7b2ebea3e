// The passes over all elements of x: a sum per image and channel, and a scaled copy.
#pragma once

#include "common/ceil_div.h"
#include "device/access.cuh"
#include "device/dependent_launch.cuh"
#include "device/vec.cuh"
#include "host/launch.h"
#include "ops/squeeze_excitation/cuda/finish.cuh"
#include "ops/squeeze_excitation/squeeze_excitation.h"
#include "tile/rows/group.cuh"

namespace warpwright {

struct ImageShape {
  int64_t batch, channels, spatial;
  int lanes;
  int64_t splits;
  bool is_reversed;  // the last images first: the previous pass has left them in L2

  __device__ __forceinline__ int64_t block() const {
    return is_reversed ? int64_t{gridDim.x} - 1 - blockIdx.x : int64_t{blockIdx.x};
  }
};

// Loads of a thread in flight.
constexpr int kCopyBatch = 4;
constexpr int kSumBatch = 8;

// to[i * step] = f(from[i * step]) for the kCopyBatch vectors at `at`, `at` + `pace`, ... before
// `end`. Loads come first: a store could change what a later load reads, so the compiler does not
// move loads over stores.
template <class T, int kVec, class F>
__device__ __forceinline__ void copy_scaled(const T* from, T* to, int64_t step, int64_t at,
                                            int pace, int64_t end, const F& f) {
  Vec<T, kVec> loaded[kCopyBatch];
#pragma unroll
  for (int i = 0; i < kCopyBatch; ++i) {
    loaded[i] = at + i * pace < end ? load_vec<kVec>(from + i * step) : Vec<T, kVec>{};
  }
#pragma unroll
  for (int i = 0; i < kCopyBatch; ++i) {
    if (at + i * pace >= end) break;
    Vec<Accum<T>, kVec> values = widen(loaded[i]);
#pragma unroll
    for (int j = 0; j < kVec; ++j) values[j] = f(j, values[j]);
    store_vec_global(to + i * step, narrow<T>(values));
  }
}

// ---- rows: a thread has neighbouring channels, and every few rows of a split of an image ----

struct ImageRows {
  int across, down, threads_down;
  int64_t n, split, first, begin, end;  // first: channel; begin, end: rows of the image
  bool present;

  __device__ __forceinline__ ImageRows(const ImageShape& s, int vec)
      : across(static_cast<int>(threadIdx.x) % s.lanes),
        down(static_cast<int>(threadIdx.x) / s.lanes),
        threads_down(static_cast<int>(blockDim.x) / s.lanes) {
    const int64_t vectors = s.channels / vec, tiles = ceil_div(vectors, int64_t{s.lanes});
    const int64_t block = s.block(), image = block / tiles;
    n = image / s.splits;
    split = image - n * s.splits;
    const int64_t vector = (block - image * tiles) * s.lanes + across;
    present = vector < vectors && down < threads_down;
    first = vector * vec;
    const int64_t per_split = ceil_div(s.spatial, s.splits);
    begin = min(split * per_split, s.spatial);
    end = present ? min(begin + per_split, s.spatial) : begin;
  }
};

// The sums over the part's rows of a, or of a * b, for the threads with `down` == 0. The threads of
// a column meet in a tree.
template <int kVec, bool kProduct, class T, class Acc = Accum<T>>
__device__ __forceinline__ void sum_image_rows(const ImageShape& s, const ImageRows& part,
                                               const T* __restrict__ a, const T* __restrict__ b,
                                               Acc (&sums)[kVec], Acc* shared) {
  const int64_t start = (part.n * s.spatial + part.begin + part.down) * s.channels + part.first;
  const int64_t step = part.threads_down * s.channels;
  const T* a_row = a + start;
  const T* b_row = kProduct ? b + start : nullptr;
  constexpr int kBatch = kProduct ? kSumBatch / 2 : kSumBatch;
  for (int64_t r = part.begin + part.down; r < part.end; r += kBatch * part.threads_down) {
    Vec<T, kVec> values[kBatch], others[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const bool has = r + i * part.threads_down < part.end;
      values[i] = has ? load_vec<kVec>(a_row + i * step) : Vec<T, kVec>{};
      if constexpr (kProduct) {
        others[i] = has ? load_vec<kVec>(b_row + i * step) : Vec<T, kVec>{};
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const Vec<Acc, kVec> v = widen(values[i]);
      const Vec<Acc, kVec> w = kProduct ? widen(others[i]) : Vec<Acc, kVec>{};
#pragma unroll
      for (int j = 0; j < kVec; ++j) sums[j] += kProduct ? v[j] * w[j] : v[j];
    }
    a_row += kBatch * step;
    if constexpr (kProduct) b_row += kBatch * step;
  }
  Acc* own = shared + threadIdx.x * kVec;
#pragma unroll
  for (int j = 0; j < kVec; ++j) own[j] = sums[j];
  for (int active = part.threads_down; active > 1;) {
    const int half = (active + 1) / 2;
    __syncthreads();
    if (part.down < active - half) {
      const Acc* other = own + half * s.lanes * kVec;
#pragma unroll
      for (int j = 0; j < kVec; ++j) own[j] = sums[j] += other[j];
    }
    active = half;
  }
}

// Layout: a, b (batch, spatial, channels); parts (splits, batch, channels), null without splits.
// Grid: a block per image, split and tile of `lanes` channel vectors; its threads are `lanes` wide,
// and each has every threads_down-th row.
template <class T, int kVec, bool kProduct, class Finish>
__global__ void __launch_bounds__(kSqueezeThreads, 2)
    sum_rows_kernel(ImageShape s, const T* __restrict__ a, const T* __restrict__ b, Finish finish,
                    Accum<T>* parts) {
  using Acc = Accum<T>;
  __shared__ Acc shared[kSqueezeThreads * kVec];
  const ImageRows part(s, kVec);
  Acc sums[kVec] = {};
  sum_image_rows<kVec, kProduct>(s, part, a, b, sums, shared);
  let_next_kernel_start();
  if (!part.present || part.down != 0) return;
  const int64_t at = part.n * s.channels + part.first;
#pragma unroll
  for (int j = 0; j < kVec; ++j) {
    if (parts == nullptr) {
      finish(at + j, sums[j]);
    } else {
      parts[part.split * s.batch * s.channels + at + j] = sums[j];
    }
  }
}

// out = in * factor + summand over the part's rows.
template <int kVec, bool kShift, class T, class Acc = Accum<T>>
__device__ __forceinline__ void scale_image_rows(const ImageShape& s, const ImageRows& part,
                                                 const T* in, T* out, const Acc (&factor)[kVec],
                                                 const Acc (&summand)[kVec]) {
  const int64_t start = (part.n * s.spatial + part.begin + part.down) * s.channels + part.first;
  const int64_t step = part.threads_down * s.channels;
  const T* from = in + start;
  T* to = out + start;
  for (int64_t r = part.begin + part.down; r < part.end; r += kCopyBatch * part.threads_down) {
    copy_scaled<T, kVec>(from, to, step, r, part.threads_down, part.end, [&](int j, Acc value) {
      return kShift ? value * factor[j] + summand[j] : value * factor[j];
    });
    from += kCopyBatch * step;
    to += kCopyBatch * step;
  }
}

// out = in * scale (+ shift / spatial), with a number of each per image and channel.
// Layout and grid: as those of sum_rows_kernel.
template <class T, int kVec, bool kShift>
__global__ void __launch_bounds__(kExciteThreads)
    scale_rows_kernel(ImageShape s, const T* in, const Accum<T>* __restrict__ scale,
                      const Accum<T>* __restrict__ shift, T* out) {
  using Acc = Accum<T>;
  wait_for_previous_kernel();
  const ImageRows part(s, kVec);
  if (!part.present) return;
  const int64_t channel = part.n * s.channels + part.first;
  Acc factor[kVec], summand[kVec] = {};
#pragma unroll
  for (int j = 0; j < kVec; ++j) factor[j] = scale[channel + j];
  if constexpr (kShift) {
    const Acc count = static_cast<Acc>(s.spatial);
#pragma unroll
    for (int j = 0; j < kVec; ++j) summand[j] = shift[channel + j] / count;
  }
  scale_image_rows<kVec, kShift>(s, part, in, out, factor, summand);
}

// ---- planes: a group of threads has a part of one channel of one image ----

struct ImagePlane {
  int64_t plane, split, begin, end;  // vectors, from the plane's first
  bool present;

  __device__ __forceinline__ ImagePlane(const ImageShape& s, const RowGroup& group, int vec) {
    const int64_t unit = s.block() * group.count + group.index, vectors = s.spatial / vec;
    const int64_t per_split = ceil_div(vectors, s.splits);
    plane = unit / s.splits;
    split = unit - plane * s.splits;
    present = plane < s.batch * s.channels;
    begin = min(split * per_split, vectors);
    end = present ? min(begin + per_split, vectors) : begin;
  }
};

// Layout: a, b (batch, channels, spatial); parts (splits, batch, channels), null without splits.
// Grid: groups of `lanes` threads, one per split of a plane.
template <class T, int kVec, bool kProduct, class Finish>
__global__ void __launch_bounds__(kExciteThreads)
    sum_planes_kernel(ImageShape s, const T* __restrict__ a, const T* __restrict__ b, Finish finish,
                      Accum<T>* parts) {
  using Acc = Accum<T>;
  __shared__ Acc storage[RowMeeting<Acc, 1>::kSlots];
  const RowGroup group(s.lanes);
  RowMeeting<Acc, 1> meeting(group, storage);
  const ImagePlane part(s, group, kVec);
  const int64_t start = part.present ? part.plane * s.spatial : 0;
  Acc sums[1] = {};
#pragma unroll 4
  for (int64_t v = part.begin + group.lane; v < part.end; v += s.lanes) {
    const Vec<Acc, kVec> values = widen(load_vec<kVec>(a + start + v * kVec));
    if constexpr (kProduct) {
      const Vec<Acc, kVec> others = widen(load_vec<kVec>(b + start + v * kVec));
      sums[0] += tree_sum<kVec>([&](int j) { return values[j] * others[j]; });
    } else {
      sums[0] += tree_sum<kVec>([&](int j) { return values[j]; });
    }
  }
  let_next_kernel_start();
  meeting.sum(sums);
  if (!part.present || group.lane != 0) return;
  if (parts == nullptr) {
    finish(part.plane, sums[0]);
  } else {
    parts[part.split * s.batch * s.channels + part.plane] = sums[0];
  }
}

// As scale_rows_kernel, with the layout and grid of sum_planes_kernel.
template <class T, int kVec, bool kShift>
__global__ void __launch_bounds__(kExciteThreads)
    scale_planes_kernel(ImageShape s, const T* in, const Accum<T>* __restrict__ scale,
                        const Accum<T>* __restrict__ shift, T* out) {
  using Acc = Accum<T>;
  wait_for_previous_kernel();
  const RowGroup group(s.lanes);
  const ImagePlane part(s, group, kVec);
  if (!part.present) return;
  const Acc factor = scale[part.plane];
  const Acc summand = kShift ? shift[part.plane] / static_cast<Acc>(s.spatial) : Acc(0);
  const int64_t start = part.plane * s.spatial;
  for (int64_t v = part.begin + group.lane; v < part.end; v += kCopyBatch * s.lanes) {
    copy_scaled<T, kVec>(in + start + v * kVec, out + start + v * kVec, int64_t{s.lanes} * kVec, v,
                         s.lanes, part.end, [&](int, Acc value) {
                           return kShift ? value * factor + summand : value * factor;
                         });
  }
}

// ---- launches ----

// Calls f<T, P>() for the types of x and of the parameters.
template <class F>
void for_layer_types(const SqueezeExcitationShape& p, F&& f) {
  for_dtype(p.dtype, [&]<class T>() {
    if constexpr (sizeof(T) == 2) {
      if (p.parameters == DType::kFloat32) return f.template operator()<T, float>();
    }
    f.template operator()<T, T>();
  });
}

// Grid: a thread per image and channel, which adds the parts in order.
template <class Acc, class Finish>
__global__ void __launch_bounds__(kExciteThreads)
    merge_parts_kernel(int64_t count, int64_t splits, const Acc* parts, Finish finish) {
  wait_for_previous_kernel();
  const int64_t at = int64_t{blockIdx.x} * kExciteThreads + threadIdx.x;
  if (at < count) {
    Acc sum = 0;
    for (int64_t i = 0; i < splits; ++i) sum += parts[i * count + at];
    finish(at, sum);
  }
}

inline ImageShape image_shape(const SqueezeExcitationShape& p, const ImagePass& pass,
                              bool is_reversed) {
  return {p.batch, p.channels, p.spatial, pass.lanes, pass.splits, is_reversed};
}

inline dim3 grid_of(int64_t blocks) {
  if (blocks > kMaxGridX) throw std::runtime_error("squeeze_excitation: too many images");
  return dim3(static_cast<unsigned>(blocks));
}

template <class T, bool kProduct, class Finish>
void launch_sums(const SqueezeExcitationShape& p, const ImagePass& pass, bool is_reversed,
                 const void* a, const void* b, Finish finish, Accum<T>* parts,
                 cudaStream_t stream) {
  const ImageShape shape = image_shape(p, pass, is_reversed);
  if (pass.splits == 1) parts = nullptr;
  for_int<1, kVecSize<T>>(pass.vec, [&]<int kVec>() {
    auto* kernel = p.is_rows ? sum_rows_kernel<T, kVec, kProduct, Finish>
                             : sum_planes_kernel<T, kVec, kProduct, Finish>;
    launch(kernel, grid_of(pass.blocks), dim3(static_cast<unsigned>(pass.threads)), 0, stream,
           shape, static_cast<const T*>(a), static_cast<const T*>(b), finish, parts);
  });
  if (parts == nullptr) return;
  const int64_t count = p.batch * p.channels;
  launch_dependent(merge_parts_kernel<Accum<T>, Finish>,
                   grid_of(ceil_div(count, int64_t{kExciteThreads})), dim3(kExciteThreads), 0,
                   stream, count, pass.splits, parts, finish);
}

template <class T, bool kShift>
void launch_scaled_copy(const SqueezeExcitationShape& p, const ImagePass& pass, bool is_reversed,
                        const void* in, const Accum<T>* scale, const Accum<T>* shift, void* out,
                        cudaStream_t stream) {
  for_int<1, kVecSize<T>>(pass.vec, [&]<int kVec>() {
    auto* kernel =
        p.is_rows ? scale_rows_kernel<T, kVec, kShift> : scale_planes_kernel<T, kVec, kShift>;
    launch_dependent(kernel, grid_of(pass.blocks), dim3(static_cast<unsigned>(pass.threads)), 0,
                     stream, image_shape(p, pass, is_reversed), static_cast<const T*>(in), scale,
                     shift, static_cast<T*>(out));
  });
}

}  // namespace warpwright
