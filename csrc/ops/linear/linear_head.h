// What the kernels of a classifier's head take (linear_head.cu): a few outputs of a batch that a
// few blocks read, one launch forward and one for all gradients.
#pragma once

#include <cstdint>
#include <optional>

#include "gemm/params.h"

namespace warpwright {

constexpr int64_t kMaxHeadOutputs = 16;
constexpr int64_t kMaxHeadRows = 512;
constexpr int64_t kMaxHeadFeatures = 1024;
constexpr int64_t kMaxHeadForwardFeatures = 256;  // in shared memory

constexpr bool is_head(int64_t rows, int64_t features, int64_t outputs) {
  auto within = [](int64_t extent, int64_t most) { return extent > 0 && extent <= most; };
  return within(rows, kMaxHeadRows) && within(features, kMaxHeadFeatures) &&
         within(outputs, kMaxHeadOutputs);
}

inline bool takes_head(const GemmParams& p) {
  const bool along_k = p.k == 1 || (p.a_stride_k == 1 && p.b_stride_k == 1);
  return is_head(p.m, p.k, p.n) && p.k <= kMaxHeadForwardFeatures && along_k && !p.accum_d &&
         !p.accumulate;
}

struct LinearHeadGradients {
  DType dtype;
  int64_t rows;
  int64_t features;
  int64_t outputs;
  const void* dy;  // (rows, outputs)
  int64_t dy_stride_row;
  int64_t dy_stride_col;
  const void* x;  // (rows, features), rows x_stride apart
  int64_t x_stride;
  const void* weight;  // (outputs, features), rows weight_stride apart
  int64_t weight_stride;
  void* dx;  // (rows, features); null: not wanted, like the next two
  void* dw;  // (outputs, features)
  void* db;  // (outputs)
};

// All gradients in one kernel, if it takes them. Both products have dy as A and the features as n.
inline std::optional<LinearHeadGradients> head_gradients(const LinearGradients& g) {
  if (!g.input && !g.weight) return std::nullopt;
  auto along_features = [](const GemmParams& p) { return p.n == 1 || p.b_stride_n == 1; };
  auto of_dy = [](const GemmParams& p, int64_t rows, int64_t outputs, int64_t stride_row,
                  int64_t stride_col) {
    return LinearHeadGradients{.dtype = p.dtype,
                               .rows = rows,
                               .features = p.n,
                               .outputs = outputs,
                               .dy = p.a,
                               .dy_stride_row = stride_row,
                               .dy_stride_col = stride_col};
  };
  LinearHeadGradients head =
      g.input
          ? of_dy(*g.input, g.input->m, g.input->k, g.input->a_stride_m, g.input->a_stride_k)
          : of_dy(*g.weight, g.weight->k, g.weight->m, g.weight->a_stride_k, g.weight->a_stride_m);
  if (g.input) {
    if (!along_features(*g.input)) return std::nullopt;
    head.weight = g.input->b;
    head.weight_stride = g.input->b_stride_k;
    head.dx = g.input->d;
  }
  if (g.weight) {
    if (!along_features(*g.weight)) return std::nullopt;
    head.x = g.weight->b;
    head.x_stride = g.weight->b_stride_k;
    head.dw = g.weight->d;
  }
  if (g.bias) head.db = g.bias->sum;
  if (!is_head(head.rows, head.features, head.outputs)) return std::nullopt;
  return head;
}

}  // namespace warpwright
