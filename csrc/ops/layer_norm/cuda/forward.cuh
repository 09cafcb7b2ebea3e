// Forward by persistent blocks: rows pass through a ring, and their groups normalize them. With a
// branch, the groups also add and write the sum.
#pragma once

#include "host/launch.h"
#include "ops/layer_norm/layer_norm.h"
#include "tile/rows/moments.cuh"
#include "tile/rows/ring.cuh"

namespace warpwright {

template <class Acc>
__device__ __forceinline__ Acc reciprocal_root(Acc value) {
  if constexpr (sizeof(Acc) == 8) {
    return rsqrt(value);
  } else {
    return rsqrtf(value);
  }
}

// One thread per row saves its statistics.
template <class Acc>
__device__ __forceinline__ void save_statistics(const LayerNormParams& p, int64_t row, Acc mean,
                                                Acc rstd) {
  if (p.mean != nullptr) static_cast<Acc*>(p.mean)[row] = mean;
  static_cast<Acc*>(p.rstd)[row] = rstd;
}

// The factors and summands of kVec columns.
template <class T, int kVec>
struct Affine {
  using Acc = Accum<T>;
  Vec<Acc, kVec> weight, bias;

  // Absent columns get arbitrary values.
  __device__ __forceinline__ void load(const LayerNormParams& p, int64_t column, bool present) {
    if (present && p.weight.data != nullptr) {
      weight = load_either<T, kVec>(p.weight.data, p.weight.dtype == DType::kFloat32, column);
    } else {
      fill(weight, Acc(1));
    }
    if (present && p.bias.data != nullptr) {
      bias = load_either<T, kVec>(p.bias.data, p.bias.dtype == DType::kFloat32, column);
    } else {
      fill(bias, Acc(0));
    }
  }
  template <class O, bool kCentered>
  __device__ __forceinline__ Vec<O, kVec> apply(const Vec<T, kVec>& input, Acc mean,
                                                Acc rstd) const {
    Vec<Acc, kVec> y = widen(input);
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      if constexpr (kCentered) {
        y[j] = (y[j] - mean) * rstd * weight[j] + bias[j];
      } else {
        y[j] = y[j] * rstd * weight[j];
      }
    }
    return narrow<O>(y);
  }

 private:
  static __device__ __forceinline__ void fill(Vec<Acc, kVec>& values, Acc value) {
#pragma unroll
    for (int j = 0; j < kVec; ++j) values[j] = value;
  }
};

template <class Acc>
__device__ __forceinline__ Acc rstd_of(const LayerNormParams& p, Acc squares) {
  return reciprocal_root(squares / static_cast<Acc>(p.cols) + static_cast<Acc>(p.eps));
}

// The ring of a call: rows of x, or of the residual and the branch, of type B.
template <int kHeld, class T, class B>
struct NormRing {
  using type = RowRing<kHeld, T, B>;
};
template <int kHeld, class T>
struct NormRing<kHeld, T, void> {
  using type = RowRing<kHeld, T>;
};

// Layout: x or residual (rows, cols), row stride p.input_stride; branch the same with its own
// stride; sum and y dense. B: the branch's type, or void. O: the type of y. Grid: persistent
// blocks. Group g of block b has the rows b * groups + g, + gridDim * groups, and so on.
template <class T, class O, class B, int kHeld, bool kCentered>
__global__ void __launch_bounds__(kRingThreads, 1)
    layer_norm_persistent_kernel(const LayerNormParams p, int lanes) {
  using Acc = Accum<T>;
  constexpr int kVec = kVecSize<T>;
  constexpr bool kAdds = !std::is_void_v<B>;
  using Ring = typename NormRing<kHeld, T, B>::type;
  using Meeting = MomentsMeeting<kCentered, Acc>;
  extern __shared__ uint4 ring_storage[];
  __shared__ Acc meeting_storage[Meeting::kSlots];
  const RowGroup group(lanes);
  const HeldColumns<kVec> columns(group, static_cast<int>(p.cols));
  Meeting meeting(group, meeting_storage);
  Ring ring(ring_storage, columns);

  const int64_t step = int64_t{gridDim.x} * group.count;
  int64_t row = int64_t{blockIdx.x} * group.count + group.index;
  auto operands = [&](int64_t r) {
    const T* x = static_cast<const T*>(p.input) + r * p.input_stride;
    if constexpr (kAdds) {
      return std::tuple(x, static_cast<const B*>(p.branch) + r * p.branch_stride);
    } else {
      return std::tuple(x);
    }
  };
#pragma unroll 1
  for (int stage = 0; stage < Ring::kStages; ++stage) {
    const int64_t r = row + stage * step;
    ring.copy(stage, operands(r), r < p.rows);
  }
  Affine<T, kVec> affine[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) affine[i].load(p, columns.first(i), columns.has(i));

  // All groups of a block take the same number of turns.
  for (; p.rows > row - group.index; row += step) {
    ring.wait();
    Vec<T, kVec> x[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      x[i] = ring.template read<0>(i);
      if constexpr (kAdds) {
        // Rounded to the sum's type before the norm reads it, as the two ops one after the other.
        Vec<Acc, kVec> sum = widen(x[i]);
        const Vec<Acc, kVec> branch = widen(ring.template read<1>(i));
#pragma unroll
        for (int j = 0; j < kVec; ++j) sum[j] += branch[j];
        x[i] = narrow<T>(sum);
      }
    }
    const int64_t later = row + Ring::kStages * step;
    ring.replace(operands(later), later < p.rows);
    if constexpr (kAdds) {
      T* sums = static_cast<T*>(p.sum) + row * p.cols;
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        if (row < p.rows && columns.has(i)) store_vec_global(sums + columns.first(i), x[i]);
      }
    }
    const auto moments = row_moments<kCentered>(x, columns, static_cast<int>(p.cols), meeting);
    const Acc rstd = rstd_of(p, moments.squares);
    if (row >= p.rows) continue;
    if (columns.lane == 0) save_statistics(p, row, moments.mean, rstd);
    O* y = static_cast<O*>(p.output) + row * p.cols;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (!columns.has(i)) continue;
      store_vec_global(y + columns.first(i),
                       affine[i].template apply<O, kCentered>(x[i], moments.mean, rstd));
    }
  }
}

template <class T, class O, class B, int kHeld, bool kCentered>
void launch_persistent(const LayerNormParams& p, const LayerNormPlan& plan, cudaStream_t stream) {
  launch(layer_norm_persistent_kernel<T, O, B, kHeld, kCentered>,
         dim3(static_cast<unsigned>(plan.blocks)), dim3(plan.threads),
         NormRing<kHeld, T, B>::type::bytes(plan.threads), stream, p, plan.lanes);
}

}  // namespace warpwright
