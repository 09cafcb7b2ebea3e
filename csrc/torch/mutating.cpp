// Kernels below Autograd for every op that writes into an argument: version counters in inference
// mode, and arguments with the negative bit. PyTorch's own fallbacks support only ops that return
// their single mutable argument. The written arguments are found in the schemas: `Tensor(a!)`.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include <utility>
#include <vector>

namespace warpwright {
namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using torch::jit::Stack;

constexpr const char* kMutating[] = {
    "relu_",
    "batch_norm_update",
    "batch_norm_relu_update",
    "batch_norm_activation_update",
    "batch_norm_relu_max_pool2d_update",
    "conv2d_batch_norm_update",
    "conv2d_batch_norm_relu_max_pool2d_update",
    "cross_entropy_scale_",
    "cross_entropy_backward_",
    "sgd_step_",
    "adam_step_",
    "grad_norm",
    "kv_cache_append_",
    "embedding_renorm_",
};

// Calls f(tensor, is_written) for every tensor among the arguments, in lists too, and replaces it
// by the result.
template <class F>
void map_tensors(const c10::OperatorHandle& op, Stack& stack, F&& f) {
  const auto& arguments = op.schema().arguments();
  const size_t begin = stack.size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    c10::IValue& value = stack[begin + i];
    const bool is_written = arguments[i].alias_info() && arguments[i].alias_info()->isWrite();
    if (value.isTensor()) {
      if (value.toTensor().defined()) value = f(value.toTensor(), is_written);
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(f(tensor, is_written));
      value = std::move(list);
    }
  }
}

// ---- version counters ----

// Called for ordinary tensors in inference mode, and for inference tensors outside of it, which may
// not be written to. Autograd's kernels skip this kernel and count by themselves.
void count_versions(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  map_tensors(op, *stack, [](const Tensor& tensor, bool is_written) {
    if (is_written) torch::autograd::impl::bump_version(tensor);
    return tensor;
  });
  op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
}

// Native's batch norm accepts running statistics that are inference tensors.
void count_versions_of_statistics(const c10::OperatorHandle& op, DispatchKeySet keys,
                                  Stack* stack) {
  map_tensors(op, *stack, [](const Tensor& tensor, bool is_written) {
    if (is_written && !tensor.is_inference()) torch::autograd::impl::bump_version(tensor);
    return tensor;
  });
  op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
}

// ---- the negative bit ----

// Kernels ignore the negative bit. The op therefore runs on copies, and written copies are copied
// back.
void without_negative_bit(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  std::vector<std::pair<Tensor, Tensor>> written;  // the argument, its copy
  map_tensors(op, *stack, [&](const Tensor& tensor, bool is_written) {
    if (!tensor.is_neg()) return tensor;
    const Tensor copy = tensor.clone();
    if (is_written) written.emplace_back(tensor, copy);
    return copy;
  });
  const DispatchKeySet below(DispatchKeySet::FULL_AFTER, DispatchKey::Negative);
  op.redispatchBoxed(keys & below, stack);
  for (const auto& [argument, copy] : written) {
    argument.copy_(copy);
    for (c10::IValue& result : *stack) {
      if (result.isTensor() && result.toTensor().is_same(copy)) result = argument;
    }
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(warpwright, ADInplaceOrView, m) {
  for (const std::string name : kMutating) {
    const bool statistics = name.ends_with("_update");
    m.impl(name.c_str(),
           statistics ? torch::CppFunction::makeFromBoxedFunction<&count_versions_of_statistics>()
                      : torch::CppFunction::makeFromBoxedFunction<&count_versions>());
  }
}

TORCH_LIBRARY_IMPL(warpwright, Negative, m) {
  for (const char* name : kMutating) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&without_negative_bit>());
  }
}

}  // namespace warpwright
