// torch.vmap over the ops that write into running statistics: one call per sample, on views of the
// batched tensors. PyTorch's own loop takes only ops that write into and return their first
// argument.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/functorch/BatchedTensorImpl.h>
#include <ATen/ops/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <vector>

namespace warpwright {
namespace {

using at::Tensor;
using torch::jit::Stack;

void sample_by_sample(const c10::OperatorHandle& op, Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::FuncTorchBatched);
  const auto& arguments = op.schema().arguments();
  Stack values = torch::jit::pop(*stack, arguments.size());

  // The innermost vmap among the arguments.
  int64_t level = 0, samples = 0;
  std::vector<const at::functorch::BatchedTensorImpl*> batched(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    if (!values[i].isTensor() || !values[i].toTensor().defined()) continue;
    batched[i] = at::functorch::maybeGetBatchedImpl(values[i].toTensor());
    if (batched[i] != nullptr) level = std::max(level, batched[i]->level());
  }
  std::vector<std::optional<int64_t>> dims(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    if (batched[i] == nullptr || batched[i]->level() != level) continue;
    dims[i] = batched[i]->bdim();
    const Tensor all = batched[i]->value();
    samples = all.size(*dims[i]);
    values[i] = all;
  }
  for (size_t i = 0; i < values.size(); ++i) {
    const bool is_written = arguments[i].alias_info() && arguments[i].alias_info()->isWrite();
    TORCH_CHECK(!is_written || dims[i].has_value(), op.schema().operator_name(),
                ": Batch norm got a batched tensor as input while ", arguments[i].name(),
                ", which will be updated in place, was not batched. Expected a batched tensor, or "
                "evaluation mode");
  }
  TORCH_CHECK(samples > 0, op.schema().operator_name(), ": expected at least one sample");

  std::vector<std::vector<Tensor>> results(op.schema().returns().size());
  for (int64_t sample = 0; sample < samples; ++sample) {
    Stack call = values;
    for (size_t i = 0; i < call.size(); ++i) {
      if (dims[i].has_value()) call[i] = values[i].toTensor().select(*dims[i], sample);
    }
    op.callBoxed(&call);
    for (size_t r = 0; r < results.size(); ++r) results[r].push_back(call[r].toTensor());
  }
  for (const auto& of_samples : results) {
    torch::jit::push(*stack, at::functorch::makeBatched(at::stack(of_samples), 0, level));
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(warpwright, FuncTorchBatched, m) {
  for (const char* name :
       {"batch_norm_update", "batch_norm_relu_update", "batch_norm_activation_update",
        "batch_norm_relu_max_pool2d_update", "conv2d_batch_norm_update",
        "conv2d_batch_norm_relu_max_pool2d_update"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&sample_by_sample>());
  }
}

}  // namespace warpwright
