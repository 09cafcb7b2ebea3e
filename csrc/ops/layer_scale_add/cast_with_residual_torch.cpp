// cast_with_residual. Under autocast a residual block begins with a cast of x to 16 bits, and ends
// with x + f(cast). As two readers of x, the engine would cast one gradient back and add it in a
// second pass. Here one node has both readers, and one kernel adds.
#include <ATen/TensorOperators.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/empty_like.h>

#include <tuple>

#include "ops/layer_scale_add/cast_with_residual.h"
#include "torch/autograd.h"
#include "torch/check_argument.h"
#include "torch/checks.h"
#include "torch/dispatch.h"
#include "torch/plain.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include "torch/cuda.h"
#endif

namespace warpwright {
namespace {

// wide + narrow, in float32.
Tensor sum_of_gradients(const Tensor& wide, const Tensor& narrow) {
#ifdef WARPWRIGHT_WITH_CUDA
  const bool one_walk = wide.is_cuda() && is_plain(wide) && is_plain(narrow) &&
                        wide.is_non_overlapping_and_dense() &&
                        wide.strides().equals(narrow.strides());
  const bool types = wide.scalar_type() == at::kFloat && narrow.element_size() == 2;
  if (one_walk && types && !is_differentiated(wide) && !is_differentiated(narrow)) {
    const CudaCall cuda(wide);
    const Tensor sum = at::empty_like(wide);
    launch_widen_and_add({.dtype = dtype_of(narrow),
                          .numel = wide.numel(),
                          .narrow = narrow.const_data_ptr(),
                          .wide = wide.const_data_ptr(),
                          .sum = sum.mutable_data_ptr()},
                         cuda.stream);
    return sum;
  }
#endif
  return wide + narrow;
}

struct CastWithResidualBackward {
  static constexpr const char* kName = "WarpwrightCastWithResidualBackward";
  struct Attributes {
    at::ScalarType type;  // of the input
  };
  // grads: of the residual and of the cast.
  static variable_list backward(const Attributes& a, const variable_list&,
                                const variable_list& grads, const NeedsGrad&) {
    if (!grads[1].defined()) return {grads[0]};
    if (!grads[0].defined()) return {grads[1].to(a.type)};
    return {sum_of_gradients(grads[0], grads[1])};
  }
};

// Whether `cast` can stand for input.to(dtype): it has its form, and no history.
bool is_cast_of(const Tensor& cast, const Tensor& input, at::ScalarType dtype) {
  return is_plain(cast) && !cast.requires_grad() && cast.scalar_type() == dtype &&
         cast.device() == input.device() && cast.sizes().equals(input.sizes()) &&
         cast.strides().equals(input.strides());
}

// `residual` is `input` in a tensor of its own, over the same memory. `known`: input.to(dtype), if
// somebody has computed it. The result is over its memory then.
std::tuple<Tensor, Tensor> cast_with_residual(const Tensor& input, at::ScalarType dtype,
                                              const OptionalTensor& known) {
  check_is_dtype(dtype, "cast_with_residual: dtype");
  TORCH_CHECK(is_floating(input.scalar_type()) && is_floating(dtype),
              "cast_with_residual: expected floating point types, got ", input.scalar_type(),
              " and ", dtype);
  check_plain_storage(input, "cast_with_residual: input");
  if (known.has_value()) check_plain_storage(*known, "cast_with_residual: known");
  if (!is_plain(input) || !needs_gradient(input) || input.scalar_type() == dtype) {
    return {at::alias(input), input.to(dtype)};
  }
  auto node = make_node<CastWithResidualBackward>({input.scalar_type()}, input);
  Tensor residual = below_autograd([&] { return at::alias(input); });
  // A write to either is a write to both.
  torch::autograd::impl::set_version_counter(residual,
                                             torch::autograd::impl::version_counter(input));
  const bool is_known = known.has_value() && is_cast_of(*known, input, dtype);
  Tensor cast = below_autograd([&] { return is_known ? at::alias(*known) : input.to(dtype); });
  set_history(variable_list{residual, cast}, node);
  return {residual, cast};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def(
      "cast_with_residual(Tensor input, ScalarType dtype, Tensor? known=None) "
      "-> (Tensor residual, Tensor cast)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CompositeImplicitAutograd, m) {
  m.impl("cast_with_residual", cast_with_residual);
}

}  // namespace warpwright
