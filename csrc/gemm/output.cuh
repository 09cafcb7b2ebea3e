// The Outputs (tile/epilogue.cuh) of a product of two matrices.
#pragma once

#include "device/activation.cuh"
#include "gemm/gemm.h"
#include "gemm/split_k_reduce.cuh"
#include "host/launch.h"
#include "tile/epilogue.cuh"

namespace warpwright {

// D in the accumulator's type: the parts of a split product, or a sum over several calls.
template <class Acc>
struct SumOutput : MatrixOutput<Acc> {
  using Base = MatrixOutput<Acc>;
  using Base::kVec;
  bool accumulate = false;  // D += values

  struct Columns : Base::Columns {
    bool accumulate;

    __device__ __forceinline__ void add_old(int64_t row, Acc (&values)[kVec]) const {
      if (!accumulate || row >= this->rows) return;
      const Acc* source = this->pointer + row * this->ld;
      if (this->vectorized) {
        const auto old = load_vec<kVec>(source);
#pragma unroll
        for (int i = 0; i < kVec; ++i) values[i] += old.data[i];
      } else {
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          if (i < this->count) values[i] += source[i];
        }
      }
    }
  };

  __device__ __forceinline__ Columns columns(int64_t col) const {
    return {Base::columns(col), accumulate};
  }

  __device__ __forceinline__ void store(int64_t row, int64_t col, Acc (&values)[kVec]) const {
    const Columns target = columns(col);
    target.add_old(row, values);
    target.store(row, values);
  }
};

// D after an activation, and D before it if wanted.
template <class T>
struct ActivationOutput : MatrixOutput<T> {
  using Base = MatrixOutput<T>;
  using Base::kVec;
  using typename Base::Acc;
  Activation activation = Activation::kNone;
  T* preactivation = nullptr;  // like `pointer`

  struct Columns : Base::Columns {
    Activation activation;
    T* preactivation;  // row 0, or null

    __device__ __forceinline__ void store(int64_t row, const Acc (&values)[kVec]) const {
      if (row >= this->rows) return;
      Acc sums[kVec];
#pragma unroll
      for (int i = 0; i < kVec; ++i) sums[i] = values[i] + this->bias[i];
      if (preactivation != nullptr) this->write(preactivation + row * this->ld, sums);
      activate<kRoundingOf<T>, kVec>(activation, sums);
      this->write(this->pointer + row * this->ld, sums);
    }
  };

  __device__ __forceinline__ Columns columns(int64_t col) const {
    return {Base::columns(col), activation,
            preactivation == nullptr ? nullptr : preactivation + col};
  }

  __device__ __forceinline__ void store(int64_t row, int64_t col, const Acc (&values)[kVec]) const {
    columns(col).store(row, values);
  }
};

// ---- of a product ----

template <class Output, class T>
Output output_at(const GemmParams& p, T* pointer, int64_t pitch) {
  Output output{};
  output.pointer = pointer;
  output.rows = d_rows(p);
  output.cols = d_cols(p);
  output.ld = pitch;
  output.vectorized =
      is_vec_aligned(reinterpret_cast<uintptr_t>(pointer) |
                     static_cast<uintptr_t>(pitch * static_cast<int64_t>(sizeof(T))));
  return output;
}

template <class T>
ActivationOutput<T> activation_output(const GemmParams& p) {
  auto output = output_at<ActivationOutput<T>>(p, static_cast<T*>(p.d), d_pitch(p));
  output.bias = static_cast<const T*>(p.bias);
  output.activation = p.activation;
  output.preactivation = static_cast<T*>(p.preactivation);
  output.vectorized =
      output.vectorized && is_vec_aligned(reinterpret_cast<uintptr_t>(p.preactivation));
  return output;
}

// For accum_d.
template <class Acc>
SumOutput<Acc> sum_output(const GemmParams& p) {
  auto output = output_at<SumOutput<Acc>>(p, static_cast<Acc*>(p.d), d_pitch(p));
  output.accumulate = p.accumulate;
  return output;
}

// The first part.
template <class Acc>
SumOutput<Acc> part_output(const GemmParams& p, void* workspace) {
  return output_at<SumOutput<Acc>>(p, static_cast<Acc*>(workspace), d_cols(p));
}

// Parts of row_sums follow those of D, if the workspace has any, whose pitch is m * n.
template <class Acc>
Acc* row_sum_parts(const GemmParams& p, const GemmPlan& plan, void* workspace) {
  return static_cast<Acc*>(workspace) + (writes_parts(plan) ? plan.splits * p.m * p.n : 0);
}
// Out: D's type.
template <class T, class Out>
RowSumParts<Accum<T>, Out> planned_row_sums(const GemmParams& p, const GemmPlan& plan,
                                            void* workspace) {
  return {row_sum_parts<Accum<T>>(p, plan, workspace),
          plan.sums_rows ? static_cast<Out*>(p.row_sums) : nullptr,
          plan.splits * plan.row_sum_shares, p.m};
}

// D from the parts in the workspace.
template <class T>
void launch_split_k_reduce(const GemmParams& p, const GemmPlan& plan, void* workspace,
                           cudaStream_t stream) {
  using Acc = Accum<T>;
  if (p.accum_d) {
    launch_split_k_reduce<Acc>(workspace, plan.splits, d_rows(p), d_cols(p), sum_output<Acc>(p),
                               stream, planned_row_sums<T, Acc>(p, plan, workspace));
  } else {
    launch_split_k_reduce<Acc>(workspace, plan.splits, p.m, p.n, activation_output<T>(p), stream,
                               planned_row_sums<T, T>(p, plan, workspace));
  }
}

// GemmParams::row_sums from the shares of a row of tiles and the parts of k, if no kernel adds
// parts of D.
template <class T>
void launch_add_row_sums(const GemmParams& p, const GemmPlan& plan, void* workspace,
                         cudaStream_t stream) {
  auto launch = [&]<class Out>() {
    launch_add_row_sums(planned_row_sums<T, Out>(p, plan, workspace), stream);
  };
  p.accum_d ? launch.template operator()<Accum<T>>() : launch.template operator()<T>();
}

}  // namespace warpwright
