// linear_scan on every dispatch key: h_t = gate_t h_{t-1} + input_t. The gradient by input is the
// scan in the other direction, in which each step has the gate of the step before it: `shifted`.
// The gradient of that is the plain scan again, so one operator has all derivatives. Gates may be
// given by levels, gate_t = exp(level_t - level_{t-1}): the gradient of that scan has the negative
// levels, the other way.
#include <ATen/TensorOperators.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>

#include "ops/scan/scan.h"
#include "ops/scan/torch/common.h"
#include "torch/autograd.h"
#include "torch/check_argument.h"
#include "torch/dispatch.h"

namespace warpwright {
namespace {

struct LinearScanAttributes {
  int64_t dim;
  bool reverse, shifted, levels;
};

// ---- output shape and checks ----

// Returns the wrapped dimension.
int64_t check_linear_scan(const Tensor& gate, const Tensor& input, const Tensor& initial,
                          int64_t dim, bool shifted, bool levels) {
  TORCH_CHECK_NOT_IMPLEMENTED(is_floating(input.scalar_type()),
                              "linear_scan: input: expected a real floating-point tensor, got ",
                              input.scalar_type());
  TORCH_CHECK(input.dim() > 0, "linear_scan: input: expected at least one dimension, got a number");
  check_argument(gate, "linear_scan: gate", input.sym_sizes(), input.scalar_type(), input);
  dim = at::maybe_wrap_dim(dim, input.dim());
  if (initial.defined()) {
    TORCH_CHECK(!shifted,
                "linear_scan: initial: expected None, because shifted gates have none "
                "for the first step");
    TORCH_CHECK(!levels,
                "linear_scan: initial: expected None, because no level is before the first step's");
    c10::SymDimVector sizes(input.sym_sizes());
    sizes.erase(sizes.begin() + dim);
    check_argument(initial, "linear_scan: initial", sizes, input.scalar_type(), input);
  }
  TORCH_CHECK(!(shifted && levels),
              "linear_scan: shifted: expected False, because levels are not shifted");
  return dim;
}

Tensor empty_states(const Tensor& input) {
  return at::empty_symint(input.sym_sizes(), input.options());
}

// ---- CPU and CUDA ----

template <class Run>
Tensor linear_scan_with(const Tensor& gate, const Tensor& input,
                        const OptionalTensor& optional_initial, int64_t dim, bool reverse,
                        bool shifted, bool levels, Run&& run) {
  const Tensor initial = value_or_undefined(optional_initial);
  dim = check_linear_scan(gate, input, initial, dim, shifted, levels);
  check_has_storage(gate, "linear_scan: gate");
  check_has_storage(input, "linear_scan: input");
  check_has_storage(initial, "linear_scan: initial");
  Tensor output = empty_states(input);
  if (output.numel() == 0) return output;
  const Tensor a = gate.contiguous(), b = input.contiguous();
  const Tensor state = initial.defined() ? initial.contiguous() : Tensor();
  ScanParams p{.dtype = dtype_of(input),
               .is_reversed = reverse,
               .input = b.const_data_ptr(),
               .output = output.mutable_data_ptr(),
               .gate = a.const_data_ptr(),
               .initial = state.defined() ? state.const_data_ptr() : nullptr,
               .is_shifted = shifted,
               .is_levels = levels};
  set_scan_sizes(p, input.sizes(), dim);
  run(p);
  return output;
}

Tensor linear_scan_cpu_kernel(const Tensor& gate, const Tensor& input,
                              const OptionalTensor& initial, int64_t dim, bool reverse,
                              bool shifted, bool levels) {
  return linear_scan_with(gate, input, initial, dim, reverse, shifted, levels, scan_cpu);
}

#ifdef WARPWRIGHT_WITH_CUDA
Tensor linear_scan_cuda_kernel(const Tensor& gate, const Tensor& input,
                               const OptionalTensor& initial, int64_t dim, bool reverse,
                               bool shifted, bool levels) {
  const CudaCall call(input);
  return linear_scan_with(gate, input, initial, dim, reverse, shifted, levels,
                          [&](const ScanParams& p) { scan_cuda(p, input, call.stream); });
}
#endif

// ---- Meta ----

Tensor linear_scan_meta(const Tensor& gate, const Tensor& input, const OptionalTensor& initial,
                        int64_t dim, bool, bool shifted, bool levels) {
  check_linear_scan(gate, input, value_or_undefined(initial), dim, shifted, levels);
  return empty_states(input);
}

// ---- Autograd ----

Tensor first_step(const Tensor& steps, int64_t dim, bool reverse) {
  return steps.select_symint(dim, reverse ? steps.sym_size(dim) - 1 : c10::SymInt(0));
}

// The gradients of a scan by levels: d h_t / d input_s = exp(level_t - level_s), and each level
// counts as t where its own output is, and as s where its own input is.
variable_list level_gradients(const LinearScanAttributes& a, const variable_list& saved,
                              const Tensor& grad_output, const NeedsGrad& needs) {
  const Tensor &level = saved[0], &input = saved[1], &output = saved[2];
  const Tensor grad = call::level_scan(-level, grad_output, a.dim, !a.reverse);
  variable_list results(3);
  if (needs[0]) results[0] = grad_output * output - grad * input;
  if (needs[1]) results[1] = grad;
  return results;
}

struct LinearScanBackward {  // saved: gate, initial (with levels: input), output
  static constexpr const char* kName = "WarpwrightLinearScanBackward";
  using Attributes = LinearScanAttributes;
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    if (a.levels) return level_gradients(a, saved, grads[0], needs);
    const auto& [dim, reverse, shifted, levels] = a;
    const Tensor &gate = saved[0], &initial = saved[1], &output = saved[2];
    const Tensor grad = call::linear_scan(gate, grads[0], std::nullopt, dim, !reverse, !shifted);
    variable_list results(3);
    if (needs[0] && grad.sym_numel() == 0) {
      results[0] = at::zeros_like(gate);
    } else if (needs[0] && shifted) {  // each gate was the next step's
      results[0] = before_steps(grad, Tensor(), dim, !reverse) * output;
    } else if (needs[0]) {
      results[0] = grad * before_steps(output, initial, dim, reverse);
    }
    if (needs[1]) results[1] = grad;
    if (needs[2] && grad.sym_size(dim) == 0) {
      results[2] = at::zeros_like(initial);
    } else if (needs[2]) {
      results[2] = first_step(grad, dim, reverse) * first_step(gate, dim, reverse);
    }
    return results;
  }
};

// The tangent is the same recurrence, to which the tangents of gate and input add.
Tensor linear_scan_tangent(const Tensor& gate, const Tensor& input, const Tensor& initial,
                           const Tensor& output, const LinearScanAttributes& a) {
  Tensor added = has_tangent(input) ? tangent(input) : Tensor();
  if (a.levels) {  // level_t adds to what leaves step t, and takes from what enters there
    if (has_tangent(gate)) added = sum_of(added, -tangent(gate) * primal(input));
    const Tensor moved = call::level_scan(primal(gate), added, a.dim, a.reverse);
    return has_tangent(gate) ? moved + tangent(gate) * output : moved;
  }
  if (has_tangent(gate) && output.sym_numel() != 0) {
    const Tensor gates =
        a.shifted ? before_steps(tangent(gate), Tensor(), a.dim, a.reverse) : tangent(gate);
    const Tensor before = before_steps(output, primal(initial), a.dim, a.reverse);
    added = sum_of(added, gates * before);
  }
  if (!added.defined()) added = at::zeros_like(output);
  const Tensor state = has_tangent(initial) ? tangent(initial) : Tensor();
  return call::linear_scan(primal(gate), added, optional_if_defined(state), a.dim, a.reverse,
                           a.shifted);
}

Tensor linear_scan_autograd(const Tensor& gate, const Tensor& input,
                            const OptionalTensor& optional_initial, int64_t dim, bool reverse,
                            bool shifted, bool levels) {
  const Tensor initial = value_or_undefined(optional_initial);
  const int64_t wrapped = check_linear_scan(gate, input, initial, dim, shifted, levels);
  const LinearScanAttributes attributes{wrapped, reverse, shifted, levels};
  auto node = make_node<LinearScanBackward>(attributes, gate, input, initial);
  Tensor output = below_autograd([&] {
    return call::linear_scan(gate, input, optional_initial, wrapped, reverse, shifted, levels);
  });
  if (node) {
    node->save(gate);
    node->save(levels ? input : initial);
    set_history(output, node);
  }
  if (any_tangent(gate, input, initial)) {
    const Tensor moved = linear_scan_tangent(gate, input, initial, output, attributes);
    set_tangent(output, tangent_with_zero_terms(moved, gate, input, initial));
  }
  if (node) node->save_output(output);  // with its tangent
  return output;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def(
      "linear_scan(Tensor gate, Tensor input, Tensor? initial, int dim, bool reverse=False, "
      "bool shifted=False, bool levels=False) -> Tensor",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) { m.impl("linear_scan", linear_scan_cpu_kernel); }

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) { m.impl("linear_scan", linear_scan_cuda_kernel); }
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) { m.impl("linear_scan", linear_scan_meta); }

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) { m.impl("linear_scan", linear_scan_autograd); }

}  // namespace warpwright
