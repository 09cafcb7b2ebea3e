// var and std on every dispatch key.
#include <ATen/ops/full_like.h>
#include <ATen/ops/std.h>
#include <ATen/ops/var.h>
#include <ATen/ops/where.h>

#include <limits>

#include "ops/reduction/torch/gradient.h"
#include "torch/check_argument.h"
#include "torch/check_saved.h"

namespace warpwright {
namespace {

using OptionalNumber = std::optional<at::Scalar>;
using VarSignature = Tensor(const Tensor&, OptionalDims, const OptionalNumber&, bool);

struct Var {
  static constexpr const char* kName = "WarpwrightVarBackward";
  static constexpr const char* kInput = "var: input";
  static constexpr ReductionKind kKind = ReductionKind::kVar;
  static Tensor native(const Tensor& input, OptionalDims dim, const OptionalNumber& correction,
                       bool keepdim) {
    return at::var(input, dim, correction, keepdim);
  }
  static Tensor call(const Tensor& input, OptionalDims dim, const OptionalNumber& correction,
                     bool keepdim) {
    static const auto op = find_op<VarSignature>("warpwright::var");
    return op.call(input, dim, correction, keepdim);
  }
};

struct Std {
  static constexpr const char* kName = "WarpwrightStdBackward";
  static constexpr const char* kInput = "std: input";
  static constexpr ReductionKind kKind = ReductionKind::kStd;
  static Tensor native(const Tensor& input, OptionalDims dim, const OptionalNumber& correction,
                       bool keepdim) {
    return at::std(input, dim, correction, keepdim);
  }
  static Tensor call(const Tensor& input, OptionalDims dim, const OptionalNumber& correction,
                     bool keepdim) {
    static const auto op = find_op<VarSignature>("warpwright::std");
    return op.call(input, dim, correction, keepdim);
  }
};

namespace call {

Tensor mean(const Tensor& input, OptionalDims dim, bool keepdim,
            OptionalType dtype = std::nullopt) {
  static const auto op =
      find_op<Tensor(const Tensor&, OptionalDims, bool, OptionalType)>("warpwright::mean");
  return op.call(input, dim, keepdim, dtype);
}

}  // namespace call

double value_of(const OptionalNumber& correction) {
  return correction.has_value() ? correction->toDouble() : 1;
}

void warn_without_freedom(const Tensor& input, const DimMask& mask, double correction) {
  const auto count = reduced_count(input.sym_sizes(), mask).maybe_as_int();
  if (count.has_value() && static_cast<double>(*count) <= correction) {
    TORCH_WARN(
        "var(): degrees of freedom is <= 0. Correction should be strictly less than the "
        "reduction factor (input numel divided by output numel).");
  }
}

// ---- CPU and CUDA ----

template <class Op>
Tensor var_kernel(const Tensor& input, OptionalDims dim, const OptionalNumber& correction,
                  bool keepdim) {
  const DimMask mask = reduced_dims(dim, input.dim());
  if (!is_floating(input.scalar_type()) || input.numel() == 0) {
    check_has_storage(input, Op::kInput);
    return Op::native(input, dim, correction, keepdim);
  }
  warn_without_freedom(input, mask, value_of(correction));
  return reduce_on_device(
      input, {Op::kInput, Op::kKind, mask, keepdim, input.scalar_type(), value_of(correction)});
}

// ---- Meta ----

template <class Op>
Tensor var_meta(const Tensor& input, OptionalDims dim, const OptionalNumber& correction,
                bool keepdim) {
  const DimMask mask = reduced_dims(dim, input.dim());
  if (!is_floating(input.scalar_type())) return Op::native(input, dim, correction, keepdim);
  return empty_reduced(input, mask, keepdim, input.scalar_type());
}

// ---- Autograd ----

struct VarAttributes {
  DimMask mask;
  bool keepdim, is_whole;  // is_whole: no dimensions were named
  double correction;
};

// The gradient by `input`, from that of the variance, which has the reduced dimensions.
Tensor var_gradient(const Tensor& grad, const Tensor& input, const VarAttributes& a) {
  const auto dims = dims_of(a.mask, input.dim());
  const c10::SymInt count = reduced_count(input.sym_sizes(), a.mask);
  const c10::SymFloat freedom = c10::SymFloat(count) - a.correction;
  const auto number = count.maybe_as_int();
  const Tensor deviation = input - call::mean(input, at::IntArrayRef(dims), true);
  // 2 / 0, times a deviation of 0: NaN.
  if (a.is_whole && number.has_value() && static_cast<double>(*number) <= a.correction) {
    constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    return grad *
           at::where(deviation == 0, at::full_like(input, kNan), at::full_like(input, kInfinity));
  }
  return (c10::SymFloat(2.0) / freedom) * grad * deviation;
}

// The same in one pass, by numbers of the accumulator's type; with degrees of freedom above 0.
double freedom_of(const Tensor& grad, const Tensor& input, const VarAttributes& a) {
  return static_cast<double>(input.numel() / grad.numel()) - a.correction;
}
bool has_one_pass(const Tensor& grad, const Tensor& input, const VarAttributes& a) {
  return takes_gradient_kernel(input, a.mask, grad) && freedom_of(grad, input, a) > 0;
}
Tensor var_gradient_in_one_pass(const Tensor& grad, const Tensor& input, const VarAttributes& a) {
  const auto accum = accumulator_of(input);
  const auto dims = dims_of(a.mask, input.dim());
  return reduction_gradient(ReductionGradient::kDeviation, input, a.mask,
                            call::mean(input, at::IntArrayRef(dims), true, accum),
                            2 / freedom_of(grad, input, a) * grad.to(accum));
}

// The gradient of the variance, from that of the deviation `output`. At 0 it is 0, as native's.
Tensor gradient_of_square(const Tensor& grad, const Tensor& output) {
  return (grad / (output * 2)).masked_fill(output == 0, 0);
}

template <class Op>
struct VarBackward {  // saved: input, and for std output
  static constexpr const char* kName = Op::kName;
  using Attributes = VarAttributes;
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    if (!needs[0]) return {Tensor()};
    check_saved_storage(saved, kName);
    Tensor grad = grads[0];
    if constexpr (Op::kKind == ReductionKind::kStd) grad = gradient_of_square(grad, saved[1]);
    const Tensor& input = saved[0];
    grad = restore_dims(grad, a.mask, a.keepdim, input.dim());
    return {has_one_pass(grad, input, a) ? var_gradient_in_one_pass(grad, input, a)
                                         : var_gradient(grad, input, a)};
  }
};

// The sum of the gradient times the tangent.
template <class Op>
Tensor var_tangent(const Tensor& input, const Tensor& output, const VarAttributes& a) {
  const auto dims = dims_of(a.mask, input.dim());
  const Tensor moved = var_gradient(tangent(input), primal(input), a);
  const Tensor total = sum_along(moved, at::IntArrayRef(dims), a.keepdim);
  if (Op::kKind == ReductionKind::kVar) return total;
  return gradient_of_square(total, output);
}

template <class Op>
Tensor var_autograd(const Tensor& input, OptionalDims dim, const OptionalNumber& correction,
                    bool keepdim) {
  if (!is_floating(input.scalar_type())) {
    check_plain_storage(input, Op::kInput);
    return Op::native(input, dim, correction, keepdim);
  }
  const bool is_whole = !dim.has_value() || input.dim() == 0;
  const VarAttributes attributes{reduced_dims(dim, input.dim()), keepdim, is_whole,
                                 value_of(correction)};
  auto node = make_node<VarBackward<Op>>(attributes, input);
  Tensor output = below_autograd([&] { return Op::call(input, dim, correction, keepdim); });
  if (node) {
    node->save(input);
    set_history(output, node);
  }
  if (has_tangent(input)) set_tangent(output, var_tangent<Op>(input, output, attributes));
  if (node && Op::kKind == ReductionKind::kStd) node->save_output(output);  // with its tangent
  return output;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def(
      "var(Tensor input, int[1]? dim=None, Scalar? correction=None, bool keepdim=False) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "std(Tensor input, int[1]? dim=None, Scalar? correction=None, bool keepdim=False) -> Tensor",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) {
  m.impl("var", var_kernel<Var>);
  m.impl("std", var_kernel<Std>);
}

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) {
  m.impl("var", var_kernel<Var>);
  m.impl("std", var_kernel<Std>);
}
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) {
  m.impl("var", var_meta<Var>);
  m.impl("std", var_meta<Std>);
}

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) {
  m.impl("var", var_autograd<Var>);
  m.impl("std", var_autograd<Std>);
}

}  // namespace warpwright
