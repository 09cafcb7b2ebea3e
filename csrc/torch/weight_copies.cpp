// The table of weights, their casts and their copies.
#include "torch/weight_copies.h"

#include <ATen/autocast_mode.h>

#include <atomic>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "host/weight_casts.h"
#include "torch/cast_node.h"
#include "torch/check_argument.h"
#include "torch/plain.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include "torch/cuda.h"
#endif

namespace warpwright {
namespace {

using at::Tensor;
using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

// Keeps no memory alive. `copy` is valid for the same storage at the same version.
struct Entry {
  WeakTensor weight;
  at::ScalarType type;  // of the cast
  std::optional<WeakTensor> copy;
  std::optional<WeakStorage> storage;
  int64_t version = 0;

  // Undefined unless the copy is there and has the weight's present values.
  Tensor current(const Tensor& x) const {
    if (!copy || storage->_unsafe_get_target() != x.storage().unsafeGetStorageImpl() ||
        version != x._version()) {
      return {};
    }
    auto impl = copy->lock();
    if (!impl) return {};
    Tensor result{std::move(impl)};
    const bool alike = result.sizes() == x.sizes() && result.strides() == x.strides();
    return alike ? result : Tensor();
  }
};

// A weak pointer keeps the address from being used again, so a key stands for one tensor. Nothing
// under the mutex runs Python or frees a tensor, which would wait for Python's own lock.
struct Table {
  std::mutex mutex;
  std::unordered_map<const c10::TensorImpl*, Entry> entries;
  size_t limit = 1024;

  Entry& at(const Tensor& weight, at::ScalarType type) {
    const auto* key = weight.unsafeGetTensorImpl();
    auto found = entries.find(key);
    if (found != entries.end()) return found->second;
    if (entries.size() >= limit) {  // weights that are gone
      std::erase_if(entries, [](const auto& e) { return e.second.weight.expired(); });
      limit = 2 * entries.size() + 1024;
    }
    return entries.emplace(key, Entry{WeakTensor(weight.getIntrusivePtr()), type, {}, {}})
        .first->second;
  }
};

// Never destroyed: tensors of the interpreter's last moments may still look.
Table& table() {
  static auto* instance = new Table;
  return *instance;
}

std::atomic<bool> records{false};
std::atomic<int64_t> noted{0};
thread_local bool allowed_in_capture = false;

bool is_readable([[maybe_unused]] const Tensor& x) {
#ifdef WARPWRIGHT_WITH_CUDA
  if (x.is_cuda() && !allowed_in_capture) {
    const auto stream = c10::cuda::getCurrentCUDAStream(x.device().index());
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    cuda_check(cudaStreamIsCapturing(stream.stream(), &status), "capture status");
    return status == cudaStreamCaptureStatusNone;
  }
#endif
  return true;
}

// Undefined if there is no copy with the weight's present values. A weight without an entry gets
// one: the cast that follows is noted.
Tensor find_copy(const Tensor& weight, at::ScalarType type) {
  if (!records.load(std::memory_order_relaxed)) return {};
  if (type != at::kBFloat16 && type != at::kHalf) return {};
  if (weight.scalar_type() != at::kFloat || !weight.is_leaf() || !weight.requires_grad() ||
      weight.is_inference() || !is_plain(weight)) {
    return {};
  }
  Table& t = table();
  const std::lock_guard<std::mutex> lock(t.mutex);
  const auto found = t.entries.find(weight.unsafeGetTensorImpl());
  if (found == t.entries.end()) {
    t.at(weight, type);
    noted.fetch_add(1, std::memory_order_relaxed);
    return {};
  }
  if (found->second.type != type || !is_readable(weight)) return {};
  return found->second.current(weight);
}

// The parameter whose rows and columns `weight` exchanges, such as a layer that keeps (inputs,
// outputs) passes it; otherwise `weight`.
Tensor parameter_of(const Tensor& weight) {
  if (weight.dim() != 2 || !weight.is_view() || !is_plain(weight)) return weight;
  const Tensor base(weight._base());
  const bool is_transpose = base.dim() == 2 && base.storage_offset() == weight.storage_offset() &&
                            base.size(0) == weight.size(1) && base.size(1) == weight.size(0) &&
                            base.stride(0) == weight.stride(1) &&
                            base.stride(1) == weight.stride(0);
  return is_transpose ? base : weight;
}

Tensor find_copy_of(const Tensor& weight, at::ScalarType type) {
  const Tensor parameter = parameter_of(weight);
  const Tensor copy = find_copy(parameter, type);
  return copy.defined() && !parameter.is_same(weight) ? copy.t() : copy;
}

}  // namespace

Tensor cast_weight(at::ScalarType type, const Tensor& weight, c10::DeviceType device) {
  const bool is_there = weight.defined() && weight.device().type() == device;
  const Tensor copy = is_there ? find_copy_of(weight, type) : Tensor();
  if (!copy.defined()) return at::autocast::cached_cast(type, weight, device);
  return differentiable_cast(weight, [&] {
    // With the copy's version counter: a backward after the next step finds it overwritten.
    const auto* impl = copy.unsafeGetTensorImpl();
    return Tensor(impl->shallow_copy_and_detach(impl->version_counter(),
                                                /*allow_tensor_metadata_change=*/true));
  });
}

void refresh_weight_copies(at::TensorList weights, at::TensorList copies) {
  if (copies.size() != weights.size()) return;  // none, or what the step refuses
  std::vector<Tensor> current(copies.size());
  {
    Table& t = table();
    const std::lock_guard<std::mutex> lock(t.mutex);
    for (size_t i = 0; i < copies.size(); ++i) {
      const auto found = t.entries.find(weights[i].unsafeGetTensorImpl());
      if (found == t.entries.end() || weights[i].is_inference()) continue;
      current[i] = found->second.current(weights[i]);
    }
  }
  for (size_t i = 0; i < copies.size(); ++i) {
    // The step refuses other sizes.
    const bool is_alike = copies[i].sym_sizes() == weights[i].sym_sizes();
    if (!is_alike || current[i].is_same(copies[i])) continue;
    check_plain_storage(weights[i], "params");
    check_plain_storage(copies[i], "copies");
    Tensor(copies[i]).copy_(weights[i]);
  }
}

void remember_weight_copies(at::TensorList weights, at::TensorList copies) {
  if (copies.empty()) return;
  Table& t = table();
  const std::lock_guard<std::mutex> lock(t.mutex);
  for (size_t i = 0; i < copies.size(); ++i) {
    const Tensor& weight = weights[i];
    if (weight.is_inference()) continue;  // no version counter
    Entry& entry = t.at(weight, copies[i].scalar_type());
    entry.type = copies[i].scalar_type();
    entry.copy.emplace(copies[i].getIntrusivePtr());
    entry.storage.emplace(weight.storage().getWeakStorageImpl());
    entry.version = weight._version();
  }
}

void record_weight_casts() { records.store(true, std::memory_order_relaxed); }

int64_t count_weight_casts() { return noted.load(std::memory_order_relaxed); }

int weight_cast_type(uintptr_t impl) {
  Table& t = table();
  const std::lock_guard<std::mutex> lock(t.mutex);
  const auto found = t.entries.find(reinterpret_cast<const c10::TensorImpl*>(impl));
  return found == t.entries.end() ? -1 : static_cast<int>(found->second.type);
}

bool allow_weight_copies_in_capture(bool allow) { return std::exchange(allowed_in_capture, allow); }

}  // namespace warpwright
