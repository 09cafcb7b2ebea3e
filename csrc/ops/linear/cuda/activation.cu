// The gradient of an activation, and the bias gradient. One pass reads dy and the kept values once,
// writes dz once and sums its columns.
#include "device/access.cuh"
#include "device/activation.cuh"
#include "gemm/column_sum.cuh"
#include "ops/linear/activation.h"

namespace warpwright {
namespace {

// dz = dy * f'(kept), as column_sum_kernel sees it. kept and dz are row-major and dense.
template <class T, int kVec>
struct ActivationGradientColumns {
  // With a sixth block of scalars per SM, ptxas would spill.
  static constexpr int kMinBlocks = kVec == 1 && sizeof(T) < 8 ? 5 : 0;
  struct Loaded {
    Vec<T, kVec> dy;
    Vec<T, kVec> kept;
  };
  MatrixColumns<T, kVec> dy;
  const T* kept;
  T* dz;
  int64_t cols;
  Activation activation;

  __device__ __forceinline__ Loaded load(int64_t row, int64_t col) const {
    return {dy.load(row, col), load_vec<kVec>(kept + row * cols + col)};
  }
  __device__ __forceinline__ void values(const Loaded& loaded, int64_t row, int64_t col,
                                         Accum<T> (&v)[kVec]) const {
    using Acc = Accum<T>;
    Acc z[kVec];
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      v[i] = convert<Acc>(loaded.dy.data[i]);
      z[i] = convert<Acc>(loaded.kept.data[i]);
    }
    constexpr Rounding kRounding = sizeof(T) > 2 ? Rounding::kFull : Rounding::kTf32;
    activate_backward<kRounding, kVec>(activation, z, v);
    Vec<T, kVec> result;
#pragma unroll
    for (int i = 0; i < kVec; ++i) result[i] = convert<T>(v[i]);
    store_vec_global(dz + row * cols + col, result);
  }
};

}  // namespace

void launch_linear_activation_backward(const LinearActivationBackwardParams& p,
                                       const ColumnSumPlan& plan, void* workspace,
                                       cudaStream_t stream) {
  const ColumnSumParams& s = p.column_sum;
  if (s.cols == 0 || (s.rows == 0 && s.sum == nullptr)) return;
  for_dtype(s.dtype, [&]<class T>() {
    launch_column_sum_of<T>(s, plan, workspace, stream, [&]<int kVec>() {
      return ActivationGradientColumns<T, kVec>{
          {static_cast<const T*>(s.matrix), s.stride_row, s.stride_col},
          static_cast<const T*>(p.kept),
          static_cast<T*>(p.grad_preactivation),
          s.cols,
          p.activation};
    });
  });
}

}  // namespace warpwright
