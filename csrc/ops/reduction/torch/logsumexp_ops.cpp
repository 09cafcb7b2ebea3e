// logsumexp on every dispatch key.
#include <ATen/autocast_mode.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/logsumexp.h>

#include "ops/reduction/torch/gradient.h"
#include "torch/check_argument.h"
#include "torch/check_saved.h"

namespace warpwright {
namespace {

namespace call {

Tensor logsumexp(const Tensor& input, at::IntArrayRef dim, bool keepdim, OptionalType dtype) {
  static const auto op =
      find_op<Tensor(const Tensor&, at::IntArrayRef, bool, OptionalType)>("warpwright::logsumexp");
  return op.call(input, dim, keepdim, dtype);
}

}  // namespace call

// ---- output shape and checks ----

// The result has the input's type, or float32 for 16-bit inputs.
void check_logsumexp(const Tensor& input, OptionalType dtype) {
  if (!dtype.has_value()) return;
  TORCH_CHECK(is_floating(input.scalar_type()) && is_direct(input.scalar_type(), *dtype),
              "logsumexp: dtype: expected the input's type or float32 for 16-bit inputs, got ",
              *dtype, " for ", input.scalar_type());
}

// ---- CPU and CUDA ----

Tensor logsumexp_kernel(const Tensor& input, at::IntArrayRef dim, bool keepdim,
                        OptionalType dtype) {
  check_logsumexp(input, dtype);
  const DimMask mask = reduced_dims(dim, input.dim());
  if (!is_floating(input.scalar_type()) || input.numel() == 0) {
    check_has_storage(input, "logsumexp: input");
    const Tensor result = at::logsumexp(input, dims_of(mask, input.dim()), keepdim);
    return dtype.has_value() ? result.to(*dtype) : result;
  }
  return reduce_on_device(input, {"logsumexp: input", ReductionKind::kLogSumExp, mask, keepdim,
                                  dtype.value_or(input.scalar_type())});
}

// ---- Meta ----

Tensor logsumexp_meta(const Tensor& input, at::IntArrayRef dim, bool keepdim, OptionalType dtype) {
  check_logsumexp(input, dtype);
  const DimMask mask = reduced_dims(dim, input.dim());
  if (!is_floating(input.scalar_type())) return at::logsumexp(input, dim, keepdim);
  return empty_reduced(input, mask, keepdim, dtype.value_or(input.scalar_type()));
}

// ---- Autograd ----

struct LogSumExpAttributes {
  DimMask mask;
  bool keepdim;
};

// The derivative by each element.
Tensor shares(const Tensor& input, const Tensor& output, const LogSumExpAttributes& a) {
  return (input - restore_dims(output, a.mask, a.keepdim, input.dim())).exp();
}

struct LogSumExpBackward {  // saved: input, output
  static constexpr const char* kName = "WarpwrightLogsumexpBackward";
  using Attributes = LogSumExpAttributes;
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    if (!needs[0]) return {Tensor()};
    check_saved_storage(saved, kName);
    const Tensor &input = saved[0], &output = saved[1];
    const Tensor grad = restore_dims(grads[0], a.mask, a.keepdim, input.dim());
    if (takes_gradient_kernel(input, a.mask, grad)) {
      return {reduction_gradient(ReductionGradient::kExponential, input, a.mask,
                                 restore_dims(output, a.mask, a.keepdim, input.dim()), grad)};
    }
    return {(grad * shares(input, output, a)).to(input.scalar_type())};
  }
};

Tensor logsumexp_autograd(const Tensor& input, at::IntArrayRef dim, bool keepdim,
                          OptionalType dtype) {
  check_logsumexp(input, dtype);
  if (!is_floating(input.scalar_type())) {
    check_plain_storage(input, "logsumexp: input");
    return at::logsumexp(input, dim, keepdim);
  }
  const LogSumExpAttributes attributes{reduced_dims(dim, input.dim()), keepdim};
  auto node = make_node<LogSumExpBackward>(attributes, input);
  Tensor output = below_autograd([&] { return call::logsumexp(input, dim, keepdim, dtype); });
  if (node) {
    node->save(input);
    set_history(output, node);
  }
  if (has_tangent(input)) {
    const Tensor moved = shares(primal(input), output, attributes) * tangent(input);
    const auto dims = dims_of(attributes.mask, input.dim());
    set_tangent(output, sum_along(moved, at::IntArrayRef(dims), keepdim));
  }
  if (node) node->save_output(output);  // with its tangent
  return output;
}

// ---- Autocast: float32 on a GPU, as native's. The kernel reads 16-bit inputs. ----

Tensor logsumexp_autocast(const Tensor& input, at::IntArrayRef dim, bool keepdim,
                          OptionalType dtype) {
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::AutocastCUDA);
  const bool is_half = input.scalar_type() == at::kHalf || input.scalar_type() == at::kBFloat16;
  if (is_half && !dtype.has_value()) dtype = at::kFloat;
  return call::logsumexp(input, dim, keepdim, dtype);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def("logsumexp(Tensor input, int[1] dim, bool keepdim=False, ScalarType? dtype=None) -> Tensor",
        {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) { m.impl("logsumexp", logsumexp_kernel); }

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) { m.impl("logsumexp", logsumexp_kernel); }
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) { m.impl("logsumexp", logsumexp_meta); }

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) { m.impl("logsumexp", logsumexp_autograd); }

TORCH_LIBRARY_IMPL(warpwright, AutocastCPU, m) {
  m.impl("logsumexp", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(warpwright, AutocastCUDA, m) { m.impl("logsumexp", logsumexp_autocast); }

}  // namespace warpwright
