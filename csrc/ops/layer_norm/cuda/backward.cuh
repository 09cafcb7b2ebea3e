// Backward by persistent blocks: rows of x and dy pass through a ring; a group computes dx and
// keeps the sums of weight and bias for its columns in registers. A second kernel adds the partial
// sums. With a gradient of x itself, a third operand in the ring, dx includes it.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/math.cuh"
#include "host/launch.h"
#include "ops/layer_norm/layer_norm.h"
#include "tile/rows/ring.cuh"

namespace warpwright {

// The sums of a thread's columns over the rows of its group: of dy * xhat and, centered, of dy.
template <class T, int kHeld, bool kCentered>
struct NormSums {
  static constexpr int kVec = kVecSize<T>;
  static constexpr int kCount = kCentered ? 2 : 1;
  Accum<T> of[kCount][kHeld][kVec] = {};
};

// The factors of a thread's columns, kept for the whole launch if there are registers.
template <class T, int kHeld, bool kCentered>
class NormWeights {
  using Acc = Accum<T>;
  static constexpr int kVec = kVecSize<T>;
  static constexpr bool kKept = kHeld * kVec <= 16;

 public:
  __device__ __forceinline__ NormWeights(const LayerNormBackwardParams& p,
                                         const HeldColumns<kVec>& columns)
      : weight_(p.weight), columns_(columns) {
    if constexpr (kKept) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i) kept_[i] = load(i);
    }
  }
  __device__ __forceinline__ Vec<Acc, kVec> get(int i) const {
    if constexpr (kKept) {
      return kept_[i];
    } else {
      return load(i);
    }
  }

 private:
  __device__ __forceinline__ Vec<Acc, kVec> load(int i) const {
    if (weight_.data != nullptr && columns_.has(i)) {
      return load_either<T, kVec>(weight_.data, weight_.dtype == DType::kFloat32,
                                  columns_.first(i));
    }
    Vec<Acc, kVec> ones;
#pragma unroll
    for (int j = 0; j < kVec; ++j) ones[j] = Acc(1);
    return ones;
  }
  NormVector weight_;
  HeldColumns<kVec> columns_;
  Vec<Acc, kVec> kept_[kKept ? kHeld : 1];
};

// Adds the groups of a block in order and writes its row of the partial sums, (2, blocks, cols).
template <class T, int kHeld, bool kCentered>
__device__ __forceinline__ void write_partials(const NormSums<T, kHeld, kCentered>& sums,
                                               const RowGroup& group,
                                               const HeldColumns<kVecSize<T>>& columns,
                                               int64_t cols, Accum<T>* scratch,
                                               Accum<T>* partials) {
  using Acc = Accum<T>;
  constexpr int kVec = kVecSize<T>, kCount = kCentered ? 2 : 1;
  __syncthreads();
#pragma unroll
  for (int s = 0; s < kCount; ++s) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (!columns.has(i)) continue;
      Acc* place = scratch + (group.index * kCount + s) * cols + columns.first(i);
#pragma unroll
      for (int j = 0; j < kVec; ++j) place[j] = sums.of[s][i][j];
    }
  }
  __syncthreads();
  for (int s = 0; s < kCount; ++s) {
    Acc* row = partials + (int64_t{s} * gridDim.x + blockIdx.x) * cols;
    for (int64_t c = threadIdx.x; c < cols; c += blockDim.x) {
      Acc sum = 0;
      for (int g = 0; g < group.count; ++g) sum += scratch[(g * kCount + s) * cols + c];
      row[c] = sum;
    }
  }
}

// Rows of x and dy; with `kAdds` also of the gradient of x itself.
template <int kHeld, bool kAdds, class T, class O>
using NormBackwardRing = std::conditional_t<kAdds, RowRing<kHeld, T, O, T>, RowRing<kHeld, T, O>>;

// Where row `row` of x, dy and, with `kAdds`, ds begins.
template <class T, class O, bool kAdds>
__device__ __forceinline__ auto norm_backward_rows(const LayerNormBackwardParams& p, int64_t row) {
  const T* x = static_cast<const T*>(p.input) + row * p.input_stride;
  const O* dy = static_cast<const O*>(p.grad_output) + row * p.grad_stride;
  if constexpr (kAdds) {
    return std::tuple(x, dy, static_cast<const T*>(p.grad_sum) + row * p.grad_sum_stride);
  } else {
    return std::tuple(x, dy);
  }
}

// Adds ds to a vector of dx, and stores its copy in the branch's type if that differs.
template <class T, class B, int kVec>
__device__ __forceinline__ void add_sum_gradient(const LayerNormBackwardParams& p, int64_t offset,
                                                 const Vec<T, kVec>& ds,
                                                 Vec<Accum<T>, kVec>& result) {
  const Vec<Accum<T>, kVec> wide = widen(ds);
#pragma unroll
  for (int j = 0; j < kVec; ++j) result[j] += wide[j];
  if constexpr (!std::is_same_v<B, T>) {
    if (p.grad_branch == nullptr) return;
    store_vec_global(static_cast<B*>(p.grad_branch) + offset, narrow<B>(result));
  }
}

// Layout: x, dy and ds (rows, cols), any row strides; dx and its copy dense; partials (2, blocks,
// cols). O: the type of dy. B: void, or the branch's type, and then dx includes ds. Grid:
// persistent blocks. Group g of block b has the rows b * groups + g, + gridDim * groups, and so on.
template <class T, class O, class B, int kHeld, bool kCentered>
__global__ void __launch_bounds__(kRingThreads, 1)
    layer_norm_bwd_kernel(const LayerNormBackwardParams p, int lanes, Accum<T>* partials) {
  using Acc = Accum<T>;
  constexpr int kVec = kVecSize<T>, kCount = kCentered ? 2 : 1;
  constexpr bool kAdds = !std::is_void_v<B>;
  using Meeting = RowMeeting<Acc, kCount>;
  using Ring = NormBackwardRing<kHeld, kAdds, T, O>;
  extern __shared__ uint4 ring_storage[];
  __shared__ Acc meeting_storage[Meeting::kSlots];
  const RowGroup group(lanes);
  const HeldColumns<kVec> columns(group, static_cast<int>(p.cols));
  Meeting meeting(group, meeting_storage);
  constexpr int kStages = Ring::kStages;
  Ring ring(ring_storage, columns);
  NormSums<T, kHeld, kCentered> sums;

  const int64_t step = int64_t{gridDim.x} * group.count;
  int64_t row = int64_t{blockIdx.x} * group.count + group.index;
  auto operands = [&](int64_t r) { return norm_backward_rows<T, O, kAdds>(p, r); };
#pragma unroll 1
  for (int stage = 0; stage < kStages; ++stage) {
    const int64_t r = row + stage * step;
    ring.copy(stage, operands(r), r < p.rows);
  }

  const NormWeights<T, kHeld, kCentered> weights(p, columns);
  const auto* means = static_cast<const Acc*>(p.mean);
  const auto* rstds = static_cast<const Acc*>(p.rstd);
  // Loaded one row ahead.
  Acc next_mean = kCentered && row < p.rows ? means[row] : Acc(0);
  Acc next_rstd = row < p.rows ? rstds[row] : Acc(0);
  const Acc per_column = Acc(1) / static_cast<Acc>(p.cols);
  // All groups of a block take the same number of turns.
  for (; p.rows > row - group.index; row += step) {
    const Acc mean = next_mean, rstd = next_rstd;
    const int64_t after = row + step;
    if constexpr (kCentered) next_mean = after < p.rows ? means[after] : Acc(0);
    next_rstd = after < p.rows ? rstds[after] : Acc(0);

    const bool present = row < p.rows;
    ring.wait();
    // The sums along the row, of dy * weight * xhat and of dy * weight.
    Acc along[kCount] = {};
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      // An absent row adds nothing to the sums.
      const Vec<Acc, kVec> x = widen(present ? ring.template read<0>(i) : Vec<T, kVec>{}),
                           dy = widen(present ? ring.template read<1>(i) : Vec<O, kVec>{}),
                           w = weights.get(i);
      Acc products[kVec], grads[kVec];
#pragma unroll
      for (int j = 0; j < kVec; ++j) {
        // In short rows dx is a difference of nearly equal numbers, both rounded alike.
        const Acc xhat = (x[j] - mean) * rstd, g = rounded_product(dy[j], w[j]);
        sums.of[0][i][j] += dy[j] * xhat;
        if constexpr (kCentered) sums.of[1][i][j] += dy[j];
        products[j] = g * xhat;
        grads[j] = g;
      }
      along[0] += tree_sum<kVec>([&](int j) { return products[j]; });
      if constexpr (kCentered) along[1] += tree_sum<kVec>([&](int j) { return grads[j]; });
    }
    if (p.grad_input != nullptr) {
      meeting.sum(along);
      const Acc slope = along[0] * per_column;
      const Acc shift = kCentered ? along[kCount - 1] * per_column : Acc(0);
      T* dx = static_cast<T*>(p.grad_input) + row * p.cols;
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        if (!present || !columns.has(i)) continue;
        const Vec<Acc, kVec> x = widen(ring.template read<0>(i)),
                             dy = widen(ring.template read<1>(i)), w = weights.get(i);
        Vec<Acc, kVec> result;
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
          const Acc xhat = (x[j] - mean) * rstd;
          result[j] = rstd * (rounded_product(dy[j], w[j]) - shift - xhat * slope);
        }
        if constexpr (kAdds) {
          add_sum_gradient<T, B>(p, row * p.cols + columns.first(i), ring.template read<2>(i),
                                 result);
        }
        store_vec_global(dx + columns.first(i), narrow<T>(result));
      }
    }
    const int64_t later = row + kStages * step;
    ring.replace(operands(later), later < p.rows);
  }
  let_next_kernel_start();
  if (partials == nullptr) return;
  cp_async_wait<0>();
  write_partials<T, kHeld, kCentered>(sums, group, columns, p.cols,
                                      reinterpret_cast<Acc*>(ring_storage), partials);
}

template <class T, class O, class B, int kHeld, bool kCentered>
void launch_bwd_held(const LayerNormBackwardParams& p, const LayerNormBackwardPlan& plan,
                     Accum<T>* partials, cudaStream_t stream) {
  using Ring = NormBackwardRing<kHeld, !std::is_void_v<B>, T, O>;
  launch(layer_norm_bwd_kernel<T, O, B, kHeld, kCentered>, dim3(static_cast<unsigned>(plan.blocks)),
         dim3(plan.threads), Ring::bytes(plan.threads), stream, p, plan.lanes, partials);
}

// Adds the partial sums (2, parts, cols) in order, in a kernel of its own.
void launch_last_sums(const LayerNormBackwardParams& p, int64_t parts, void* partials,
                      cudaStream_t stream);

}  // namespace warpwright
