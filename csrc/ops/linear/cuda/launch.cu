// The launches of linear: the head's kernels or the matrix product's.
#include "ops/linear/linear.h"

namespace warpwright {

void launch_linear(const GemmParams& p, const LinearPlan& plan, void* workspace,
                   cudaStream_t stream) {
  plan.head ? launch_linear_head(p, stream) : launch_gemm(p, plan.gemm, workspace, stream);
}

// The kernels are independent: each may start before the previous one ends.
void launch_linear_gradients(LinearGradients g, const LinearGradientsPlan& plan, void* workspace,
                             cudaStream_t stream) {
  if (plan.head) return launch_linear_head_gradients(*head_gradients(g), stream);
  auto* parts = static_cast<char*>(workspace);
  if (plan.input) {
    g.input->overlap.next = plan.weight || plan.bias;
    launch_linear(*g.input, *plan.input, parts, stream);
  }
  parts += plan.input_bytes();
  if (plan.weight) {
    g.weight->row_sums = g.bias ? g.bias->sum : nullptr;
    g.weight->overlap = {plan.bias.has_value(), plan.input.has_value()};
    launch_linear(*g.weight, *plan.weight, parts, stream);
  }
  parts += plan.weight_bytes();
  if (plan.bias) {
    g.bias->overlaps_previous = plan.input || plan.weight;
    launch_column_sum(*g.bias, *plan.bias, parts, stream);
  }
}

}  // namespace warpwright
