// Shipped: cross-entropy's own kernel, which writes the loss and the gradient in one pass.
// Why: the gradient by the logits is softmax(x) - onehot(label). Rung 8 has all of it on chip but
// the label. A warp loads the next rows into a ring by bulk copies while others add, exponentiate
// and store.
// Bound: memory: one read and one write of the logits.
#include "ladder.cuh"
#include "ops/cross_entropy/cuda/fused_ring_sm90.cu"

namespace ladder {

const Rung kRung = {Function::kCrossEntropy, 1, kAnyCols, (warpwright::kRingWarps + 1) * 32,
                    227 * 1024};

void launch_rung(const Problem& p) {
  using namespace warpwright;  // the op's parameters and its choice of a plan
  // Maximum and sum of each row, the number of labels, and where a bad label is reported.
  cuda_check(cudaMemsetAsync(p.workspace, 0, 64, p.stream), "memset");
  CrossEntropyGradientParams call{};
  call.dtype = call.loss_dtype = DType::kFloat32;
  call.target_dtype = DType::kInt64;
  call.kind = TargetKind::kLabels;
  call.reduction = LossReduction::kNone;
  call.rows = p.rows;
  call.classes = p.cols;
  call.ignore_index = -100;
  call.layout = call.grad_layout = {p.rows, 0, p.cols, 1};
  call.input = p.x;
  call.target = p.labels;
  call.loss = p.loss;
  call.error = reinterpret_cast<ErrorRecord*>(p.workspace);
  call.total_weight = reinterpret_cast<float*>(p.workspace + 32);
  call.stats = reinterpret_cast<float*>(p.workspace + 64);
  call.grad_input = p.result;
  const CrossEntropyFusedPlan plan = choose_cross_entropy_fused(call, current_device_info(), true);
  if (!plan.fused.is_ring()) throw std::runtime_error("the op takes " + describe(plan));
  launch_cross_entropy_gradient_ring(call, plan.fused, p.stream);
}

}  // namespace ladder
