// cumprod and logcumsumexp on every dispatch key. Their derivatives are linear recurrences
// (linear_scan): exact where an element is zero, without a division, and of gradients of both signs
// without a difference of two large numbers.
#include <ATen/WrapDimUtils.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/cumprod.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/logcumsumexp.h>

#include "ops/scan/scan.h"
#include "ops/scan/torch/common.h"
#include "torch/autograd.h"
#include "torch/check_argument.h"
#include "torch/check_saved.h"
#include "torch/checks.h"
#include "torch/dispatch.h"

namespace warpwright {
namespace {

using ScanSignature = Tensor(const Tensor&, int64_t, bool);

struct ScanAttributes {
  int64_t dim;
  bool reverse;
};

// A number is scanned as one element.
Tensor with_dimension(const Tensor& x) { return x.dim() == 0 ? x.unsqueeze(0) : x; }

// The value before each step; `first` before the first one.
Tensor values_before(const Tensor& values, double first, const ScanAttributes& a) {
  const Tensor start = at::full_like(values.select(a.dim, 0), first);
  return before_steps(values, start, a.dim, a.reverse);
}

struct Cumprod {
  static constexpr const char* kName = "WarpwrightCumprodBackward";
  static constexpr const char* kInput = "cumprod: input";
  static constexpr ScanKind kKind = ScanKind::kProduct;
  static Tensor native(const Tensor& input, int64_t dim) { return at::cumprod(input, dim); }
  static Tensor call(const Tensor& input, int64_t dim, bool reverse) {
    static const auto op = find_op<ScanSignature>("warpwright::cumprod");
    return op.call(input, dim, reverse);
  }
  // Products of integers are int64, as native's are. Booleans and complex numbers have no kernel.
  static bool has_kernel(const Tensor& input) {
    return find_dtype(input.scalar_type()).has_value();
  }
  static at::ScalarType result_type(const Tensor& input) {
    return is_floating(input.scalar_type()) ? input.scalar_type() : at::kLong;
  }

  // y_t = x_t y_{t-1}: each y passes its gradient on to the y before it.
  static Tensor gradient(const Tensor& grad, const Tensor& input, const Tensor& output,
                         const ScanAttributes& a) {
    const Tensor of_output =
        call::linear_scan(input, grad, std::nullopt, a.dim, !a.reverse, /*shifted=*/true);
    return of_output * values_before(output, 1, a);
  }
  static Tensor tangent(const Tensor& moved, const Tensor& input, const Tensor& output,
                        const ScanAttributes& a) {
    return call::linear_scan(input, moved * values_before(output, 1, a), std::nullopt, a.dim,
                             a.reverse, false);
  }
};

struct Logcumsumexp {
  static constexpr const char* kName = "WarpwrightLogcumsumexpBackward";
  static constexpr const char* kInput = "logcumsumexp: input";
  static constexpr ScanKind kKind = ScanKind::kLogSumExp;
  static Tensor native(const Tensor& input, int64_t dim) { return at::logcumsumexp(input, dim); }
  static Tensor call(const Tensor& input, int64_t dim, bool reverse) {
    static const auto op = find_op<ScanSignature>("warpwright::logcumsumexp");
    return op.call(input, dim, reverse);
  }
  static bool has_kernel(const Tensor& input) { return is_floating(input.scalar_type()); }
  static at::ScalarType result_type(const Tensor& input) { return input.scalar_type(); }

  // dy_t / dx_s = exp(x_s - y_t) for s <= t. Between y_s and y_t the outputs are levels, so no
  // exponential is above 1 and no gate is rounded.
  static Tensor gradient(const Tensor& grad, const Tensor& input, const Tensor& output,
                         const ScanAttributes& a) {
    const Tensor sums = call::level_scan(output, grad, a.dim, !a.reverse);
    return sums * (input - output).exp();
  }
  static Tensor tangent(const Tensor& moved, const Tensor& input, const Tensor& output,
                        const ScanAttributes& a) {
    return call::level_scan(-output, moved * (input - output).exp(), a.dim, a.reverse);
  }
};

// ---- output shape and checks ----

template <class Op>
Tensor native_scan(const Tensor& input, int64_t dim, bool reverse) {
  if (!reverse || input.dim() == 0) return Op::native(input, dim);
  return Op::native(input.flip(dim), dim).flip(dim);
}

// Contiguous whatever the input's strides, as native's result is.
template <class Op>
Tensor empty_output(const Tensor& input) {
  return at::empty_symint(input.sym_sizes(), input.options().dtype(Op::result_type(input)));
}

// ---- CPU and CUDA ----

template <class Op, class Run>
Tensor scan_with(const Tensor& input, int64_t dim, bool reverse, Run&& run) {
  dim = at::maybe_wrap_dim(dim, input.dim());
  check_has_storage(input, Op::kInput);
  if (!Op::has_kernel(input)) return native_scan<Op>(input, dim, reverse);
  Tensor output = empty_output<Op>(input);
  if (output.numel() == 0) return output;
  const Tensor source = input.to(output.scalar_type()).contiguous();
  ScanParams p{.kind = Op::kKind,
               .dtype = dtype_of(output),
               .is_reversed = reverse,
               .input = source.const_data_ptr(),
               .output = output.mutable_data_ptr()};
  set_scan_sizes(p, input.sizes(), dim);
  run(p);
  return output;
}

template <class Op>
Tensor scan_cpu_kernel(const Tensor& input, int64_t dim, bool reverse) {
  return scan_with<Op>(input, dim, reverse, scan_cpu);
}

#ifdef WARPWRIGHT_WITH_CUDA
template <class Op>
Tensor scan_cuda_kernel(const Tensor& input, int64_t dim, bool reverse) {
  const CudaCall call(input);
  return scan_with<Op>(input, dim, reverse,
                       [&](const ScanParams& p) { scan_cuda(p, input, call.stream); });
}
#endif

// ---- Meta ----

template <class Op>
Tensor scan_meta(const Tensor& input, int64_t dim, bool) {
  at::maybe_wrap_dim(dim, input.dim());
  if (!Op::has_kernel(input)) return Op::native(input, dim);
  return empty_output<Op>(input);
}

// ---- Autograd ----

template <class Op>
struct ScanBackward {  // saved: input, output
  static constexpr const char* kName = Op::kName;
  using Attributes = ScanAttributes;
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    if (!needs[0]) return {Tensor()};
    check_saved_storage(saved, kName);
    const Tensor& input = saved[0];
    if (input.sym_numel() == 0) return {at::zeros_like(input)};
    const Tensor grad =
        Op::gradient(with_dimension(grads[0]), with_dimension(input), with_dimension(saved[1]), a);
    return {grad.view_symint(input.sym_sizes())};
  }
};

template <class Op>
Tensor scan_autograd(const Tensor& input, int64_t dim, bool reverse) {
  if (!is_floating(input.scalar_type())) {
    // Complex numbers have native's derivatives, integers none.
    check_plain_storage(input, Op::kInput);
    return Op::has_kernel(input) ? below_autograd([&] { return Op::call(input, dim, reverse); })
                                 : native_scan<Op>(input, dim, reverse);
  }
  const ScanAttributes attributes{at::maybe_wrap_dim(dim, input.dim()), reverse};
  auto node = make_node<ScanBackward<Op>>(attributes, input);
  Tensor output = below_autograd([&] { return Op::call(input, dim, reverse); });
  if (node) {
    node->save(input);
    set_history(output, node);
  }
  if (has_tangent(input)) {
    const Tensor x = primal(input);
    const Tensor moved = x.sym_numel() == 0
                             ? at::zeros_like(x)
                             : Op::tangent(with_dimension(tangent(input)), with_dimension(x),
                                           with_dimension(output), attributes);
    set_tangent(output, moved.view_symint(input.sym_sizes()));
  }
  if (node) node->save_output(output);  // with its tangent
  return output;
}

// ---- Autocast: products are float32 on a GPU, as native's ----

Tensor cumprod_autocast(const Tensor& input, int64_t dim, bool reverse) {
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::AutocastCUDA);
  return Cumprod::call(at::autocast::cached_cast(at::kFloat, input), dim, reverse);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def("cumprod(Tensor input, int dim, bool reverse=False) -> Tensor",
        {at::Tag::pt2_compliant_tag});
  m.def("logcumsumexp(Tensor input, int dim, bool reverse=False) -> Tensor",
        {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) {
  m.impl("cumprod", scan_cpu_kernel<Cumprod>);
  m.impl("logcumsumexp", scan_cpu_kernel<Logcumsumexp>);
}

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) {
  m.impl("cumprod", scan_cuda_kernel<Cumprod>);
  m.impl("logcumsumexp", scan_cuda_kernel<Logcumsumexp>);
}
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) {
  m.impl("cumprod", scan_meta<Cumprod>);
  m.impl("logcumsumexp", scan_meta<Logcumsumexp>);
}

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) {
  m.impl("cumprod", scan_autograd<Cumprod>);
  m.impl("logcumsumexp", scan_autograd<Logcumsumexp>);
}

TORCH_LIBRARY_IMPL(warpwright, AutocastCPU, m) {
  m.impl("cumprod", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(warpwright, AutocastCUDA, m) { m.impl("cumprod", cumprod_autocast); }

}  // namespace warpwright
