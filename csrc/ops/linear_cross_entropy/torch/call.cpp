// linear_cross_entropy as users call it: leading dimensions folded, native's dtype rules, autocast.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>

#include "ops/linear/torch/autocast.h"
#include "ops/linear_cross_entropy/torch/common.h"

namespace warpwright {

using namespace linear_cross_entropy;

namespace {

// A call in the user's form: rows not folded yet, and whether lse and argmax are wanted.
struct UserCall : Call {
  bool wants_lse = false;
  bool wants_argmax = false;
};

namespace call {

Tensor3 cross_entropy(const Tensor& logits, const Tensor& target, const UserCall& c) {
  static const auto op =
      find_op<Tensor3(const Tensor&, const Tensor&, const OptionalTensor&, int64_t, SymInt, double,
                      double, double, bool, bool, bool)>("warpwright::cross_entropy_extras");
  return op.call(logits, target, optional_if_defined(c.class_weight), c.loss.reduction,
                 c.loss.ignore_index, c.loss.label_smoothing, c.loss.z_loss, c.softcap, c.wants_lse,
                 c.wants_argmax, /*inplace_backward=*/false);
}

Tensor3 linear_cross_entropy_forward(const UserCall& c, const Tensor& input, const Tensor& target,
                                     ScalarType dtype) {
  static const auto op =
      find_op<Results(const Tensor&, const Tensor&, const OptionalTensor&, const Tensor&,
                      const OptionalTensor&, int64_t, SymInt, double, int64_t, ScalarType, Mask3,
                      double, double, bool, bool)>("warpwright::linear_cross_entropy_forward");
  const auto [loss, total_weight, dx, dw, db, lse, argmax] = op.call(
      input, c.weight, optional_if_defined(c.bias), target, optional_if_defined(c.class_weight),
      c.loss.reduction, c.loss.ignore_index, c.loss.label_smoothing, c.chunk_rows, dtype,
      Mask3{false, false, false}, c.loss.z_loss, c.softcap, c.wants_lse, c.wants_argmax);
  return {loss, lse, argmax};
}

}  // namespace call

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

// Whether target holds a probability per class, as its shape tells; otherwise it holds labels.
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

// A type by cross_entropy's rules: under autocast 16-bit operands count as float32.
ScalarType counted(const Tensor& tensor, bool autocast) {
  const ScalarType type = tensor.scalar_type();
  return autocast && (type == at::kHalf || type == at::kBFloat16) ? at::kFloat : type;
}

// Results per row, in the labels' shape.
Tensor3 unfolded(const Tensor3& results, const Call& c, const c10::SymDimVector& leading) {
  auto view = [&](const Tensor& rows) {
    return rows.defined() ? rows.reshape_symint(leading) : rows;
  };
  const auto& [loss, lse, argmax] = results;
  return {c.is_none() ? view(loss) : loss, view(lse), view(argmax)};
}

// Runs the ops one after the other. For gradients by probabilities or class weights, which are as
// large as the logits or need all of them, and for an input without rows.
Tensor3 by_the_ops_apart(const UserCall& c, bool probabilities) {
  const Tensor logits = linear_ops::linear(c.input, c.weight, optional_if_defined(c.bias));
  if (c.input.dim() == 1) return call::cross_entropy(logits, c.target, c);
  const c10::SymDimVector leading = leading_sizes(c.input);
  const SymInt rows = product(leading), classes = c.weight.sym_size(0);
  const Tensor target =
      probabilities ? c.target.reshape_symint({rows, classes}) : c.target.reshape_symint({rows});
  return unfolded(call::cross_entropy(logits.reshape_symint({rows, classes}), target, c), c,
                  leading);
}

Tensor3 by_chunks(const UserCall& c, bool probabilities, bool autocast) {
  const c10::SymDimVector leading = leading_sizes(c.input);
  const SymInt rows = product(leading);
  ScalarType dtype = counted(c.input, autocast);
  Tensor q = probabilities ? c.target.reshape_symint({rows, c.weight.sym_size(0)})
                           : c.target.reshape_symint({rows});
  if (probabilities) {
    dtype = c10::promoteTypes(dtype, counted(c.target, autocast));
    if (c.class_weight.defined()) {
      dtype = c10::promoteTypes(dtype, counted(c.class_weight, autocast));
    }
    if (q.scalar_type() != c.input.scalar_type()) q = q.to(accum_type(c.input.scalar_type()));
  } else if (c.class_weight.defined()) {
    TORCH_CHECK(counted(c.class_weight, autocast) == dtype, "expected scalar type ", dtype,
                " but found ", counted(c.class_weight, autocast), " (class_weight)");
  }
  const Tensor x = c.input.reshape_symint({rows, c.input.sym_size(-1)});
  return unfolded(call::linear_cross_entropy_forward(c, x, q, dtype), c, leading);
}

// Whether separate ops are needed. They are for probabilities or class weights that are
// differentiated or make the loss float64. They also are for one unbatched row, whose mean has
// special rules (settle_unbatched_mean).
bool wants_ops_apart(const Call& c, bool probabilities) {
  if (c.input.dim() == 1) return true;
  if (is_differentiated(c.class_weight) || is_differentiated(c.target)) return true;
  auto is_double = [](const Tensor& tensor) {
    return tensor.defined() && tensor.scalar_type() == at::kDouble;
  };
  const bool some = probabilities && (is_double(c.target) || is_double(c.class_weight));
  return (some && !is_double(c.input)) ||
         (probabilities && !at::isFloatingType(c.target.scalar_type()));
}

UserCall user_call(const Tensor& input, const Tensor& weight, const Tensor& target,
                   const OptionalTensor& bias, const OptionalTensor& class_weight,
                   int64_t reduction, SymInt ignore_index, double label_smoothing,
                   std::optional<int64_t> chunk_rows, double z_loss = 0, double softcap = 0,
                   bool wants_lse = false, bool wants_argmax = false) {
  TORCH_CHECK_VALUE(!chunk_rows.has_value() || *chunk_rows >= 1,
                    "linear_cross_entropy: chunk_rows: expected at least 1, got ",
                    chunk_rows.value_or(0));
  TORCH_CHECK_VALUE(z_loss >= 0, "linear_cross_entropy: z_loss: expected a number of at least 0, ",
                    "got ", z_loss);
  TORCH_CHECK_VALUE(softcap >= 0, "linear_cross_entropy: softcap: expected a number of at least ",
                    "0, got ", softcap);
  check_plain_storage(input, "linear_cross_entropy: input");
  check_plain_storage(weight, "linear_cross_entropy: weight");
  check_plain_storage(target, "linear_cross_entropy: target");
  check_plain_storage(value_or_undefined(bias), "linear_cross_entropy: bias");
  check_plain_storage(value_or_undefined(class_weight), "linear_cross_entropy: class_weight");
  const LossOptions loss{reduction, std::move(ignore_index), label_smoothing, z_loss};
  return {Call(input, weight, bias, target, class_weight, {loss, softcap, chunk_rows.value_or(0)}),
          wants_lse, wants_argmax};
}

Tensor3 run(const UserCall& c) {
  const bool probabilities = has_probabilities(c.input, c.weight, c.target);
  return wants_ops_apart(c, probabilities) ? by_the_ops_apart(c, probabilities)
                                           : by_chunks(c, probabilities, /*autocast=*/false);
}

template <c10::DeviceType kDevice>
Tensor3 run_in_autocast(const UserCall& call_) {
  UserCall c = call_;
  const bool probabilities = has_probabilities(c.input, c.weight, c.target);
  if (wants_ops_apart(c, probabilities)) {  // under their own autocast
    return by_the_ops_apart(c, probabilities);
  }
  const AutocastOperands cast(kDevice, c.input, c.weight, optional_if_defined(c.bias));
  c.input = cast.input;
  c.weight = cast.weight;
  c.bias = value_or_undefined(cast.bias);
  return by_chunks(c, probabilities, /*autocast=*/true);
}

// The two ops that users call have the same arguments except for the extras. kRun: run(), or a
// device's autocast form of it.
template <Tensor3 (*kRun)(const UserCall&)>
struct Entry {
  static Tensor plain(const Tensor& input, const Tensor& weight, const Tensor& target,
                      const OptionalTensor& bias, const OptionalTensor& class_weight,
                      int64_t reduction, SymInt ignore_index, double label_smoothing,
                      std::optional<int64_t> chunk_rows) {
    return std::get<0>(kRun(user_call(input, weight, target, bias, class_weight, reduction,
                                      std::move(ignore_index), label_smoothing, chunk_rows)));
  }
  static Tensor3 extras(const Tensor& input, const Tensor& weight, const Tensor& target,
                        const OptionalTensor& bias, const OptionalTensor& class_weight,
                        int64_t reduction, SymInt ignore_index, double label_smoothing,
                        std::optional<int64_t> chunk_rows, double z_loss, double softcap,
                        bool return_lse, bool return_argmax) {
    return kRun(user_call(input, weight, target, bias, class_weight, reduction,
                          std::move(ignore_index), label_smoothing, chunk_rows, z_loss, softcap,
                          return_lse, return_argmax));
  }
};

template <class Entries>
void implement(torch::Library& m) {
  m.impl("linear_cross_entropy", Entries::plain);
  m.impl("linear_cross_entropy_extras", Entries::extras);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def(
      "linear_cross_entropy(Tensor input, Tensor weight, Tensor target, Tensor? bias=None, "
      "Tensor? class_weight=None, int reduction=1, SymInt ignore_index=-100, "
      "float label_smoothing=0.0, int? chunk_rows=None) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "linear_cross_entropy_extras(Tensor input, Tensor weight, Tensor target, Tensor? bias=None, "
      "Tensor? class_weight=None, int reduction=1, SymInt ignore_index=-100, "
      "float label_smoothing=0.0, int? chunk_rows=None, float z_loss=0.0, float softcap=0.0, "
      "bool return_lse=False, bool return_argmax=False) -> "
      "(Tensor loss, Tensor lse, Tensor argmax)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CompositeImplicitAutograd, m) { implement<Entry<run>>(m); }

TORCH_LIBRARY_IMPL(warpwright, AutocastCPU, m) { implement<Entry<run_in_autocast<at::kCPU>>>(m); }

TORCH_LIBRARY_IMPL(warpwright, AutocastCUDA, m) { implement<Entry<run_in_autocast<at::kCUDA>>>(m); }

}  // namespace warpwright
