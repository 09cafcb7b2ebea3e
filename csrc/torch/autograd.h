// Autograd for dispatcher ops without torch::autograd::Function, which torch.func refuses.
//
// An op describes its backward by a struct
//   struct ReluBackward {
//     static constexpr const char* kName = "WarpwrightReluBackward";
//     struct Attributes {};                       // non-tensor arguments
//     static variable_list backward(const Attributes&, const variable_list& saved,
//                                   const variable_list& grads, const NeedsGrad& needs);
//   };
// and its Autograd kernel is
//   auto node = make_node<ReluBackward>({}, input);      // null: nothing needs a gradient
//   Tensor output = below_autograd([&] { return relu(input); });
//   if (node) { set_history(output, node); node->save_output(output); }
//   if (has_tangent(input)) set_tangent(output, f(tangent(input)));   // forward-mode AD
// It is the form of PyTorch's own generated code (tools/autograd/gen_variable_type.py).
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/alias.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/input_metadata.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>
// torch >= 2.12 keeps nodes in c10::intrusive_ptr and declares them in a header of their own.
#if __has_include(<torch/csrc/autograd/node.h>)
#include <torch/csrc/autograd/node.h>
#define WARPWRIGHT_INTRUSIVE_NODES 1
#endif

#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace warpwright {

using at::Tensor;
using torch::autograd::set_history;
using torch::autograd::variable_list;

template <class N>
auto new_node() {
#ifdef WARPWRIGHT_INTRUSIVE_NODES
  return c10::make_intrusive<N>();
#else
  return std::shared_ptr<N>(new N(), torch::autograd::deleteNode);
#endif
}

inline Tensor value_or_undefined(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? *tensor : Tensor();
}

inline std::optional<Tensor> optional_if_defined(const Tensor& tensor) {
  return tensor.defined() ? std::optional<Tensor>(tensor) : std::nullopt;
}

// Derivatives that are zero are left undefined.
inline Tensor sum_of(const Tensor& a, const Tensor& b) {
  if (!a.defined()) return b;
  return b.defined() ? a + b : a;
}

// Runs `f` with the autograd keys excluded: dispatcher calls inside reach CPU, CUDA or Meta.
template <class F>
auto below_autograd(F&& f) {
  at::AutoDispatchBelowADInplaceOrView guard;
  return f();
}

// Forward-mode AD at the current level (PyTorch has one: 0).
inline bool has_tangent(const Tensor& tensor) {
  return tensor.defined() && tensor._fw_grad(/*level=*/0).defined();
}
template <class... Tensors>
bool any_tangent(const Tensors&... tensors) {
  return (has_tangent(tensors) || ...);
}
inline Tensor tangent(const Tensor& tensor) { return tensor._fw_grad(/*level=*/0); }
// The value without its tangent, for use inside a tangent formula.
inline Tensor primal(const Tensor& tensor) {
  return has_tangent(tensor) ? tensor._fw_primal(/*level=*/0) : tensor;
}
inline void set_tangent(const Tensor& output, const Tensor& output_tangent) {
  output._set_fw_grad(output_tangent, /*level=*/0, /*is_inplace_op=*/false);
}

// Whether reverse mode differentiates it.
inline bool needs_gradient(const Tensor& tensor) {
  return at::GradMode::is_enabled() && tensor.defined() && tensor.requires_grad();
}
// Whether either mode differentiates it.
inline bool is_differentiated(const Tensor& tensor) {
  return needs_gradient(tensor) || has_tangent(tensor);
}

// For an argument without a derivative, whose gradient would be lost silently.
inline void check_no_gradient(const Tensor& tensor, const char* op, const char* name) {
  TORCH_CHECK(!needs_gradient(tensor), "The function '", op,
              "' is not differentiable with respect to argument '", name,
              "'. This input cannot have requires_grad True.");
}
inline void check_no_tangent(const Tensor& tensor, const char* op, const char* name) {
  TORCH_CHECK(!has_tangent(tensor), op, " is not differentiable wrt ", name,
              ", it cannot have forward grad defined");
}
inline void check_constant(const Tensor& tensor, const char* op, const char* name) {
  check_no_gradient(tensor, op, name);
  check_no_tangent(tensor, op, name);
}

// ---- derivatives that are zero ----

Tensor with_zero_terms(const Tensor& value, torch::autograd::edge_list edges);

// Backward: passes its first input on, and zeros to the tensors of the other edges.
class ZeroTerms final : public torch::autograd::Node {
 public:
  variable_list apply(variable_list&& grads) override {
    variable_list results(num_outputs());
    if (!grads[0].defined()) return results;
    results[0] = grads[0];
    const torch::autograd::edge_list edges(next_edges().begin() + 1, next_edges().end());
    for (size_t i = 1; i < results.size(); ++i) {
      if (!task_should_compute_output(i)) continue;
      const torch::autograd::Edge edge = next_edge(i);
      results[i] =
          with_zero_terms(edge.function->input_metadata(edge.input_nr).zeros_like(), edges);
    }
    return results;
  }
  std::string name() const override { return "WarpwrightZeroTerms"; }
};

// `value` as a function also of the tensors that `edges` lead to, with derivative zero. Native's
// formulas compute such zeros. Without the edges, a second derivative would raise ("not used in the
// graph") where native returns zero.
inline Tensor with_zero_terms(const Tensor& value, torch::autograd::edge_list edges) {
  bool any = false;
  for (const auto& edge : edges) any |= edge.is_valid();
  if (!any || !value.defined() || !at::GradMode::is_enabled()) return value;
  auto node = new_node<ZeroTerms>();
  const bool has_history = value.requires_grad();
  edges.insert(edges.begin(),
               has_history ? torch::autograd::impl::gradient_edge(value) : torch::autograd::Edge());
  node->set_next_edges(std::move(edges));
  // A new tensor, because `value` keeps its own history.
  const Tensor result = below_autograd([&] { return at::alias(value); });
  set_history(result, node);
  if (has_tangent(value)) set_tangent(result, tangent(value));
  return result;
}

// The same for a tangent that is computed from the values of `inputs`.
template <class... Inputs>
Tensor tangent_with_zero_terms(const Tensor& tangent, const Inputs&... inputs) {
  if (!(needs_gradient(inputs) || ...)) return tangent;
  return with_zero_terms(tangent, torch::autograd::collect_next_edges(inputs...));
}

// ---- nodes ----

// Which of the node's inputs the running backward pass wants; index = position in make_node(...).
using NeedsGrad = std::vector<bool>;

// A Spec with `static constexpr bool kPiecewiseLinear = true`: its gradients depend on the inputs,
// with derivative zero almost everywhere.
template <class Spec>
concept PiecewiseLinear = Spec::kPiecewiseLinear;

template <class Spec>
class OpNode final : public torch::autograd::Node {
 public:
  typename Spec::Attributes attributes;

  void save(const Tensor& tensor) { saved_.emplace_back(tensor, /*is_output=*/false); }
  // Call after set_history (or rebase_history). Before that the output does not know its node and
  // would be saved whole. Node and output would then own each other and never be freed.
  void save_output(const Tensor& tensor) {
    TORCH_INTERNAL_ASSERT(tensor.grad_fn(), Spec::kName, ": save_output before set_history");
    saved_.emplace_back(tensor, /*is_output=*/true);
  }
  void save_inplace_output(const Tensor& tensor) {
    TORCH_INTERNAL_ASSERT(tensor.grad_fn(), Spec::kName, ": save_output before rebase_history");
    saved_.emplace_back(tensor, /*is_output=*/true, /*is_inplace_on_view=*/tensor.is_view());
  }

  variable_list apply(variable_list&& grads) override {
    bool any_defined = false;
    for (const Tensor& grad : grads) any_defined |= grad.defined();
    if (!any_defined) return variable_list(num_outputs());

    variable_list tensors;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      TORCH_CHECK(!released_, torch::autograd::ERR_BACKWARD_TWICE);
      tensors.reserve(saved_.size());
      for (auto& variable : saved_) tensors.push_back(variable.unpack(getptr()));
    }
    NeedsGrad needs(num_outputs());
    for (size_t i = 0; i < needs.size(); ++i) needs[i] = task_should_compute_output(i);
    variable_list results = Spec::backward(attributes, tensors, grads, needs);
    if constexpr (PiecewiseLinear<Spec>) {
      for (Tensor& result : results) result = with_zero_terms(result, next_edges());
    }
    return results;
  }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& variable : saved_) variable.reset_data();
    released_ = true;
  }

  std::string name() const override { return Spec::kName; }

 private:
  std::vector<torch::autograd::SavedVariable> saved_;
  bool released_ = false;
};

// The node of a call, with edges to `inputs` (undefined tensors keep their slot); null when grad
// mode is off or no input requires a gradient.
template <class Spec, class... Inputs>
auto make_node(typename Spec::Attributes attributes, const Inputs&... inputs) {
  using NodePtr = decltype(new_node<OpNode<Spec>>());
  const bool any_requires_grad = ((inputs.defined() && inputs.requires_grad()) || ...);
  if (!at::GradMode::is_enabled() || !any_requires_grad) return NodePtr();
  auto node = new_node<OpNode<Spec>>();
  node->attributes = std::move(attributes);
  node->set_next_edges(torch::autograd::collect_next_edges(inputs...));
  return node;
}

}  // namespace warpwright
