// conv2d_join_skip: makes a view of a convolution's input an output of the convolution's node, so
// that its backward adds the two gradients of the input (torch/skip.h).
#include "torch/skip.h"
#include "ops/conv2d/torch/common.h"
#include "torch/plain.h"
#include "torch/view_output.h"

namespace warpwright {
namespace {

using NodePtr = decltype(torch::autograd::Edge::function);  // shared or intrusive

// The node that read `input`, from `node` upwards along first edges: a batch norm may follow the
// convolution. Null if it is none of kSkipNodes, or has a skip.
NodePtr find_skip_node(NodePtr node, const torch::autograd::Edge& input) {
  constexpr int kSteps = 4;  // a convolution, its batch norm, an activation and a pool
  for (int step = 0; step < kSteps && node && node->num_outputs() > 0; ++step) {
    const auto& edge = node->next_edge(0);
    if (edge.function == input.function && edge.input_nr == input.input_nr) {
      for (const SkipNode& kind : kSkipNodes) {
        if (node->num_inputs() == kind.outputs && node->name() == kind.name) return node;
      }
      return nullptr;
    }
    node = edge.function;
  }
  return nullptr;
}

// `skip`: a view of `input` of its sizes, made without gradients. `output`: what layers made of
// `input`. False: `skip` stays as it was, and the caller uses `input` itself.
bool join_skip(const Tensor& skip, const Tensor& input, const Tensor& output) {
  if (!is_plain(skip) || !is_plain(input) || !is_plain(output)) return false;
  if (!needs_gradient(input) || !output.requires_grad()) return false;
  if (!skip.is_view() || skip.is_same(input) || skip.grad_fn()) return false;
  if (!skip.is_alias_of(input) || !skip.sizes().equals(input.sizes())) return false;
  const auto node = find_skip_node(output.grad_fn(), torch::autograd::impl::gradient_edge(input));
  if (!node) return false;
  set_history(skip, node);
  forbid_writes(skip);
  return true;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def("conv2d_join_skip(Tensor skip, Tensor input, Tensor output) -> bool",
        {at::Tag::pt2_compliant_tag});
  m.impl("conv2d_join_skip", c10::DispatchKey::CompositeImplicitAutograd, TORCH_FN(join_skip));
}

}  // namespace warpwright
