// One pass each way. The forward has a thread per vector; the backward is a sum over columns
// (gemm/column_sum.cuh), whose threads also write dx.
#include <type_traits>

#include "common/ceil_div.h"
#include "device/math.cuh"
#include "device/vec.cuh"
#include "gemm/column_sum.cuh"
#include "host/launch.h"
#include "ops/layer_scale_add/layer_scale_add.h"

namespace warpwright {
namespace {

constexpr int kThreads = 256;

// Calls f<T, O>() for the types of x and y.
template <class F>
void for_layer_scale_types(const LayerScaleShape& s, F&& f) {
  for_dtype(s.dtype, [&]<class T>() {
    if (s.output_dtype == s.dtype) return f.template operator()<T, T>();
    if constexpr (sizeof(T) == 2) f.template operator()<T, float>();
  });
}

// A sample's factor by the number of a row; 1 without factors.
template <class O>
struct SampleScale {
  const O* values;
  FastDivmod by_rows;

  __device__ __forceinline__ Accum<O> operator()(int row) const {
    return values == nullptr ? Accum<O>(1) : convert<Accum<O>>(values[by_rows.quotient(row)]);
  }
};

template <class O>
SampleScale<O> sample_scale_of(const void* values, const LayerScaleShape& s) {
  return {static_cast<const O*>(values), FastDivmod(s.rows_per_sample)};
}

// Layout: x (rows, channels); residual, y and its copy (or null) likewise; scale (channels). Grid:
// thread t has the t-th vector of kVec elements, row by row.
template <class T, class R, class O, int kVec>
__global__ void __launch_bounds__(kThreads)
    layer_scale_add_kernel(const T* x, const R* residual, const O* scale, SampleScale<O> samples,
                           O* y, T* copy, int per_row, FastDivmod by_row, int64_t vectors) {
  using Acc = Accum<O>;
  const int64_t v = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (v >= vectors) return;
  const bool fits = vectors <= INT32_MAX;  // a division of 64 bits takes long
  const int row = fits ? by_row.quotient(static_cast<int>(v)) : static_cast<int>(v / per_row);
  const int col = static_cast<int>(v - int64_t{row} * per_row);
  const int64_t at = v * kVec;
  const auto values = widen(load_vec<kVec>(x + at));
  const auto added = widen(load_vec<kVec>(residual + at));
  const auto factors = widen(load_vec<kVec>(scale + col * kVec));
  const Acc sample = samples(row);
  Vec<Acc, kVec> sum;
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    sum.data[i] = added.data[i] + factors.data[i] * sample * values.data[i];
  }
  const auto result = narrow<O, kVec>(sum);
  store_vec(y + at, result);
  if (copy != nullptr) store_vec(copy + at, narrow<T, kVec>(widen(result)));
}

// dy * sample_scale * x, as column_sum_kernel sees it. dx leaves on the way.
template <class T, class O, int kVec>
struct LayerScaleColumns {
  static constexpr int kMinBlocks = 0;
  struct Loaded {
    Vec<O, kVec> dy;
    Vec<T, kVec> x;
  };
  const O* dy;
  const T* x;
  const O* scale;
  SampleScale<O> samples;
  T* dx;  // null: not wanted
  int64_t channels;

  __device__ __forceinline__ Loaded load(int64_t row, int64_t col) const {
    const int64_t at = row * channels + col;
    return {load_vec<kVec>(dy + at), load_vec<kVec>(x + at)};
  }
  __device__ __forceinline__ void values(const Loaded& loaded, int64_t row, int64_t col,
                                         Accum<O> (&v)[kVec]) const {
    const auto gradient = widen(loaded.dy);
    const auto input = widen(loaded.x);
    const auto factors = widen(load_vec<kVec>(scale + col));
    const Accum<O> sample = samples(static_cast<int>(row));
    Vec<Accum<O>, kVec> result;
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const Accum<O> scaled = gradient.data[i] * sample;
      result.data[i] = scaled * factors.data[i];
      v[i] = scaled * input.data[i];
    }
    if (dx != nullptr) store_vec(dx + row * channels + col, narrow<T, kVec>(result));
  }
};

}  // namespace

void launch_layer_scale_add(const LayerScaleAddParams& p, const LayerScalePlan& plan,
                            cudaStream_t stream) {
  const LayerScaleShape& s = p.shape;
  const int64_t vectors = s.rows * s.channels / plan.vec;
  if (vectors == 0) return;
  for_layer_scale_types(s, [&]<class T, class O>() {
    auto run = [&]<class R, int kVec>() {
      launch(layer_scale_add_kernel<T, R, O, kVec>,
             dim3(static_cast<unsigned>(ceil_div<int64_t>(vectors, kThreads))), dim3(kThreads), 0,
             stream, static_cast<const T*>(p.input), static_cast<const R*>(p.residual),
             static_cast<const O*>(p.scale), sample_scale_of<O>(p.sample_scale, s),
             static_cast<O*>(p.output), static_cast<T*>(p.copy),
             static_cast<int>(s.channels / kVec), FastDivmod(s.channels / kVec), vectors);
    };
    auto with_residual = [&]<class R>() {
      plan.vec > 1 ? run.template operator()<R, kVecSize<T>>() : run.template operator()<R, 1>();
    };
    p.residual_dtype == s.dtype ? with_residual.template operator()<T>()
                                : with_residual.template operator()<O>();
  });
}

void launch_layer_scale_add_backward(const LayerScaleAddBackwardParams& p,
                                     const ColumnSumPlan& plan, void* workspace,
                                     cudaStream_t stream) {
  const LayerScaleShape& s = p.shape;
  if (s.rows == 0 || s.channels == 0) return;
  for_layer_scale_types(s, [&]<class T, class O>() {
    launch_column_sum_of<T>(column_sum_of(p), plan, workspace, stream, [&]<int kVec>() {
      return LayerScaleColumns<T, O, kVec>{
          static_cast<const O*>(p.grad_output), static_cast<const T*>(p.input),
          static_cast<const O*>(p.scale),       sample_scale_of<O>(p.sample_scale, s),
          static_cast<T*>(p.grad_input),        s.channels};
    });
  });
}

}  // namespace warpwright
