// What the operators in this folder share.
#pragma once

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>

#include "ops/scan/scan.h"
#include "torch/dispatch.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include "torch/cuda.h"
#endif

namespace warpwright {

// The sizes around `dim`, which has been wrapped.
inline void set_scan_sizes(ScanParams& p, at::IntArrayRef sizes, int64_t dim) {
  p.outer = p.length = p.inner = 1;
  for (int64_t d = 0; d < static_cast<int64_t>(sizes.size()); ++d) {
    (d < dim ? p.outer : d == dim ? p.length : p.inner) *= sizes[static_cast<size_t>(d)];
  }
  if (p.length == 1) {  // rows of one element are faster than columns of one
    p.outer *= p.inner;
    p.inner = 1;
  }
}

namespace call {

inline Tensor linear_scan(const Tensor& gate, const Tensor& input, const OptionalTensor& initial,
                          int64_t dim, bool reverse, bool shifted, bool levels = false) {
  static const auto op = find_op<Tensor(const Tensor&, const Tensor&, const OptionalTensor&,
                                        int64_t, bool, bool, bool)>("warpwright::linear_scan");
  return op.call(gate, input, initial, dim, reverse, shifted, levels);
}

// h_t = exp(level_t - level_{t-1}) h_{t-1} + input_t
inline Tensor level_scan(const Tensor& level, const Tensor& input, int64_t dim, bool reverse) {
  return linear_scan(level, input, std::nullopt, dim, reverse, /*shifted=*/false, /*levels=*/true);
}

}  // namespace call

// What is at the step before each step of the scan; `first` before the first one, or zero.
inline Tensor before_steps(const Tensor& steps, const Tensor& first, int64_t dim, bool reverse) {
  const c10::SymInt size = steps.sym_size(dim);
  const Tensor rest = steps.narrow_symint(dim, reverse ? 1 : 0, size - 1);
  const Tensor start =
      first.defined() ? first.unsqueeze(dim) : at::zeros_like(steps.narrow_symint(dim, 0, 1));
  return reverse ? at::cat({rest, start}, dim) : at::cat({start, rest}, dim);
}

#ifdef WARPWRIGHT_WITH_CUDA
inline void scan_cuda(const ScanParams& p, const Tensor& like, cudaStream_t stream) {
  const ScanPlan plan = choose_scan(p);
  const Workspace workspace(plan.workspace_bytes, like);
  launch_scan(p, plan, workspace.data(), stream);
}
#endif

}  // namespace warpwright
