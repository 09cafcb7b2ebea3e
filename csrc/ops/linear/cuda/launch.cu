// The launches of linear: the head's kernels or the matrix product's.
#include "ops/linear/linear.h"

namespace warpwright {

namespace {

// A product after its copies, and the kernels' part of the workspace.
struct Prepared {
  GemmParams params;
  void* workspace;
};

Prepared copy_operands(const GemmParams& p, const LinearPlan& plan, void* workspace,
                       cudaStream_t stream) {
  auto* next = static_cast<char*>(workspace);
  if (plan.copies.a) {
    const AlignedCopyParams copy = copy_of_a(p, next);
    launch_aligned_copy(copy, stream);
    next += copy_bytes(copy);
  }
  if (plan.copies.b) launch_aligned_copy(copy_of_b(p, next), stream);
  return {with_copies(p, plan.copies, workspace),
          static_cast<char*>(workspace) + plan.copies_bytes};
}

}  // namespace

void launch_linear(const GemmParams& p, const LinearPlan& plan, void* workspace,
                   cudaStream_t stream) {
  if (plan.head) return launch_linear_head(p, stream);
  if (!plan.copies.any()) return launch_gemm(p, plan.gemm, workspace, stream);
  Prepared product = copy_operands(p, plan, workspace, stream);
  product.params.overlap.previous = false;  // that is a copy, which the product reads
  launch_gemm(product.params, plan.gemm, product.workspace, stream);
}

// The kernels are independent: each may start before the previous one ends.
void launch_linear_gradients(LinearGradients g, const LinearGradientsPlan& plan, void* workspace,
                             cudaStream_t stream) {
  if (plan.head) return launch_linear_head_gradients(*head_gradients(g), stream);
  auto* parts = static_cast<char*>(workspace);
  if (plan.dy_copy_bytes != 0) {
    const AlignedCopyParams copy = copy_of_dy(g, parts);
    launch_aligned_copy(copy, stream);
    g = with_copied_dy(g, copy);
    parts += LinearGradientsPlan::whole(plan.dy_copy_bytes);
  }
  if (plan.input) {
    g.input->overlap.next = plan.weight || plan.bias;
    launch_linear(*g.input, *plan.input, parts, stream);
  }
  parts += plan.input_bytes();
  if (plan.weight) {
    g.weight->row_sums = g.bias ? g.bias->sum : nullptr;
    g.weight->overlap = {plan.bias.has_value(), plan.input.has_value()};
    launch_linear(weight_product(*g.weight), *plan.weight, parts, stream);
  }
  parts += plan.weight_bytes();
  if (plan.bias) {
    g.bias->overlaps_previous = plan.input || plan.weight;
    launch_column_sum(*g.bias, *plan.bias, parts, stream);
  }
}

}  // namespace warpwright
