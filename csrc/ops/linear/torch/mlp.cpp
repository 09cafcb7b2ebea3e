// mlp, composed of linear_activation and linear. In memory and with a gradient, both are one node,
// whose backward has the activation's gradient in a product's epilogue. The same in a trace of
// torch.compile, whose backward has that product as the operator mlp_hidden_gradient.
#include <ATen/autocast_mode.h>

#include <string_view>
#include <tuple>
#include <utility>

#include "ops/linear/mlp.h"
#include "ops/linear/torch/activation.h"
#include "ops/linear/torch/autocast.h"
#include "ops/linear/torch/common.h"
#include "torch/plain.h"
#include "torch/traced.h"

namespace warpwright {
namespace {

using TensorPair = std::tuple<Tensor, Tensor>;

// Of one of the two products, or of both.
struct Product {
  const Tensor& input;
  const Tensor& weight;
  const OptionalTensor& bias;
};

Tensor mlp_composed(const Product& first, const Tensor& weight2, const OptionalTensor& bias2,
                    std::string_view activation) {
  const Tensor hidden = std::get<0>(linear_ops::linear_activation(
      first.input, first.weight, first.bias, activation, /*keep=*/false));
  return linear_ops::linear(hidden, weight2, bias2);
}

// ---- the gradient of the hidden layer ----

#ifdef WARPWRIGHT_WITH_CUDA
// dz by one kernel; undefined if none takes the call.
Tensor fused_hidden_gradient(const Tensor& grad_output, const Tensor& weight, const Tensor& kept,
                             Activation activation) {
  if (!grad_output.is_cuda() || !is_16bit(kept.scalar_type()) || !kept.is_contiguous()) return {};
  if (grad_output.scalar_type() != kept.scalar_type()) return {};
  const CudaCall call(grad_output);
  const Matrix dy = as_matrix(grad_output), w = as_matrix(weight).transposed();
  Tensor dz = at::empty_like(kept);
  HiddenGradientParams p{gemm_params(dy, w, {}, dz), kept.const_data_ptr()};
  p.product.activation = activation;
  p.product.sm90 = sm90_path_available();
  const HiddenGradientPlan plan = choose_hidden_gradient(p, current_device_info());
  if (!plan.fused) return {};
  launch_hidden_gradient(p, plan, call.stream);
  return dz;
}
#endif

// dz, and db1 if it is wanted, by linear's product and a pass.
TensorPair composed_hidden_gradient(const Tensor& grad_output, const Tensor& weight,
                                    const Tensor& kept, std::string_view activation,
                                    bool wants_bias = false, bool float32_bias = false) {
  const Tensor dh =
      std::get<0>(linear_ops::linear_backward(grad_output, {}, weight, {true, false, false}, {}));
  return linear_ops::linear_activation_backward(dh, kept, activation, wants_bias,
                                                wants_bias && float32_bias);
}

// ---- its operator ----

void check_hidden_gradient(const Tensor& grad_output, const Tensor& weight, const Tensor& kept) {
  TORCH_CHECK(weight.dim() == 2, "mlp_hidden_gradient: weight: expected 2 dimensions, got ",
              weight.dim());
  TORCH_CHECK(kept.dim() > 0 && kept.sym_size(-1) == weight.sym_size(1),
              "mlp_hidden_gradient: kept: expected ", weight.sym_size(1),
              " columns, those of weight, got shape ", kept.sym_sizes());
  const auto expected = with_last_size(kept, weight.sym_size(0));
  TORCH_CHECK(grad_output.sym_sizes() == c10::SymIntArrayRef(expected),
              "mlp_hidden_gradient: grad_output: expected shape ", c10::SymIntArrayRef(expected),
              ", got ", grad_output.sym_sizes());
  check_same_type(kept, weight, "mlp_hidden_gradient", "weight");
  check_same_type(kept, grad_output, "mlp_hidden_gradient", "grad_output");
}

Tensor call_mlp_hidden_gradient(const Tensor& grad_output, const Tensor& weight, const Tensor& kept,
                                std::string_view activation) {
  static const auto op =
      find_op<Tensor(const Tensor&, const Tensor&, const Tensor&, std::string_view)>(
          "warpwright::mlp_hidden_gradient");
  return op.call(grad_output, weight, kept, activation);
}

Tensor mlp_hidden_gradient(const Tensor& grad_output, const Tensor& weight, const Tensor& kept,
                           std::string_view activation) {
  check_hidden_gradient(grad_output, weight, kept);
  [[maybe_unused]] const Activation f = find_linear_activation(activation);
#ifdef WARPWRIGHT_WITH_CUDA
  check_has_storage(grad_output, "mlp_hidden_gradient: grad_output");
  check_has_storage(weight, "mlp_hidden_gradient: weight");
  check_has_storage(kept, "mlp_hidden_gradient: kept");
  if (Tensor dz = fused_hidden_gradient(grad_output, weight, kept, f); dz.defined()) return dz;
#endif
  return std::get<0>(composed_hidden_gradient(grad_output, weight, kept, activation));
}

// Meta, and a call to differentiate: of ops that have a gradient.
Tensor mlp_hidden_gradient_composed(const Tensor& grad_output, const Tensor& weight,
                                    const Tensor& kept, std::string_view activation) {
  check_hidden_gradient(grad_output, weight, kept);
  return std::get<0>(composed_hidden_gradient(grad_output, weight, kept, activation));
}

Tensor mlp_hidden_gradient_autograd(const Tensor& grad_output, const Tensor& weight,
                                    const Tensor& kept, std::string_view activation) {
  if (needs_gradient(grad_output) || needs_gradient(weight) || needs_gradient(kept) ||
      any_tangent(grad_output, weight, kept)) {
    return mlp_hidden_gradient_composed(grad_output, weight, kept, activation);
  }
  return below_autograd(
      [&] { return call_mlp_hidden_gradient(grad_output, weight, kept, activation); });
}

// ---- in the node ----

// dz, and db1 if it came on the way.
TensorPair hidden_gradient(const Tensor& grad_output, const Tensor& weight, const Tensor& kept,
                           Activation activation, bool wants_bias, bool float32_bias) {
  // A second derivative needs ops with nodes, and modes want to see ops.
  const bool is_first =
      !needs_gradient(grad_output) && !needs_gradient(weight) && !needs_gradient(kept);
  if (is_first && is_traced(grad_output)) {
    return {call_mlp_hidden_gradient(grad_output, weight, kept, activation_name(activation)),
            Tensor()};
  }
#ifdef WARPWRIGHT_WITH_CUDA
  if (is_first && is_plain(grad_output) && is_plain(weight) && is_plain(kept)) {
    Tensor dz = fused_hidden_gradient(grad_output, weight, kept, activation);
    if (dz.defined()) return {dz, Tensor()};
  }
#endif
  return composed_hidden_gradient(grad_output, weight, kept, activation_name(activation),
                                  wants_bias, float32_bias);
}

// ---- the node ----

struct MlpBackward {  // saved: input, weight1, weight2, hidden, kept (of relu hidden again)
  static constexpr const char* kName = "WarpwrightMlpBackward";
  struct Attributes {
    Activation activation;
    std::array<bool, 3> float32_1, float32_2;  // per operand: its gradient is float32
  };
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    const Tensor &weight1 = saved[1], &weight2 = saved[2], &kept = saved[4];
    // A second derivative finds hidden and the pre-activation as outputs, too.
    const Tensor& dy = grads[0];
    const Tensor direct_h = grads[1];
    const Tensor direct_z = grads.size() > 2 ? grads[2] : Tensor();
    variable_list result(5);
    if (dy.defined() && (needs[3] || needs[4])) {
      std::tie(std::ignore, result[3], result[4]) = linear_ops::linear_backward(
          dy, optional_if_defined(saved[3]), optional_if_defined(weight2),
          {false, needs[3], needs[4]}, a.float32_2);
    }
    if (!needs[0] && !needs[1] && !needs[2]) return result;
    const bool whole = !direct_h.defined() && !direct_z.defined();
    Tensor dz, db;
    if (dy.defined() && !direct_h.defined()) {
      std::tie(dz, db) =
          hidden_gradient(dy, weight2, kept, a.activation, needs[2] && whole, a.float32_1[2]);
    } else if (dy.defined() || direct_h.defined()) {
      const Tensor dh =
          dy.defined()
              ? std::get<0>(linear_ops::linear_backward(dy, {}, weight2, {true, false, false}, {}))
              : Tensor();
      dz = std::get<0>(linear_ops::linear_activation_backward(
          sum_of(dh, direct_h), kept, activation_name(a.activation), /*bias_gradient=*/false));
    }
    dz = sum_of(dz, direct_z);
    if (!dz.defined()) return result;
    std::tie(result[0], result[1], result[2]) =
        linear_ops::linear_backward(dz, optional_if_defined(saved[0]), optional_if_defined(weight1),
                                    {needs[0], needs[1], needs[2] && !db.defined()}, a.float32_1);
    if (db.defined()) result[2] = db;
    return result;
  }
};

// The operands may be casts of the sources, which then get the gradients.
Tensor mlp_node(const Product& first, const Product& second, const Sources& sources1,
                const Sources& sources2, Activation activation) {
  const at::ScalarType type = first.input.scalar_type();
  auto float32_2 = sources2.in_float32(type);
  float32_2[0] = false;  // hidden has the operands' type
  auto node =
      make_node<MlpBackward>({activation, sources1.in_float32(type), float32_2}, sources1.input,
                             sources1.weight, sources1.bias, sources2.weight, sources2.bias);
  const bool has_z = activation != Activation::kRelu;
  Tensor output, hidden, z;
  below_autograd([&] {
    std::tie(hidden, z) = linear_ops::linear_activation(
        first.input, first.weight, first.bias, activation_name(activation), /*keep=*/has_z);
    output = linear_ops::linear(hidden, second.weight, second.bias);
    return output;
  });
  set_history(output, node);
  set_history(hidden, node);
  if (has_z) set_history(z, node);
  // Only what a gradient that is wanted reads.
  node->save(requires_grad(sources1.weight) ? first.input : Tensor());
  node->save(requires_grad(sources1.input) ? first.weight : Tensor());
  node->save(second.weight);
  auto save_output = [&](const Tensor& tensor, bool wanted) {
    wanted ? node->save_output(tensor) : node->save(Tensor());
  };
  save_output(hidden, requires_grad(sources2.weight));
  save_output(has_z ? z : hidden, true);
  return output;
}

// ---- which calls ----

// Whether the call is one node: both products have kernels, and something before the second product
// needs a gradient.
bool takes_one_node(const Product& first, const Tensor& weight2, const OptionalTensor& bias2) {
  const Tensor& input = first.input;
  auto is_usable = [](const Tensor& x) { return !x.defined() || is_plain_or_traced(x); };
  return is_usable(input) && is_usable(first.weight) && is_usable(value_or_undefined(first.bias)) &&
         is_usable(weight2) && is_usable(value_or_undefined(bias2)) &&
         is_floating(input.scalar_type()) && is_plain_linear(input, first.weight, first.bias) &&
         is_plain_linear(input, weight2, bias2) &&
         (needs_gradient(input) || needs_gradient(first.weight) ||
          needs_gradient(value_or_undefined(first.bias)));
}

// Whether one kernel can give the product's gradients in the types of `sources`. `cast` has the
// operands that the product reads.
bool is_one_type(const AutocastOperands& cast, const Product& sources) {
  const bool unchanged = cast.input.is_same(sources.input) && cast.weight.is_same(sources.weight) &&
                         value_or_undefined(cast.bias).is_same(value_or_undefined(sources.bias));
  return cast.direct || (unchanged && is_16bit(cast.input.scalar_type()));
}

Tensor mlp(const Tensor& input, const Tensor& weight1, const OptionalTensor& bias1,
           const Tensor& weight2, const OptionalTensor& bias2, std::string_view activation) {
  const Product first{input, weight1, bias1};
  const Activation f = find_linear_activation(activation);
  if (!takes_one_node(first, weight2, bias2)) {
    return mlp_composed(first, weight2, bias2, activation);
  }
  const Sources sources2{input, weight2, value_or_undefined(bias2)};
  const auto device = input.device().type();
  if (!at::autocast::is_autocast_enabled(device)) {
    return mlp_node(first, {input, weight2, bias2}, {input, weight1, value_or_undefined(bias1)},
                    sources2, f);
  }
  {
    const AutocastOperands cast1(device, input, weight1, bias1);
    const AutocastOperands cast2(device, cast1.input, weight2, bias2);
    if (is_one_type(cast1, first) && is_one_type(cast2, {cast1.input, weight2, bias2})) {
      return mlp_node({cast1.input, cast1.weight, cast1.bias},
                      {cast1.input, cast2.weight, cast2.bias},
                      {cast1.source, weight1, value_or_undefined(bias1)}, sources2, f);
    }
  }
  return mlp_composed(first, weight2, bias2, activation);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def(
      "mlp(Tensor input, Tensor weight1, Tensor? bias1, Tensor weight2, Tensor? bias2, "
      "str activation) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "mlp_hidden_gradient(Tensor grad_output, Tensor weight, Tensor kept, str activation) "
      "-> Tensor",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CompositeImplicitAutograd, m) { m.impl("mlp", mlp); }

TORCH_LIBRARY_IMPL(warpwright, CPU, m) { m.impl("mlp_hidden_gradient", mlp_hidden_gradient); }

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) { m.impl("mlp_hidden_gradient", mlp_hidden_gradient); }
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) {
  m.impl("mlp_hidden_gradient", mlp_hidden_gradient_composed);
}

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) {
  m.impl("mlp_hidden_gradient", mlp_hidden_gradient_autograd);
}

}  // namespace warpwright
