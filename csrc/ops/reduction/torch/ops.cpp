// sum and mean on every dispatch key. Both are linear: the gradient is a view that repeats the
// result's gradient.
#include <ATen/autocast_mode.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/sum.h>

#include "ops/reduction/torch/common.h"
#include "torch/check_argument.h"

namespace warpwright {
namespace {

using SumSignature = Tensor(const Tensor&, OptionalDims, bool, OptionalType);

struct Sum {
  static constexpr const char* kName = "WarpwrightSumBackward";
  static constexpr const char* kInput = "sum: input";
  static constexpr const char* kDtype = "sum: dtype";
  static constexpr ReductionKind kKind = ReductionKind::kSum;
  static Tensor native(const Tensor& input, OptionalDims dim, bool keepdim, OptionalType dtype) {
    return at::sum(input, dim, keepdim, dtype);
  }
  static Tensor call(const Tensor& input, OptionalDims dim, bool keepdim, OptionalType dtype) {
    static const auto op = find_op<SumSignature>("warpwright::sum");
    return op.call(input, dim, keepdim, dtype);
  }
};

struct Mean {
  static constexpr const char* kName = "WarpwrightMeanBackward";
  static constexpr const char* kInput = "mean: input";
  static constexpr const char* kDtype = "mean: dtype";
  static constexpr ReductionKind kKind = ReductionKind::kMean;
  static Tensor native(const Tensor& input, OptionalDims dim, bool keepdim, OptionalType dtype) {
    return at::mean(input, dim, keepdim, dtype);
  }
  static Tensor call(const Tensor& input, OptionalDims dim, bool keepdim, OptionalType dtype) {
    static const auto op = find_op<SumSignature>("warpwright::mean");
    return op.call(input, dim, keepdim, dtype);
  }
};

// ---- output shape and checks ----

// Integers, booleans and complex numbers have no kernel here.
template <class Op>
bool is_native_alone(const Tensor& input, OptionalType dtype) {
  if (dtype) check_is_dtype(*dtype, Op::kDtype);
  return !is_floating(input.scalar_type()) || !is_floating(dtype.value_or(input.scalar_type()));
}

// ---- CPU and CUDA ----

template <class Op>
Tensor sum_kernel(const Tensor& input, OptionalDims dim, bool keepdim, OptionalType dtype) {
  const DimMask mask = reduced_dims(dim, input.dim());
  if (is_native_alone<Op>(input, dtype) || input.numel() == 0) {
    check_has_storage(input, Op::kInput);
    return Op::native(input, dim, keepdim, dtype);
  }
  return reduce_on_device(
      input, {Op::kInput, Op::kKind, mask, keepdim, dtype.value_or(input.scalar_type())});
}

// ---- Meta ----

template <class Op>
Tensor sum_meta(const Tensor& input, OptionalDims dim, bool keepdim, OptionalType dtype) {
  const DimMask mask = reduced_dims(dim, input.dim());
  if (is_native_alone<Op>(input, dtype)) return Op::native(input, dim, keepdim, dtype);
  return empty_reduced(input, mask, keepdim, dtype.value_or(input.scalar_type()));
}

// ---- Autograd ----

struct SumAttributes {
  DimMask mask;
  bool keepdim;
  std::vector<c10::SymInt> sizes;
  at::ScalarType dtype;
};

template <class Op>
struct SumBackward {
  static constexpr const char* kName = Op::kName;
  using Attributes = SumAttributes;
  static variable_list backward(const Attributes& a, const variable_list&,
                                const variable_list& grads, const NeedsGrad& needs) {
    if (!needs[0]) return {Tensor()};
    const auto ndim = static_cast<int64_t>(a.sizes.size());
    Tensor grad = restore_dims(grads[0], a.mask, a.keepdim, ndim);
    if (Op::kKind == ReductionKind::kMean) grad = grad / reduced_count(a.sizes, a.mask);
    return {grad.to(a.dtype).expand_symint(a.sizes)};
  }
};

template <class Op>
Tensor sum_autograd(const Tensor& input, OptionalDims dim, bool keepdim, OptionalType dtype) {
  if (is_native_alone<Op>(input, dtype)) {
    check_plain_storage(input, Op::kInput);
    return Op::native(input, dim, keepdim, dtype);
  }
  auto node = make_node<SumBackward<Op>>({}, input);
  if (node) {
    node->attributes = {reduced_dims(dim, input.dim()), keepdim, input.sym_sizes().vec(),
                        input.scalar_type()};
  }
  Tensor output = below_autograd([&] { return Op::call(input, dim, keepdim, dtype); });
  if (node) set_history(output, node);
  if (has_tangent(input)) set_tangent(output, Op::call(tangent(input), dim, keepdim, dtype));
  return output;
}

// ---- Autocast: sums are float32 on a GPU, as native's. The kernel reads 16-bit inputs. ----

Tensor sum_autocast(const Tensor& input, OptionalDims dim, bool keepdim, OptionalType dtype) {
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::AutocastCUDA);
  const bool is_half = input.scalar_type() == at::kHalf || input.scalar_type() == at::kBFloat16;
  if (is_half && !dtype.has_value()) dtype = at::kFloat;
  return Sum::call(input, dim, keepdim, dtype);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def("sum(Tensor input, int[1]? dim=None, bool keepdim=False, ScalarType? dtype=None) -> Tensor",
        {at::Tag::pt2_compliant_tag});
  m.def(
      "mean(Tensor input, int[1]? dim=None, bool keepdim=False, ScalarType? dtype=None) -> Tensor",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) {
  m.impl("sum", sum_kernel<Sum>);
  m.impl("mean", sum_kernel<Mean>);
}

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) {
  m.impl("sum", sum_kernel<Sum>);
  m.impl("mean", sum_kernel<Mean>);
}
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) {
  m.impl("sum", sum_meta<Sum>);
  m.impl("mean", sum_meta<Mean>);
}

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) {
  m.impl("sum", sum_autograd<Sum>);
  m.impl("mean", sum_autograd<Mean>);
}

TORCH_LIBRARY_IMPL(warpwright, AutocastCPU, m) {
  m.impl("sum", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(warpwright, AutocastCUDA, m) { m.impl("sum", sum_autocast); }

}  // namespace warpwright
