// gated_activation and gated_activation_backward on every dispatch key. Without `up`, the first
// argument is packed: its last dimension holds the gate and then up, and so does its gradient.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <tuple>
#include <vector>

#include "ops/gated_activation/gated_activation.h"
#include "torch/activation.h"
#include "torch/autograd.h"
#include "torch/check_argument.h"
#include "torch/dispatch.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include "torch/cuda.h"
#endif

namespace warpwright {
namespace {

using TensorPair = std::tuple<Tensor, Tensor>;
using Mask = std::array<bool, 2>;

namespace call {

Tensor gated_activation(const Tensor& gate, const OptionalTensor& up, std::string_view activation) {
  static const auto op = find_op<Tensor(const Tensor&, const OptionalTensor&, std::string_view)>(
      "warpwright::gated_activation");
  return op.call(gate, up, activation);
}

TensorPair gated_activation_backward(const Tensor& grad_output, const Tensor& gate,
                                     const OptionalTensor& up, std::string_view activation,
                                     Mask output_mask) {
  static const auto op =
      find_op<TensorPair(const Tensor&, const Tensor&, const OptionalTensor&, std::string_view,
                         Mask)>("warpwright::gated_activation_backward");
  return op.call(grad_output, gate, up, activation, output_mask);
}

}  // namespace call

// ---- output shape and checks ----

Activation find_gate(std::string_view name, const char* op) {
  return find_activation(name, op, {Activation::kSilu, Activation::kGelu, Activation::kGeluTanh});
}

// A function with a name instead of `gate` or `up`, whose errors name the arguments.
void check_operands(const Tensor& gate, const Tensor& up, const char* op) {
  TORCH_CHECK_NOT_IMPLEMENTED(is_floating(gate.scalar_type()), op,
                              ": gate: expected a real floating-point tensor, got ",
                              gate.scalar_type());
  if (up.defined()) {
    check_argument(up, (std::string(op) + ": up").c_str(), gate.sym_sizes(), gate.scalar_type(),
                   gate);
    return;
  }
  TORCH_CHECK(gate.dim() >= 1 && gate.sym_size(-1) % 2 == 0, op,
              ": gate: expected an even last dimension (the gate, then up), because up is None; "
              "got shape ",
              gate.sym_sizes());
}

struct Halves {
  Tensor gate, up;
};

// Views: the kernels read and write both halves of a packed tensor in place.
Halves halves_of(const Tensor& gate, const Tensor& up) {
  if (up.defined() || !gate.defined()) return {gate, up};
  const c10::SymInt size = gate.sym_size(-1) / 2;
  return {gate.narrow_symint(-1, 0, size), gate.narrow_symint(-1, size, size)};
}

void check_backward(const Tensor& grad_output, const Tensor& gate, const Tensor& up) {
  constexpr const char* kOp = "gated_activation_backward";
  check_operands(gate, up, kOp);
  check_argument(grad_output, "gated_activation_backward: grad_output",
                 halves_of(gate, up).gate.sym_sizes(), gate.scalar_type(), gate);
}

// Every key agrees on strides through this: dense inputs keep theirs, others become dense in the
// same dimension order (ATen's preserve_format). Contiguous ones get the strides of a new tensor.
Tensor empty_like_half(const Tensor& half) {
  if (half.is_contiguous()) return at::empty_symint(half.sym_sizes(), half.options());
  return at::empty_like(half);
}
Tensor empty_output(const Tensor& gate, const Tensor& up) {
  return empty_like_half(halves_of(gate, up).gate);
}
// Both in the order of the gate, so that one walk covers them.
TensorPair empty_gradients(const Tensor& gate, const Tensor& up, Mask wanted) {
  return {wanted[0] ? at::empty_like(gate) : Tensor(),
          wanted[1] && up.defined() ? at::empty_like(gate) : Tensor()};
}

// ---- operands as matrices ----

struct Dimension {
  int64_t size;
  std::vector<int64_t> strides;  // of each operand
};

// The dimensions of all tensors from the outermost of the first tensor's memory to the innermost,
// neighbours merged wherever every tensor allows it.
std::vector<Dimension> merged_dimensions(const std::vector<Tensor>& tensors) {
  const Tensor& first = tensors.front();
  std::vector<int64_t> order(static_cast<size_t>(first.dim()));
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(i);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return first.stride(a) > first.stride(b); });
  std::vector<Dimension> merged;
  for (const int64_t dim : order) {
    if (first.size(dim) == 1) continue;
    Dimension next{first.size(dim), {}};
    for (const Tensor& tensor : tensors) next.strides.push_back(tensor.stride(dim));
    bool fits = !merged.empty();
    for (size_t i = 0; fits && i < tensors.size(); ++i) {
      fits = merged.back().strides[i] == next.strides[i] * next.size;
    }
    if (fits) {
      next.size *= merged.back().size;
      merged.back() = std::move(next);
    } else {
      merged.push_back(std::move(next));
    }
  }
  return merged;
}

bool has_adjacent_columns(const std::vector<Dimension>& dimensions) {
  if (dimensions.empty()) return true;
  const std::vector<int64_t>& inner = dimensions.back().strides;
  return std::all_of(inner.begin(), inner.end(), [](int64_t stride) { return stride == 1; });
}

struct Matrices {
  std::vector<Tensor> owners;  // the tensors, or copies
  int64_t rows = 1, cols = 1;
  std::vector<int64_t> pitches;
};

// The tensors as matrices with adjacent columns. The first ones are dense results or halves of one,
// which stay as they are; inputs follow, and are copied only if they do not have such a form.
Matrices as_matrices(std::vector<Tensor> tensors, size_t num_results) {
  auto copy_input = [&](size_t i) {
    tensors[i] = at::empty_like(tensors[0], tensors[i].options()).copy_(tensors[i]);
  };
  for (size_t i = num_results; i < tensors.size(); ++i) {
    const auto alone = merged_dimensions({tensors[0], tensors[i]});
    if (alone.size() > 2 || !has_adjacent_columns(alone)) copy_input(i);
  }
  std::vector<Dimension> dimensions = merged_dimensions(tensors);
  if (dimensions.size() > 2) {
    for (size_t i = num_results; i < tensors.size(); ++i) copy_input(i);
    dimensions = merged_dimensions(tensors);
  }
  if (!has_adjacent_columns(dimensions)) {  // halves of one column each
    dimensions.push_back({1, std::vector<int64_t>(tensors.size(), 1)});
  }
  TORCH_INTERNAL_ASSERT(dimensions.size() <= 2, "gated_activation: results are not dense");
  Matrices result;
  result.pitches.assign(tensors.size(), 0);
  if (!dimensions.empty()) result.cols = dimensions.back().size;
  if (dimensions.size() == 2) {
    result.rows = dimensions[0].size;
    result.pitches = dimensions[0].strides;
  }
  result.owners = std::move(tensors);
  return result;
}

// ---- CPU and CUDA ----

template <class Run>
Tensor forward_with(const Tensor& gate, const OptionalTensor& optional_up,
                    std::string_view activation, Run&& run) {
  const Activation f = find_gate(activation, "gated_activation");
  const Tensor up = value_or_undefined(optional_up);
  check_operands(gate, up, "gated_activation");
  check_has_storage(gate, "gated_activation: gate");
  check_has_storage(up, "gated_activation: up");
  Tensor output = empty_output(gate, up);
  if (output.numel() == 0) return output;
  const Halves in = halves_of(gate, up);
  const Matrices m = as_matrices({output, in.gate, in.up}, 1);
  run(GatedActivationParams{.dtype = dtype_of(gate),
                            .activation = f,
                            .rows = m.rows,
                            .cols = m.cols,
                            .gate = {m.owners[1].const_data_ptr(), m.pitches[1]},
                            .up = {m.owners[2].const_data_ptr(), m.pitches[2]},
                            .output = {output.mutable_data_ptr(), m.pitches[0]}});
  return output;
}

template <class Run>
TensorPair backward_with(const Tensor& grad_output, const Tensor& gate,
                         const OptionalTensor& optional_up, std::string_view activation,
                         Mask wanted, Run&& run) {
  const Activation f = find_gate(activation, "gated_activation_backward");
  const Tensor up = value_or_undefined(optional_up);
  check_backward(grad_output, gate, up);
  check_has_storage(grad_output, "gated_activation_backward: grad_output");
  check_has_storage(gate, "gated_activation_backward: gate");
  check_has_storage(up, "gated_activation_backward: up");
  TensorPair gradients = empty_gradients(gate, up, wanted);
  const auto& [grad_gate, grad_up] = gradients;
  const Halves out = up.defined() ? Halves{grad_gate, grad_up} : halves_of(grad_gate, Tensor());
  const Halves in = halves_of(gate, up);
  std::vector<Tensor> tensors;
  for (const Tensor& result : {out.gate, out.up}) {
    if (result.defined()) tensors.push_back(result);
  }
  if (tensors.empty() || grad_output.numel() == 0) return gradients;
  const size_t num_results = tensors.size();
  for (const Tensor& input : {grad_output, in.gate, in.up}) tensors.push_back(input);
  Matrices m = as_matrices(std::move(tensors), num_results);
  auto input = [&](size_t i) {
    return ConstRows{m.owners[num_results + i].const_data_ptr(), m.pitches[num_results + i]};
  };
  const bool wants_gate = grad_gate.defined();
  auto result = [&](bool is_wanted, size_t i) {
    return is_wanted ? MutableRows{m.owners[i].mutable_data_ptr(), m.pitches[i]}
                     : MutableRows{nullptr, 0};
  };
  run(GatedActivationBackwardParams{.dtype = dtype_of(gate),
                                    .activation = f,
                                    .rows = m.rows,
                                    .cols = m.cols,
                                    .grad_output = input(0),
                                    .gate = input(1),
                                    .up = input(2),
                                    .grad_gate = result(wants_gate, 0),
                                    .grad_up = result(out.up.defined(), wants_gate ? 1 : 0)});
  return gradients;
}

Tensor gated_activation_cpu_kernel(const Tensor& gate, const OptionalTensor& up,
                                   std::string_view activation) {
  return forward_with(gate, up, activation, gated_activation_cpu);
}
TensorPair gated_activation_backward_cpu_kernel(const Tensor& grad_output, const Tensor& gate,
                                                const OptionalTensor& up,
                                                std::string_view activation, Mask wanted) {
  return backward_with(grad_output, gate, up, activation, wanted, gated_activation_backward_cpu);
}

#ifdef WARPWRIGHT_WITH_CUDA
Tensor gated_activation_cuda_kernel(const Tensor& gate, const OptionalTensor& up,
                                    std::string_view activation) {
  const CudaCall call(gate);
  return forward_with(gate, up, activation, [&](const GatedActivationParams& p) {
    launch_gated_activation(p, choose_gated_activation(p), call.stream);
  });
}
TensorPair gated_activation_backward_cuda_kernel(const Tensor& grad_output, const Tensor& gate,
                                                 const OptionalTensor& up,
                                                 std::string_view activation, Mask wanted) {
  const CudaCall call(gate);
  return backward_with(
      grad_output, gate, up, activation, wanted, [&](const GatedActivationBackwardParams& p) {
        launch_gated_activation_backward(p, choose_gated_activation_backward(p), call.stream);
      });
}
#endif

// ---- Meta ----

Tensor gated_activation_meta(const Tensor& gate, const OptionalTensor& optional_up,
                             std::string_view activation) {
  find_gate(activation, "gated_activation");
  const Tensor up = value_or_undefined(optional_up);
  check_operands(gate, up, "gated_activation");
  return empty_output(gate, up);
}
TensorPair gated_activation_backward_meta(const Tensor& grad_output, const Tensor& gate,
                                          const OptionalTensor& optional_up,
                                          std::string_view activation, Mask wanted) {
  find_gate(activation, "gated_activation_backward");
  const Tensor up = value_or_undefined(optional_up);
  check_backward(grad_output, gate, up);
  return empty_gradients(gate, up, wanted);
}

// ---- Autograd ----

// With f = the activation, dgate(v, gate, up) = v * up * f'(gate). It is symmetric in v and up.
Tensor dgate(const Tensor& v, const Tensor& gate, const Tensor& up, std::string_view activation) {
  if (!v.defined() || !up.defined()) return {};
  return std::get<0>(call::gated_activation_backward(v, gate, up, activation, {true, false}));
}
// v * f(gate)
Tensor gated(const Tensor& v, const Tensor& gate, std::string_view activation) {
  return v.defined() ? call::gated_activation(gate, v, activation) : Tensor();
}
Tensor tangent_or_undefined(const Tensor& t) { return has_tangent(t) ? tangent(t) : Tensor(); }

// Gradients of the halves, as one tensor if they came packed.
TensorPair packed_like(const Tensor& up, const Tensor& of_gate, const Tensor& of_up,
                       const Tensor& half) {
  if (up.defined()) return {of_gate, of_up};
  if (!of_gate.defined() && !of_up.defined()) return {};
  auto or_zeros = [&](const Tensor& t) {
    return t.defined() ? t : half.new_zeros_symint(half.sym_sizes());
  };
  return {at::cat({or_zeros(of_gate), or_zeros(of_up)}, -1), Tensor()};
}

struct GatedAttributes {
  Activation activation;
  Mask wanted;  // of a backward
};

struct GatedActivationBackward {  // saved: gate, up
  static constexpr const char* kName = "WarpwrightGatedActivationBackward";
  using Attributes = GatedAttributes;
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    auto [grad_gate, grad_up] =
        call::gated_activation_backward(grads[0], saved[0], optional_if_defined(saved[1]),
                                        activation_name(a.activation), {needs[0], needs[1]});
    return {grad_gate, grad_up};
  }
};

// The gradient of <v_gate, grad_gate> + <v_up, grad_up> by grad_output, gate and up.
struct GatedActivationBackwardBackward {  // saved: grad_output, gate, up
  static constexpr const char* kName = "WarpwrightGatedActivationBackwardBackward";
  using Attributes = GatedAttributes;
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    const std::string_view f = activation_name(a.activation);
    const Tensor& dy = saved[0];
    const auto [gate, up] = halves_of(saved[1], saved[2]);
    Tensor v_gate, v_up;  // in the places of the gradients that were wanted
    if (saved[2].defined()) {
      size_t place = 0;
      if (a.wanted[0]) v_gate = grads[place++];
      if (a.wanted[1]) v_up = grads[place];
    } else {
      const Halves v = halves_of(grads[0], Tensor());
      v_gate = v.gate;
      v_up = v.up;
    }
    variable_list result(3);
    if (needs[0]) result[0] = sum_of(dgate(v_gate, gate, up, f), gated(v_up, gate, f));
    Tensor of_gate, of_up;
    if (needs[1]) {
      of_gate = dgate(dy, gate, v_up, f);
      if (v_gate.defined()) {
        of_gate = sum_of(of_gate, dy * v_gate * up * second_derivative(gate, a.activation));
      }
    }
    if (needs[2] || !saved[2].defined()) of_up = dgate(dy, gate, v_gate, f);
    std::tie(result[1], result[2]) = packed_like(saved[2], of_gate, of_up, gate);
    return result;
  }
};

Tensor gated_activation_autograd(const Tensor& gate, const OptionalTensor& optional_up,
                                 std::string_view activation) {
  const Activation f = find_gate(activation, "gated_activation");
  const Tensor up = value_or_undefined(optional_up);
  auto node = make_node<GatedActivationBackward>({f, {}}, gate, up);
  Tensor output =
      below_autograd([&] { return call::gated_activation(gate, optional_up, activation); });
  if (node) {
    node->save(gate);
    node->save(up);
    set_history(output, node);
  }
  if (any_tangent(gate, up)) {
    const Halves p = halves_of(primal(gate), up.defined() ? primal(up) : up);
    Halves t{tangent_or_undefined(gate), tangent_or_undefined(up)};
    if (!up.defined()) t = halves_of(t.gate, Tensor());
    const Tensor direction =
        sum_of(dgate(t.gate, p.gate, p.up, activation), gated(t.up, p.gate, activation));
    set_tangent(output, tangent_with_zero_terms(direction, gate, up));
  }
  return output;
}

// The changes of the gradients of the halves along the tangents; undefined where zero.
Halves backward_tangents(const Tensor& grad_output, const Tensor& gate, const Tensor& up,
                         Activation f) {
  const std::string_view name = activation_name(f);
  const Tensor dy = primal(grad_output), dy_t = tangent_or_undefined(grad_output);
  const Halves p = halves_of(primal(gate), up.defined() ? primal(up) : up);
  Halves t{tangent_or_undefined(gate), tangent_or_undefined(up)};
  if (!up.defined()) t = halves_of(t.gate, Tensor());
  Halves result;
  result.gate = sum_of(dgate(dy_t, p.gate, p.up, name), dgate(dy, p.gate, t.up, name));
  result.up = sum_of(gated(dy_t, p.gate, name), dgate(dy, p.gate, t.gate, name));
  if (t.gate.defined()) {
    result.gate = sum_of(result.gate, dy * p.up * t.gate * second_derivative(p.gate, f));
  }
  return result;
}

TensorPair gated_activation_backward_autograd(const Tensor& grad_output, const Tensor& gate,
                                              const OptionalTensor& optional_up,
                                              std::string_view activation, Mask wanted) {
  const Activation f = find_gate(activation, "gated_activation_backward");
  const Tensor up = value_or_undefined(optional_up);
  auto node = make_node<GatedActivationBackwardBackward>({f, wanted}, grad_output, gate, up);
  TensorPair gradients = below_autograd([&] {
    return call::gated_activation_backward(grad_output, gate, optional_up, activation, wanted);
  });
  auto& [grad_gate, grad_up] = gradients;
  if (node) {
    for (const Tensor& saved : {grad_output, gate, up}) node->save(saved);
    if (grad_gate.defined()) set_history(grad_gate, node);
    if (grad_up.defined()) set_history(grad_up, node);
  }
  if (any_tangent(grad_output, gate, up)) {
    const Halves t = backward_tangents(grad_output, gate, up, f);
    const auto [of_gate, of_up] = packed_like(up, t.gate, t.up, halves_of(primal(gate), up).gate);
    if (grad_gate.defined() && of_gate.defined()) set_tangent(grad_gate, of_gate);
    if (grad_up.defined() && of_up.defined()) set_tangent(grad_up, of_up);
  }
  return gradients;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def("gated_activation(Tensor gate, Tensor? up, str activation) -> Tensor",
        {at::Tag::pt2_compliant_tag});
  m.def(
      "gated_activation_backward(Tensor grad_output, Tensor gate, Tensor? up, str activation, "
      "bool[2] output_mask) -> (Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) {
  m.impl("gated_activation", gated_activation_cpu_kernel);
  m.impl("gated_activation_backward", gated_activation_backward_cpu_kernel);
}

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) {
  m.impl("gated_activation", gated_activation_cuda_kernel);
  m.impl("gated_activation_backward", gated_activation_backward_cuda_kernel);
}
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) {
  m.impl("gated_activation", gated_activation_meta);
  m.impl("gated_activation_backward", gated_activation_backward_meta);
}

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) {
  m.impl("gated_activation", gated_activation_autograd);
  m.impl("gated_activation_backward", gated_activation_backward_autograd);
}

}  // namespace warpwright
