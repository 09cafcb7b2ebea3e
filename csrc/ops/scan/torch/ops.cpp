// cumsum on every dispatch key. It is linear, and its transpose is the scan in the other direction:
// one operator has all derivatives.
#include <ATen/WrapDimUtils.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/empty.h>

#include "ops/scan/scan.h"
#include "ops/scan/torch/common.h"
#include "torch/autograd.h"
#include "torch/checks.h"
#include "torch/dispatch.h"

namespace warpwright {
namespace call {

inline Tensor cumsum(const Tensor& input, int64_t dim, bool reverse) {
  static const auto op = find_op<Tensor(const Tensor&, int64_t, bool)>("warpwright::cumsum");
  return op.call(input, dim, reverse);
}

}  // namespace call

namespace {

// ---- output shape and checks ----

// Sums of integers are int64, as native's are.
at::ScalarType sum_type(const Tensor& input) {
  return is_floating(input.scalar_type()) ? input.scalar_type() : at::kLong;
}

// Contiguous whatever the input's strides, as native's result is.
Tensor empty_output(const Tensor& input) {
  return at::empty_symint(input.sym_sizes(), input.options().dtype(sum_type(input)));
}

// Booleans and complex numbers have no kernel here.
bool is_native_alone(const Tensor& input) { return !find_dtype(input.scalar_type()).has_value(); }

Tensor native_cumsum(const Tensor& input, int64_t dim, bool reverse) {
  if (!reverse) return at::cumsum(input, dim);
  return at::cumsum(input.flip(dim), dim).flip(dim);
}

// ---- CPU and CUDA ----

template <class Run>
Tensor cumsum_with(const Tensor& input, int64_t dim, bool reverse, Run&& run) {
  dim = at::maybe_wrap_dim(dim, input.dim());
  check_has_storage(input, "cumsum: input");
  if (is_native_alone(input)) return native_cumsum(input, dim, reverse);
  Tensor output = empty_output(input);
  if (output.numel() == 0) return output;
  const Tensor source = input.to(output.scalar_type()).contiguous();
  ScanParams p{.dtype = dtype_of(output),
               .is_reversed = reverse,
               .input = source.const_data_ptr(),
               .output = output.mutable_data_ptr()};
  set_scan_sizes(p, input.sizes(), dim);
  run(p);
  return output;
}

Tensor cumsum_cpu_kernel(const Tensor& input, int64_t dim, bool reverse) {
  return cumsum_with(input, dim, reverse, scan_cpu);
}

#ifdef WARPWRIGHT_WITH_CUDA
Tensor cumsum_cuda_kernel(const Tensor& input, int64_t dim, bool reverse) {
  const CudaCall call(input);
  return cumsum_with(input, dim, reverse,
                     [&](const ScanParams& p) { scan_cuda(p, input, call.stream); });
}
#endif

// ---- Meta ----

Tensor cumsum_meta(const Tensor& input, int64_t dim, bool) {
  at::maybe_wrap_dim(dim, input.dim());
  if (is_native_alone(input)) return at::cumsum(input, dim);
  return empty_output(input);
}

// ---- Autograd ----

struct CumsumAttributes {
  int64_t dim;
  bool reverse;
};

struct CumsumBackward {
  static constexpr const char* kName = "WarpwrightCumsumBackward";
  using Attributes = CumsumAttributes;
  static variable_list backward(const Attributes& a, const variable_list&,
                                const variable_list& grads, const NeedsGrad& needs) {
    return {needs[0] ? call::cumsum(grads[0], a.dim, !a.reverse) : Tensor()};
  }
};

Tensor cumsum_autograd(const Tensor& input, int64_t dim, bool reverse) {
  auto node = make_node<CumsumBackward>({dim, reverse}, input);
  Tensor output = below_autograd([&] { return call::cumsum(input, dim, reverse); });
  if (node) set_history(output, node);
  if (has_tangent(input)) set_tangent(output, call::cumsum(tangent(input), dim, reverse));
  return output;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def("cumsum(Tensor input, int dim, bool reverse=False) -> Tensor",
        {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) { m.impl("cumsum", cumsum_cpu_kernel); }

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) { m.impl("cumsum", cumsum_cuda_kernel); }
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) { m.impl("cumsum", cumsum_meta); }

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) { m.impl("cumsum", cumsum_autograd); }

}  // namespace warpwright
