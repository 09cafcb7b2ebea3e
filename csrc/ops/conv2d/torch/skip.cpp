// conv2d_join_skip: a view of a convolution's input that is an output of the convolution's node, so
// that its backward adds the two gradients of the input (torch/skip.h).
#include "torch/skip.h"

#include <ATen/core/grad_mode.h>

#include "ops/conv2d/torch/common.h"
#include "torch/plain.h"
#include "torch/traced.h"
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

bool is_watched(const Tensor& x) { return !is_plain(x) && !is_traced(x); }

// `output`: what layers made of `input`. Without a node to join it returns `input` itself.
Tensor join_skip(const Tensor& input, const Tensor& output) {
  if (is_watched(input) || is_watched(output)) return input;
  if (!needs_gradient(input) || !output.requires_grad()) return input;
  const auto node = find_skip_node(output.grad_fn(), torch::autograd::impl::gradient_edge(input));
  if (!node) return input;
  Tensor skip;
  {
    const at::NoGradGuard no_grad;
    skip = input.view_as(input);
  }
  set_history(skip, node);
  forbid_writes(skip);
  return skip;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def("conv2d_join_skip(Tensor(a) input, Tensor output) -> Tensor(a)",
        {at::Tag::pt2_compliant_tag});
  m.impl("conv2d_join_skip", c10::DispatchKey::CompositeImplicitAutograd, TORCH_FN(join_skip));
}

}  // namespace warpwright
