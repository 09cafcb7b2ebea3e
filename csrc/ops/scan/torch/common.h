// What the operators in this folder share.
#pragma once

#include <ATen/ops/empty.h>

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

#ifdef WARPWRIGHT_WITH_CUDA
inline void scan_cuda(const ScanParams& p, const Tensor& like, cudaStream_t stream) {
  const ScanPlan plan = choose_scan(p);
  Tensor workspace;
  if (plan.workspace_bytes > 0) {
    workspace = at::empty({plan.workspace_bytes}, like.options().dtype(at::kByte));
  }
  launch_scan(p, plan, workspace.defined() ? workspace.mutable_data_ptr() : nullptr, stream);
}
#endif

}  // namespace warpwright
