// linear_cross_entropy as users call it: leading dimensions folded, native's dtype rules, autocast.
#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <array>
#include <tuple>

#include "ops/cross_entropy/cross_entropy_torch.h"
#include "torch/autograd.h"
#include "torch/dispatch.h"

namespace warpwright {
namespace {

using at::ScalarType;
using c10::SymInt;
using OptionalTensor = std::optional<Tensor>;
using Mask3 = std::array<bool, 3>;

namespace call {

Tensor linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  static const auto op =
      find_op<Tensor(const Tensor&, const Tensor&, const OptionalTensor&)>("warpwright::linear");
  return op.call(input, weight, bias);
}

Tensor cross_entropy(const Tensor& input, const Tensor& target, const OptionalTensor& weight,
                     int64_t reduction, SymInt ignore_index, double label_smoothing) {
  static const auto op =
      find_op<Tensor(const Tensor&, const Tensor&, const OptionalTensor&, int64_t, SymInt, double)>(
          "warpwright::cross_entropy");
  return op.call(input, target, weight, reduction, std::move(ignore_index), label_smoothing);
}

Tensor linear_cross_entropy_forward(const Tensor& input, const Tensor& weight,
                                    const OptionalTensor& bias, const Tensor& target,
                                    const OptionalTensor& class_weight, int64_t reduction,
                                    SymInt ignore_index, double label_smoothing, int64_t chunk_rows,
                                    ScalarType dtype) {
  using Results = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
  static const auto op =
      find_op<Results(const Tensor&, const Tensor&, const OptionalTensor&, const Tensor&,
                      const OptionalTensor&, int64_t, SymInt, double, int64_t, ScalarType, Mask3)>(
          "warpwright::linear_cross_entropy_forward");
  return std::get<0>(op.call(input, weight, bias, target, class_weight, reduction,
                             std::move(ignore_index), label_smoothing, chunk_rows, dtype,
                             Mask3{false, false, false}));
}

}  // namespace call

bool is_differentiated(const OptionalTensor& tensor) {
  return tensor.has_value() && tensor->defined() &&
         ((at::GradMode::is_enabled() && tensor->requires_grad()) || has_tangent(*tensor));
}

// The sizes of labels: input's without the features.
c10::SymDimVector leading_sizes(const Tensor& input) {
  const auto sizes = input.sym_sizes();
  return {sizes.begin(), sizes.end() - 1};
}

SymInt product(const c10::SymDimVector& sizes) {
  SymInt result = 1;
  for (const SymInt& size : sizes) result = result * size;
  return result;
}

// Whether target holds a probability for each class; else labels, by their shape.
bool has_probabilities(const Tensor& input, const Tensor& weight, const Tensor& target) {
  TORCH_CHECK(input.dim() >= 1 && weight.dim() == 2,
              "linear_cross_entropy: expected input of at least one dimension and a matrix as "
              "weight, got ",
              input.sym_sizes(), " and ", weight.sym_sizes());
  c10::SymDimVector sizes = leading_sizes(input);
  if (target.sym_sizes() == c10::SymIntArrayRef(sizes)) return false;
  sizes.push_back(weight.sym_size(0));
  TORCH_CHECK_VALUE(target.sym_sizes() == c10::SymIntArrayRef(sizes),
                    "linear_cross_entropy: target: expected labels of shape ",
                    c10::SymIntArrayRef(sizes.data(), sizes.size() - 1),
                    " or probabilities of shape ", c10::SymIntArrayRef(sizes), ", got ",
                    target.sym_sizes());
  return true;
}

// A type as cross_entropy counts it: under autocast 16-bit operands count as float32.
ScalarType counted(const Tensor& tensor, bool autocast) {
  const ScalarType type = tensor.scalar_type();
  return autocast && (type == at::kHalf || type == at::kBFloat16) ? at::kFloat : type;
}

// The ops one after the other, for gradients by probabilities or class weights, which are as large
// as the logits or come from them all.
Tensor by_the_ops_apart(const Tensor& input, const Tensor& weight, const Tensor& target,
                        const OptionalTensor& bias, const OptionalTensor& class_weight,
                        int64_t reduction, SymInt ignore_index, double label_smoothing) {
  const Tensor logits = call::linear(input, weight, bias);
  const c10::SymDimVector leading = leading_sizes(input);
  const SymInt rows = product(leading), classes = weight.sym_size(0);
  const bool labels = target.dim() + 1 == input.dim();
  const Tensor loss = call::cross_entropy(
      logits.reshape_symint({rows, classes}),
      labels ? target.reshape_symint({rows}) : target.reshape_symint({rows, classes}), class_weight,
      reduction, std::move(ignore_index), label_smoothing);
  return reduction == at::Reduction::None ? loss.reshape_symint(leading) : loss;
}

Tensor linear_cross_entropy_as(const Tensor& input, const Tensor& weight, const Tensor& target,
                               const OptionalTensor& bias, const OptionalTensor& class_weight,
                               int64_t reduction, SymInt ignore_index, double label_smoothing,
                               int64_t chunk_rows, bool probabilities, bool autocast) {
  const c10::SymDimVector leading = leading_sizes(input);
  const SymInt rows = product(leading);
  ScalarType dtype = counted(input, autocast);
  Tensor q = probabilities ? target.reshape_symint({rows, weight.sym_size(0)})
                           : target.reshape_symint({rows});
  if (probabilities) {
    dtype = c10::promoteTypes(dtype, counted(target, autocast));
    if (class_weight.has_value() && class_weight->defined()) {
      dtype = c10::promoteTypes(dtype, counted(*class_weight, autocast));
    }
    if (q.scalar_type() != input.scalar_type()) q = q.to(accum_type(input.scalar_type()));
  } else if (class_weight.has_value() && class_weight->defined()) {
    TORCH_CHECK(counted(*class_weight, autocast) == dtype, "expected scalar type ", dtype,
                " but found ", counted(*class_weight, autocast), " (class_weight)");
  }
  const Tensor loss = call::linear_cross_entropy_forward(
      input.reshape_symint({rows, input.sym_size(-1)}), weight, bias, q, class_weight, reduction,
      std::move(ignore_index), label_smoothing, chunk_rows, dtype);
  return reduction == at::Reduction::None ? loss.view_symint(leading) : loss;
}

// Probabilities or class weights that are differentiated, or that make the loss float64.
bool wants_ops_apart(const Tensor& input, const Tensor& target, const OptionalTensor& class_weight,
                     bool probabilities) {
  if (is_differentiated(class_weight) || is_differentiated(target)) return true;
  auto is_double = [](const Tensor& tensor) { return tensor.scalar_type() == at::kDouble; };
  const bool some =
      probabilities && (is_double(target) || (class_weight.has_value() && class_weight->defined() &&
                                              is_double(*class_weight)));
  return (some && !is_double(input)) ||
         (probabilities && !at::isFloatingType(target.scalar_type()));
}

int64_t rows_of(std::optional<int64_t> chunk_rows) {
  TORCH_CHECK_VALUE(!chunk_rows.has_value() || *chunk_rows >= 1,
                    "linear_cross_entropy: chunk_rows: expected at least 1, got ",
                    chunk_rows.value_or(0));
  return chunk_rows.value_or(0);
}

Tensor linear_cross_entropy_composite(const Tensor& input, const Tensor& weight,
                                      const Tensor& target, const OptionalTensor& bias,
                                      const OptionalTensor& class_weight, int64_t reduction,
                                      SymInt ignore_index, double label_smoothing,
                                      std::optional<int64_t> chunk_rows) {
  const int64_t chunk = rows_of(chunk_rows);
  const bool probabilities = has_probabilities(input, weight, target);
  if (wants_ops_apart(input, target, class_weight, probabilities)) {
    return by_the_ops_apart(input, weight, target, bias, class_weight, reduction,
                            std::move(ignore_index), label_smoothing);
  }
  return linear_cross_entropy_as(input, weight, target, bias, class_weight, reduction,
                                 std::move(ignore_index), label_smoothing, chunk, probabilities,
                                 /*autocast=*/false);
}

template <c10::DeviceType kDevice>
Tensor linear_cross_entropy_autocast(const Tensor& input, const Tensor& weight,
                                     const Tensor& target, const OptionalTensor& bias,
                                     const OptionalTensor& class_weight, int64_t reduction,
                                     SymInt ignore_index, double label_smoothing,
                                     std::optional<int64_t> chunk_rows) {
  const int64_t chunk = rows_of(chunk_rows);
  const bool probabilities = has_probabilities(input, weight, target);
  if (wants_ops_apart(input, target, class_weight, probabilities)) {  // under their own autocast
    return by_the_ops_apart(input, weight, target, bias, class_weight, reduction,
                            std::move(ignore_index), label_smoothing);
  }
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      at::autocast::get_autocast_dispatch_key_from_device_type(kDevice));
  const ScalarType type = at::autocast::get_autocast_dtype(kDevice);
  return linear_cross_entropy_as(at::autocast::cached_cast(type, input, kDevice),
                                 at::autocast::cached_cast(type, weight, kDevice), target,
                                 at::autocast::cached_cast(type, bias, kDevice), class_weight,
                                 reduction, std::move(ignore_index), label_smoothing, chunk,
                                 probabilities, /*autocast=*/true);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def(
      "linear_cross_entropy(Tensor input, Tensor weight, Tensor target, Tensor? bias=None, "
      "Tensor? class_weight=None, int reduction=1, SymInt ignore_index=-100, "
      "float label_smoothing=0.0, int? chunk_rows=None) -> Tensor",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CompositeImplicitAutograd, m) {
  m.impl("linear_cross_entropy", linear_cross_entropy_composite);
}

TORCH_LIBRARY_IMPL(warpwright, AutocastCPU, m) {
  m.impl("linear_cross_entropy", linear_cross_entropy_autocast<at::kCPU>);
}

TORCH_LIBRARY_IMPL(warpwright, AutocastCUDA, m) {
  m.impl("linear_cross_entropy", linear_cross_entropy_autocast<at::kCUDA>);
}

}  // namespace warpwright
