// linear(x, W, b) = x W^T + b as three matrix products D = A B^T (gemm/). With row-major x and W:
//
//   fwd    y  (M, O) = x W^T + b    A = x    (m, k)    B = W    (n, k)    "NT"
//   dgrad  dx (M, I) = dy W         A = dy   (m, k)    B = W^T  (n, k)    "NN"
//   wgrad  dW (O, I) = dy^T x       A = dy^T (m, k)    B = x^T  (n, k)    "TN"
//
// and db (O) = column sums of dy. Row- and column-major operands are read without a copy.
// Bound: 2 M O I FLOPs each on the tensor cores, unless one extent is small.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

#include "gemm/column_sum.h"
#include "gemm/gemm.h"
#include "ops/linear/aligned_copy.h"
#include "ops/linear/head.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace warpwright {

struct MatrixStrides {
  int64_t row;
  int64_t col;
};

// Returns a matrix's strides in the form that Operand needs: one of the two is 1. Returns nullopt
// if neither direction is contiguous; the matrix must then be copied. A direction of one element
// gets stride 1, or 0 if the other direction is contiguous: 0 satisfies every alignment.
inline std::optional<MatrixStrides> matrix_strides(int64_t rows, int64_t cols,
                                                   MatrixStrides strides) {
  if (cols <= 1) return MatrixStrides{strides.row, strides.row == 1 ? 0 : 1};
  if (rows <= 1) return MatrixStrides{strides.col == 1 ? 0 : 1, strides.col};
  if (strides.row != 1 && strides.col != 1) return std::nullopt;
  return strides;
}

// ---- forward, or a single product ----

// The workspace holds the copies, then what the product's kernels need.
struct LinearPlan {
  bool head;             // cuda/head.cu, else `gemm`
  AlignedCopies copies;  // of the operands that `gemm` reads
  int64_t copies_bytes;
  GemmPlan gemm;

  int64_t workspace_bytes() const { return head ? 0 : copies_bytes + gemm.workspace_bytes; }
};

inline LinearPlan choose_linear(const GemmParams& p, const DeviceInfo& device) {
  if (takes_head(p) && !takes_few_rows(p, device)) return {.head = true};
  const AlignedCopies copies = choose_copies(p, device);
  return {.head = false,
          .copies = copies,
          .copies_bytes = copies_bytes(p, copies),
          .gemm = choose_gemm(with_copies(p, copies, nullptr), device)};
}

inline std::string describe(const GemmParams& p, const LinearPlan& plan) {
  if (!plan.head) {
    return describe(with_copies(p, plan.copies, nullptr), plan.gemm) + describe(plan.copies);
  }
  return "a classifier's head, FMA, a warp a row" + describe_majors(p) +
         " (so few outputs of so few rows that the launch takes longer)";
}

// ---- gradients ----

// The gradients that a backward wants; each may be missing.
struct LinearGradients {
  std::optional<GemmParams> input;
  std::optional<GemmParams> weight;
  std::optional<ColumnSumParams> bias;
};

// All gradients by the head's one kernel, if it supports them. Both products have dy as A and the
// features as n.
inline std::optional<LinearHeadGradients> head_gradients(const LinearGradients& g) {
  if (!g.input && !g.weight) return std::nullopt;
  if (g.weight && g.weight->transposed_d) return std::nullopt;
  // It writes the operands' type.
  if ((g.input && g.input->accum_d) || (g.weight && g.weight->accum_d) ||
      (g.bias && g.bias->wide_sum)) {
    return std::nullopt;
  }
  LinearHeadGradients head{};
  if (g.weight) {
    const GemmParams& p = *g.weight;
    if (p.n != 1 && p.b.stride_mn != 1) return std::nullopt;
    head = {.dtype = p.dtype(),
            .rows = p.k,
            .features = p.n,
            .outputs = p.m,
            .dy = p.a.data,
            .dy_stride_row = p.a.stride_k,
            .dy_stride_col = p.a.stride_mn,
            .x = p.b.data,
            .x_stride = p.b.stride_k,
            .dw = p.d};
  }
  if (g.input) {
    const GemmParams& p = *g.input;
    if (p.n != 1 && p.b.stride_mn != 1) return std::nullopt;
    head.dtype = p.dtype();
    head.rows = p.m;
    head.features = p.n;
    head.outputs = p.k;
    head.dy = p.a.data;
    head.dy_stride_row = p.a.stride_mn;
    head.dy_stride_col = p.a.stride_k;
    head.weight = p.b.data;
    head.weight_stride = p.b.stride_k;
    head.dx = p.d;
  }
  if (g.bias) head.db = g.bias->sum;
  if (!is_head(head.rows, head.features, head.outputs)) return std::nullopt;
  return head;
}

// The weight gradient as a kernel takes it. If no kernel may write it transposed, its operands
// change places. dy is then B, so the product brings no bias gradient.
inline GemmParams weight_product(const GemmParams& p) {
  return !p.transposed_d || stores_transposed(p) ? p : transposed(p);
}

// The workspace holds the copy of dy, then each kernel's part.
struct LinearGradientsPlan {
  bool head;                        // one kernel for all (cuda/head.cu)
  int64_t dy_copy_bytes;            // both products read one copy of dy, if it is not 0
  std::optional<LinearPlan> input;  // none: not wanted, or empty
  std::optional<LinearPlan> weight;
  std::optional<ColumnSumPlan> bias;  // none: not wanted, or summed by the weight's product

  // The kernels may run at the same time, so each has its own part of the workspace.
  static int64_t whole(int64_t bytes) { return ceil_div(bytes, int64_t{256}) * 256; }
  int64_t input_bytes() const { return input ? whole(input->workspace_bytes()) : 0; }
  int64_t weight_bytes() const { return weight ? whole(weight->workspace_bytes()) : 0; }
  int64_t workspace_bytes() const {
    return whole(dy_copy_bytes) + input_bytes() + weight_bytes() +
           (bias ? bias->workspace_bytes : 0);
  }
};

// dy is A of both products.
inline AlignedCopyParams copy_of_dy(const LinearGradients& g, void* copy) {
  return copy_of_a(g.input ? *g.input : *g.weight, copy);
}

// The products of the copied dy.
inline LinearGradients with_copied_dy(LinearGradients g, const AlignedCopyParams& copy) {
  for (auto* product : {&g.input, &g.weight}) {
    if (*product) (*product)->a = copied_operand((*product)->a, copy);
  }
  return g;
}

inline LinearGradientsPlan choose_linear_gradients(const LinearGradients& wanted,
                                                   const DeviceInfo& device) {
  LinearGradientsPlan plan{};
  LinearGradients g = wanted;
  plan.head = head_gradients(g).has_value();
  if (plan.head) return plan;
  auto wants_copy = [&](const std::optional<GemmParams>& p) {
    return p && !is_empty(*p) && choose_copies(*p, device).a;
  };
  if (wants_copy(g.input) || wants_copy(g.weight)) {
    const AlignedCopyParams copy = copy_of_dy(g, nullptr);
    plan.dy_copy_bytes = copy_bytes(copy);
    g = with_copied_dy(g, copy);
  }
  if (g.input && !is_empty(*g.input)) plan.input = choose_linear(*g.input, device);
  if (g.weight && !is_empty(*g.weight)) {
    GemmParams weight = *g.weight;
    const bool same_type = g.bias && g.bias->wide_sum == weight.accum_d;
    weight.row_sums = same_type ? g.bias->sum : nullptr;
    plan.weight = choose_linear(weight_product(weight), device);
  }
  const bool summed = plan.weight && !plan.weight->head && plan.weight->gemm.sums_rows;
  if (g.bias && !summed) plan.bias = choose_column_sum(*g.bias, device);
  return plan;
}

// ---- entries ----

void gemm_cpu(const GemmParams& params);
void column_sum_cpu(const ColumnSumParams& params);

#ifdef WARPWRIGHT_WITH_CUDA
// A workspace is aligned to 256 bytes, or null if the plan needs none.
void launch_linear(const GemmParams& params, const LinearPlan& plan, void* workspace,
                   cudaStream_t stream);
void launch_linear_gradients(LinearGradients gradients, const LinearGradientsPlan& plan,
                             void* workspace, cudaStream_t stream);
#endif

}  // namespace warpwright
