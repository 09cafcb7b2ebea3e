// relu, relu_ and relu_backward on every dispatch key.
#include <ATen/FunctionalTensorWrapper.h>
#include <ATen/functorch/BatchedTensorImpl.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>

#include "ops/relu/relu.h"
#include "torch/autograd.h"
#include "torch/check_argument.h"
#include "torch/dense.h"
#include "torch/dispatch.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include "torch/cuda.h"
#endif

namespace warpwright {
namespace {

// The ops through the dispatcher. Calls are qualified, because ADL would also find at::relu.
namespace call {

Tensor relu(const Tensor& input) {
  static const auto op = find_op<Tensor(const Tensor&)>("warpwright::relu");
  return op.call(input);
}

Tensor& relu_(Tensor& input) {
  static const auto op = find_op<Tensor&(Tensor&)>("warpwright::relu_");
  return op.call(input);
}

Tensor relu_backward(const Tensor& grad_output, const Tensor& output) {
  static const auto op = find_op<Tensor(const Tensor&, const Tensor&)>("warpwright::relu_backward");
  return op.call(grad_output, output);
}

}  // namespace call

// ---- output shape and checks ----

// Every key agrees on strides through this: dense inputs keep theirs, others become dense in the
// same dimension order (ATen's preserve_format, which is what native relu returns).
Tensor empty_output(const Tensor& input) { return at::empty_like(input); }

void check_relu(const Tensor& input) {
  TORCH_CHECK(input.scalar_type() != at::kBool, "Boolean inputs not supported for relu");
  TORCH_CHECK_NOT_IMPLEMENTED(find_dtype(input.scalar_type()).has_value(),
                              "relu: input: expected a real floating-point or integer tensor, got ",
                              input.scalar_type());
}

void check_relu_backward(const Tensor& grad_output, const Tensor& output) {
  check_argument(grad_output, "relu_backward: grad_output", output.sym_sizes(),
                 output.scalar_type(), output);
  check_relu(output);
}

// ---- CPU and CUDA ----

template <class Run>
Tensor relu_with(const Tensor& input, Run&& run) {
  check_relu(input);
  check_has_storage(input, "relu: input");
  Tensor output = empty_output(input);
  const Tensor source = in_order_of(input, output);
  run(ReluParams{dtype_of(input), input.numel(), source.const_data_ptr(),
                 output.mutable_data_ptr()});
  return output;
}

template <class Run>
Tensor& relu_inplace_with(Tensor& input, Run&& run) {
  check_relu(input);
  check_has_storage(input, "relu_: input");
  if (!input.is_non_overlapping_and_dense()) return input.copy_(call::relu(input));
  run(ReluParams{dtype_of(input), input.numel(), input.const_data_ptr(), input.mutable_data_ptr()});
  return input;
}

template <class Run>
Tensor relu_backward_with(const Tensor& grad_output, const Tensor& output, Run&& run) {
  check_relu_backward(grad_output, output);
  check_has_storage(grad_output, "relu_backward: grad_output");
  check_has_storage(output, "relu_backward: output");
  Tensor grad_input = empty_output(output);
  const Tensor dy = in_order_of(grad_output, grad_input);
  const Tensor y = in_order_of(output, grad_input);
  run(ReluBackwardParams{dtype_of(output), output.numel(), dy.const_data_ptr(), y.const_data_ptr(),
                         grad_input.mutable_data_ptr()});
  return grad_input;
}

Tensor relu_cpu_kernel(const Tensor& input) { return relu_with(input, relu_cpu); }
Tensor& relu_inplace_cpu_kernel(Tensor& input) { return relu_inplace_with(input, relu_cpu); }
Tensor relu_backward_cpu_kernel(const Tensor& grad_output, const Tensor& output) {
  return relu_backward_with(grad_output, output, relu_backward_cpu);
}

#ifdef WARPWRIGHT_WITH_CUDA
Tensor relu_cuda_kernel(const Tensor& input) {
  const CudaCall call(input);
  return relu_with(input,
                   [&](const ReluParams& p) { launch_relu(p, choose_relu(p), call.stream); });
}
Tensor& relu_inplace_cuda_kernel(Tensor& input) {
  const CudaCall call(input);
  return relu_inplace_with(
      input, [&](const ReluParams& p) { launch_relu(p, choose_relu(p), call.stream); });
}
Tensor relu_backward_cuda_kernel(const Tensor& grad_output, const Tensor& output) {
  const CudaCall call(output);
  return relu_backward_with(grad_output, output, [&](const ReluBackwardParams& p) {
    launch_relu_backward(p, choose_relu_backward(p), call.stream);
  });
}
#endif

// ---- Meta ----

Tensor relu_meta(const Tensor& input) {
  check_relu(input);
  return empty_output(input);
}
Tensor& relu_inplace_meta(Tensor& input) {
  check_relu(input);
  return input;
}
Tensor relu_backward_meta(const Tensor& grad_output, const Tensor& output) {
  check_relu_backward(grad_output, output);
  return empty_output(output);
}

// ---- vmap ----

// Elementwise, so one call serves all samples.
Tensor relu_batched(const Tensor& input) {
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::FuncTorchBatched);
  const auto* batched = at::functorch::maybeGetBatchedImpl(input);
  if (batched == nullptr) return call::relu(input);
  return at::functorch::makeBatched(call::relu(batched->value()), batched->bdim(),
                                    batched->level());
}
Tensor& relu_inplace_batched(Tensor& input) {
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::FuncTorchBatched);
  const auto* batched = at::functorch::maybeGetBatchedImpl(input);
  if (batched == nullptr) return call::relu_(input);
  Tensor samples = batched->value();
  call::relu_(samples);
  return input;
}

// ---- Functionalize ----

// As the code that PyTorch generates for its own in-place ops: relu, whose result takes the place
// of the value.
Tensor& relu_inplace_functionalize(Tensor& input) {
  namespace functional = at::functionalization::impl;
  const bool is_functional = functional::isFunctionalTensor(input);
  const at::AutoDispatchSkipFunctionalize guard;
  if (!is_functional) return call::relu_(input);
  functional::sync(input);
  functional::replace_(input, call::relu(functional::from_functional_tensor(input)));
  functional::commit_update(input);
  functional::sync(input);
  return input;
}

// ---- Autograd ----

struct ReluBackward {
  static constexpr const char* kName = "WarpwrightReluBackward";
  struct Attributes {};
  static variable_list backward(const Attributes&, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    return {needs[0] ? call::relu_backward(grads[0], saved[0]) : Tensor()};
  }
};

// relu_backward is linear in grad_output and constant in output almost everywhere. The zero for
// output leads on to the tensors that output comes from, as in native.
struct ReluBackwardBackward {
  static constexpr const char* kName = "WarpwrightReluBackwardBackward";
  struct Attributes {};
  static variable_list backward(const Attributes&, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    return {needs[0] ? call::relu_backward(grads[0], saved[0]) : Tensor(),
            needs[1] ? at::zeros_like(saved[0]) : Tensor()};
  }
};

Tensor relu_autograd(const Tensor& input) {
  auto node = make_node<ReluBackward>({}, input);
  Tensor output = below_autograd([&] { return call::relu(input); });
  if (node) set_history(output, node);
  if (has_tangent(input)) set_tangent(output, call::relu_backward(tangent(input), primal(output)));
  if (node) node->save_output(output);  // with its tangent
  return output;
}

Tensor& relu_inplace_autograd(Tensor& input) {
  auto node = make_node<ReluBackward>({}, input);
  torch::autograd::check_inplace(input, /*requires_grad=*/static_cast<bool>(node));
  const bool forward_ad = has_tangent(input);
  Tensor input_tangent = forward_ad ? tangent(input) : Tensor();
  below_autograd([&] { call::relu_(input); });
  torch::autograd::impl::bump_version(input);
  if (node) {
    torch::autograd::rebase_history(input, node);
    node->save_inplace_output(input);
  }
  // A tangent that exists already must be changed in place too.
  if (forward_ad) input_tangent.copy_(call::relu_backward(input_tangent, primal(input)));
  return input;
}

Tensor relu_backward_autograd(const Tensor& grad_output, const Tensor& output) {
  auto node = make_node<ReluBackwardBackward>({}, grad_output, output);
  Tensor grad_input = below_autograd([&] { return call::relu_backward(grad_output, output); });
  if (node) {
    node->save(output);
    set_history(grad_input, node);
  }
  if (has_tangent(grad_output)) {
    set_tangent(grad_input, call::relu_backward(tangent(grad_output), primal(output)));
  } else if (has_tangent(output)) {
    set_tangent(grad_input, at::zeros_like(grad_input));
  }
  return grad_input;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def("relu(Tensor input) -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("relu_(Tensor(a!) input) -> Tensor(a!)", {at::Tag::pt2_compliant_tag});
  m.def("relu_backward(Tensor grad_output, Tensor output) -> Tensor", {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) {
  m.impl("relu", relu_cpu_kernel);
  m.impl("relu_", relu_inplace_cpu_kernel);
  m.impl("relu_backward", relu_backward_cpu_kernel);
}

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) {
  m.impl("relu", relu_cuda_kernel);
  m.impl("relu_", relu_inplace_cuda_kernel);
  m.impl("relu_backward", relu_backward_cuda_kernel);
}
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) {
  m.impl("relu", relu_meta);
  m.impl("relu_", relu_inplace_meta);
  m.impl("relu_backward", relu_backward_meta);
}

TORCH_LIBRARY_IMPL(warpwright, FuncTorchBatched, m) {
  m.impl("relu", relu_batched);
  m.impl("relu_", relu_inplace_batched);
}

TORCH_LIBRARY_IMPL(warpwright, Functionalize, m) { m.impl("relu_", relu_inplace_functionalize); }

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) {
  m.impl("relu", relu_autograd);
  m.impl("relu_", relu_inplace_autograd);
  m.impl("relu_backward", relu_backward_autograd);
}

}  // namespace warpwright
