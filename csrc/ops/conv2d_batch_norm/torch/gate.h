// The gate between two nodes of conv2d_batch_norm (gated_dgrad.h). The second node reads what the
// first one returned, relu(batch norm(convolved) + residual). In a backward pass the second node
// computes the first one's gradient. If nobody else sees it, it gates that gradient and sums it for
// the batch norm, and leaves both here. The first node takes them if the gradient that it gets is
// the same tensor. If autograd has added another gradient to it, the first node gates the sum and
// computes its own sums: to gate twice changes nothing.
#pragma once

#include <ATen/SavedTensorHooks.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/graph_task.h>

#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "ops/conv2d_batch_norm/torch/backward.h"
#include "torch/autograd.h"
#include "torch/plain.h"
#include "torch/traced.h"

namespace warpwright::conv_norm {

class NormGate {
 public:
  // `values`: what the second node needs of the first one. None of them has a gradient function.
  explicit NormGate(GateValues values) : values_(std::move(values)) {}

  std::optional<GateValues> values() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return values_;
  }
  void leave(const Tensor& gated, const Tensor& sums) {
    std::lock_guard<std::mutex> lock(mutex_);
    left_ = {gated, sums};
    stream_ = stream_of(gated);
  }
  // The sums, if `gradient` is what the second node left. Only once.
  Tensor take(const Tensor& gradient) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto [gated, sums] = std::exchange(left_, {});
    const bool same = gradient.defined() && gated.is_same(gradient);
    return same && stream_of(gradient) == stream_ ? sums : Tensor();
  }
  // At the end of the first node's backward pass, as its other saved tensors.
  void release() {
    std::lock_guard<std::mutex> lock(mutex_);
    values_.reset();
  }

 private:
  static std::optional<c10::Stream> stream_of(const Tensor& tensor) {
    if (!is_plain(tensor)) return std::nullopt;  // traced
    return c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device());
  }

  mutable std::mutex mutex_;
  std::optional<GateValues> values_;
  std::pair<Tensor, Tensor> left_;
  std::optional<c10::Stream> stream_;
};

// Null if the node may not hand out its tensors: somebody else keeps what autograd saves, or
// watches the tensors.
inline std::shared_ptr<NormGate> make_gate(const Tensor& convolved, const Tensor& mean,
                                           const Tensor& mask) {
  const bool is_usable = (is_plain(convolved) && is_plain(mask)) || is_traced(convolved);
  if (!is_usable || !convolved.is_cuda()) return nullptr;
  if (mask.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) return nullptr;
  if (mask.numel() == 0 || at::SavedTensorDefaultHooks::get_hooks()) return nullptr;
  return std::make_shared<NormGate>(
      GateValues{convolved.tensor_data(), mean.tensor_data(), mask.tensor_data()});
}

// Whether only the two nodes see the gradient that the running node `reader` passes to `writer`, as
// the gradient of its first output.
inline bool is_unseen(const torch::autograd::Node& reader, torch::autograd::Node& writer,
                      bool traced) {
  // A trace's nodes have hooks that note where in the program they are, and no other ones.
  if (!traced && (!reader.post_hooks().empty() || !writer.pre_hooks().empty())) return false;
  if (!writer.tensor_pre_hooks().empty() || !writer.retains_grad_hooks().empty()) return false;
  const auto* tasks = torch::autograd::get_current_graph_task_exec_info();
  if (tasks == nullptr) return true;
  const auto task = tasks->find(&writer);
  return task == tasks->end() || !task->second.captures_ || task->second.captures_->empty();
}

}  // namespace warpwright::conv_norm
