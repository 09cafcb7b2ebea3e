// Derivatives that are missing: in the graph of a tensor, with None in place of a gradient.
#pragma once

#include <ATen/ops/alias.h>

#include <utility>

#include "torch/autograd.h"

namespace warpwright {

// Backward: passes its first input on, and nothing to the tensors of the other edges.
class MissingTerms final : public torch::autograd::Node {
 public:
  variable_list apply(variable_list&& grads) override {
    variable_list results(num_outputs());
    results[0] = grads[0];
    return results;
  }
  std::string name() const override { return "WarpwrightMissingTerms"; }
};

// `value` as a function also of the tensors that `edges` lead to, without a derivative. Where
// native's gradient is None, a second derivative would else raise ("does not require grad").
inline Tensor with_missing_terms(const Tensor& value, torch::autograd::edge_list edges) {
  bool any = false;
  for (const auto& edge : edges) any |= edge.is_valid();
  if (!any || !value.defined() || !at::GradMode::is_enabled()) return value;
  auto node = new_node<MissingTerms>();
  edges.insert(edges.begin(), value.requires_grad() ? torch::autograd::impl::gradient_edge(value)
                                                    : torch::autograd::Edge());
  node->set_next_edges(std::move(edges));
  // A new tensor, because `value` keeps its own history.
  const Tensor result = below_autograd([&] { return at::alias(value); });
  set_history(result, node);
  if (has_tangent(value)) set_tangent(result, tangent(value));
  return result;
}

}  // namespace warpwright
