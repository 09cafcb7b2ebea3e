// Which kernels compute a pass of cross entropy, and how: pure functions of a call's parameters.
#pragma once

#include <initializer_list>

#include "ops/cross_entropy/gradient_plan.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace warpwright {

// ---- offsets of a pass's operands from 16-byte boundaries ----

struct RowOperand {
  const void* data;
  const RowLayout* layout;
  DType dtype;
};

// A stride of a single row (or image) has no effect and counts as aligned.
inline CrossEntropyAlignment row_alignment(const CrossEntropyProblem& p,
                                           std::initializer_list<RowOperand> operands) {
  CrossEntropyAlignment result{true, p.kind != TargetKind::kProbabilities};
  auto phase = [](int64_t bytes) { return ((bytes % 16) + 16) % 16; };
  const RowOperand& lead = *operands.begin();
  for (const RowOperand& x : operands) {
    const int64_t size = dtype_size(x.dtype);
    auto steps = [&](const RowOperand& y, int64_t(&out)[3]) {
      const RowLayout& layout = *y.layout;
      const bool rows = layout.is_rows();
      out[0] = phase(static_cast<int64_t>(reinterpret_cast<uintptr_t>(y.data) % 16));
      out[1] = layout.inner < p.rows ? phase(layout.outer_stride * size) : 0;
      out[2] = rows ? (layout.inner > 1 ? phase(layout.inner_stride * size) : 0)
                    : phase(layout.class_stride * size);
    };
    int64_t own[3], first[3];
    steps(x, own);
    steps(lead, first);
    for (int i = 0; i < 3; ++i) {
      result.all_aligned &= own[i] == 0;
      result.common_phase &= own[i] == first[i];
    }
    // A strip of pixels must not leave its image.
    if (!x.layout->is_rows()) result.all_aligned &= phase(x.layout->inner * size) == 0;
    result.common_phase &= own[0] % size == 0;
  }
  return result;
}

inline CrossEntropyAlignment cross_entropy_alignment(const CrossEntropyProblem& p) {
  const RowOperand input{p.input, &p.layout, p.dtype};
  if (p.kind != TargetKind::kProbabilities) return row_alignment(p, {input});
  return row_alignment(p, {input, {p.target, &p.target_layout, p.target_dtype}});
}

inline CrossEntropyAlignment backward_alignment(const CrossEntropyBackwardParams& p) {
  const RowOperand input{p.input, &p.layout, p.dtype};
  const RowOperand grad{p.grad_input == nullptr ? p.input : p.grad_input,
                        p.grad_input == nullptr ? &p.layout : &p.grad_layout, p.dtype};
  if (p.kind != TargetKind::kProbabilities) return row_alignment(p, {input, grad});
  const RowOperand target{p.target, &p.target_layout, p.target_dtype};
  const RowOperand grad_target{p.grad_target == nullptr ? p.target : p.grad_target,
                               p.grad_target == nullptr ? &p.target_layout : &p.grad_layout,
                               p.target_dtype};
  return row_alignment(p, {input, grad, target, grad_target});
}

// ---- plans ----

// `clusters`: whether the GPU and the library support them.
inline CrossEntropyPlan choose_cross_entropy(const CrossEntropyParams& p, const DeviceInfo& device,
                                             bool clusters) {
  constexpr int kMaxCluster = 8, kWarp = 32;
  CrossEntropyPlan plan = plan_cross_entropy_forward(p, cross_entropy_alignment(p), device);
  // Long rows are spread over the GPU.
  plan.cluster = plan.kernel == CrossEntropyPlan::Kernel::kRows && plan.lanes <= kWarp &&
                 p.reduction != LossReduction::kNone && plan.blocks > 1 &&
                 plan.blocks <= kMaxCluster && clusters;
  const bool is_merged = p.reduction != LossReduction::kNone && plan.blocks > 1 && !plan.cluster;
  plan.partials = is_merged ? plan.blocks : 0;
  plan.workspace_bytes = plan.partials * 2 * cross_entropy_accum_size(p.dtype);
  return plan;
}

inline CrossEntropyPlan choose_cross_entropy_backward(const CrossEntropyBackwardParams& p,
                                                      const DeviceInfo& device) {
  return plan_cross_entropy_backward(p, backward_alignment(p), device);
}

// Loss and gradient of one call: a fused kernel, or the forward and then the backward.
struct CrossEntropyFusedPlan {
  CrossEntropyGradientPlan fused;
  CrossEntropyPlan forward, backward;  // unless fused.on_chip
  int64_t workspace_bytes;             // of `fused`, or of the forward
};

inline CrossEntropyFusedPlan choose_cross_entropy_fused(const CrossEntropyGradientParams& p,
                                                        const DeviceInfo& device, bool clusters) {
  const RowOperand input{p.input, &p.layout, p.dtype};
  const RowOperand grad{p.grad_input, &p.grad_layout, p.dtype};
  const CrossEntropyAlignment alignment =
      p.grad_input == nullptr ? row_alignment(p, {input}) : row_alignment(p, {input, grad});
  CrossEntropyFusedPlan plan{};
  plan.fused = plan_cross_entropy_gradient(p, alignment, device, clusters);
  plan.workspace_bytes = plan.fused.workspace_bytes(p.dtype);
  if (!plan.fused.on_chip) {
    plan.forward = choose_cross_entropy(p, device, clusters);
    plan.backward = choose_cross_entropy_backward(backward_of(p), device);
    plan.workspace_bytes = plan.forward.workspace_bytes;
  }
  return plan;
}

inline std::string describe(const CrossEntropyFusedPlan& plan) { return describe(plan.fused); }

#ifdef WARPWRIGHT_WITH_CUDA
// `workspace`: plan.workspace_bytes.
void launch_cross_entropy(const CrossEntropyParams& params, const CrossEntropyPlan& plan,
                          void* workspace, cudaStream_t stream);
void launch_cross_entropy_backward(const CrossEntropyBackwardParams& params,
                                   const CrossEntropyPlan& plan, cudaStream_t stream);
void launch_cross_entropy_fused(const CrossEntropyGradientParams& params,
                                const CrossEntropyFusedPlan& plan, void* workspace,
                                cudaStream_t stream);
#endif

}  // namespace warpwright
