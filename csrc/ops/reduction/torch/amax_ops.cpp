// amax on every dispatch key. Equal maxima share the gradient, as in native.
#include <ATen/ops/amax.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/where.h>

#include "ops/reduction/torch/gradient.h"
#include "torch/check_argument.h"
#include "torch/check_saved.h"

namespace warpwright {
namespace {

namespace call {

Tensor amax(const Tensor& input, at::IntArrayRef dim, bool keepdim) {
  static const auto op = find_op<Tensor(const Tensor&, at::IntArrayRef, bool)>("warpwright::amax");
  return op.call(input, dim, keepdim);
}

}  // namespace call

// ---- CPU and CUDA ----

Tensor amax_kernel(const Tensor& input, at::IntArrayRef dim, bool keepdim) {
  const DimMask mask = reduced_dims(dim, input.dim());
  if (!is_floating(input.scalar_type()) || input.numel() == 0) {
    check_has_storage(input, "amax: input");
    return at::amax(input, dim, keepdim);
  }
  return reduce_on_device(input,
                          {"amax: input", ReductionKind::kMax, mask, keepdim, input.scalar_type()});
}

// ---- Meta ----

Tensor amax_meta(const Tensor& input, at::IntArrayRef dim, bool keepdim) {
  const DimMask mask = reduced_dims(dim, input.dim());
  if (!is_floating(input.scalar_type())) return at::amax(input, dim, keepdim);
  const auto numel = input.sym_numel().maybe_as_int();
  if (numel.has_value() && *numel == 0) return at::amax(input, dim, keepdim);
  return empty_reduced(input, mask, keepdim, input.scalar_type());
}

// ---- Autograd ----

struct AmaxAttributes {
  DimMask mask;
  bool keepdim;
};

// Where the maximum is, and at how many places per output.
struct Maxima {
  Tensor where, count;

  Maxima(const Tensor& input, const Tensor& output, const AmaxAttributes& a)
      : where(input == restore_dims(output, a.mask, a.keepdim, input.dim())),
        count(at::sum(where, at::OptionalIntArrayRef(dims_of(a.mask, input.dim())), true)) {}
};

struct AmaxBackward {  // saved: input, output
  static constexpr const char* kName = "WarpwrightAmaxBackward";
  using Attributes = AmaxAttributes;
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    if (!needs[0]) return {Tensor()};
    check_saved_storage(saved, kName);
    const Tensor& input = saved[0];
    const Tensor grad = restore_dims(grads[0], a.mask, a.keepdim, input.dim());
    if (takes_gradient_kernel(input, a.mask, grad)) {
      const Tensor value = restore_dims(saved[1], a.mask, a.keepdim, input.dim());
      const Tensor count = count_maxima(input, a.mask, value);
      const Tensor wide = grad.to(accumulator_of(input));
      return {reduction_gradient(ReductionGradient::kMaximum, input, a.mask, value, wide / count,
                                 wide * 0 / count)};
    }
    const Maxima maxima(input, saved[1], a);
    return {grad * maxima.where / maxima.count};
  }
};

Tensor amax_autograd(const Tensor& input, at::IntArrayRef dim, bool keepdim) {
  if (!is_floating(input.scalar_type())) {
    check_plain_storage(input, "amax: input");
    return at::amax(input, dim, keepdim);
  }
  const AmaxAttributes attributes{reduced_dims(dim, input.dim()), keepdim};
  auto node = make_node<AmaxBackward>(attributes, input);
  Tensor output = below_autograd([&] { return call::amax(input, dim, keepdim); });
  if (node) {
    node->save(input);
    set_history(output, node);
  }
  if (has_tangent(input)) {
    const Maxima maxima(primal(input), output, attributes);
    const Tensor moved = at::where(maxima.where, tangent(input), 0.0);
    const auto dims = dims_of(attributes.mask, input.dim());
    Tensor total = sum_along(moved, at::IntArrayRef(dims), true) / maxima.count;
    set_tangent(output, keepdim ? total : total.view_symint(output.sym_sizes()));
  }
  if (node) node->save_output(output);  // with its tangent
  return output;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def("amax(Tensor input, int[1] dim=[], bool keepdim=False) -> Tensor",
        {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) { m.impl("amax", amax_kernel); }

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) { m.impl("amax", amax_kernel); }
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) { m.impl("amax", amax_meta); }

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) { m.impl("amax", amax_autograd); }

}  // namespace warpwright
