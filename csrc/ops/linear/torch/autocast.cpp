// Casts of operands under autocast, and which calls may differentiate past them.
#include "ops/linear/torch/autocast.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/empty_like.h>

#include <array>

#include "ops/linear/cast.h"
#include "torch/cast_node.h"
#include "torch/direct_gradient.h"
#include "torch/weight_copies.h"

namespace warpwright {

namespace {

// ---- the cast ----

Tensor cast_below_autograd(const Tensor& x, at::ScalarType type) {
  check_has_storage(x, "linear: input");
  Tensor result = at::empty_like(x, x.options().dtype(type));
#ifdef WARPWRIGHT_WITH_CUDA
  if (x.is_cuda()) {
    const CudaCall call(x);
    launch_cast({dtype_of(result), x.numel(), x.const_data_ptr(), result.mutable_data_ptr()},
                call.stream);
    return result;
  }
#endif
  return result.copy_(x);
}

Tensor cast(const Tensor& x, at::ScalarType type) {
  return differentiable_cast(x, [&] { return cast_below_autograd(x, type); });
}

// ---- casts that products share ----

// The stream that computes a cast, and the CUDA graph that captures it (0: none). A result is
// ordered before later work of the same stream and graph only.
struct Place {
  int64_t stream = 0;
  unsigned long long capture = 0;

  bool operator==(const Place&) const = default;
};

Place current_place([[maybe_unused]] const Tensor& x) {
  Place place;
#ifdef WARPWRIGHT_WITH_CUDA
  if (!x.is_cuda()) return place;
  const auto stream = c10::cuda::getCurrentCUDAStream(x.device().index());
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long capture = 0;
  cuda_check(cudaStreamGetCaptureInfo(stream.stream(), &status, &capture), "capture status");
  place.stream = stream.id();
  if (status != cudaStreamCaptureStatusNone) place.capture = capture;
#endif
  return place;
}

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

// Keeps nothing alive: a result is found while a node has saved it. An entry is valid for the same
// tensor over the same storage at the same version.
class SharedCasts {
 public:
  Tensor find(const Tensor& x, at::ScalarType type, const Place& place) const {
    for (const auto& e : entries_) {
      if (!e || e->source._unsafe_get_target() != x.unsafeGetTensorImpl() ||
          e->storage._unsafe_get_target() != x.storage().unsafeGetStorageImpl() ||
          e->version != x._version() || e->place != place) {
        continue;
      }
      auto impl = e->result.lock();
      if (!impl) continue;
      const Tensor result{std::move(impl)};
      if (result.scalar_type() == type && result._version() == 0 && result.sizes() == x.sizes() &&
          result.strides() == x.strides()) {
        return result;
      }
    }
    return {};
  }

  void insert(const Tensor& x, const Tensor& result, const Place& place) {
    entries_[next_].emplace(WeakTensor(x.getIntrusivePtr()), x.storage().getWeakStorageImpl(),
                            WeakTensor(result.getIntrusivePtr()), x._version(), place);
    next_ = (next_ + 1) % entries_.size();
  }

 private:
  struct Entry {
    WeakTensor source;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    WeakTensor result;
    int64_t version;
    Place place;
  };
  std::array<std::optional<Entry>, 4> entries_;
  size_t next_ = 0;
};

// ---- which calls ----

// Autocast's cache, which lives as long as its context, has the parameters.
bool is_parameter(const Tensor& x) { return x.is_leaf() && x.requires_grad(); }

Tensor cast_input(at::ScalarType type, const Tensor& x, c10::DeviceType device) {
  if (x.scalar_type() != at::kFloat || x.device().type() != device || !is_plain(x) ||
      is_parameter(x) || !x.is_non_overlapping_and_dense()) {
    return at::autocast::cached_cast(type, x, device);
  }
  // Results of other ops only: a program may refill its own tensors through .data, which no version
  // counts.
  const bool shares =
      needs_gradient(x) && !x.is_leaf() && at::autocast::is_autocast_cache_enabled();
  if (!shares) return cast(x, type);
  thread_local SharedCasts casts;
  const Place place = current_place(x);
  Tensor result = casts.find(x, type, place);
  if (!result.defined()) {
    result = cast(x, type);
    casts.insert(x, result, place);
  }
  return result;
}

}  // namespace

AutocastOperands::AutocastOperands(c10::DeviceType device, const Tensor& input_,
                                   const Tensor& weight_, const OptionalTensor& bias_)
    : no_autocast(at::autocast::get_autocast_dispatch_key_from_device_type(device)) {
  const at::ScalarType type = at::autocast::get_autocast_dtype(device);
  input = is_16bit(type) ? cast_input(type, input_, device)
                         : at::autocast::cached_cast(type, input_, device);
  source = is_traced(input_) ? input : input_;
  weight = cast_weight(type, weight_, device);
  if (bias_) bias = cast_weight(type, *bias_, device);
  const Tensor old_bias = value_or_undefined(bias_), new_bias = value_or_undefined(bias);
  direct = is_16bit(type) &&
           (wants_gradient_of_cast(source, input) || wants_gradient_of_cast(weight_, weight) ||
            wants_gradient_of_cast(old_bias, new_bias)) &&
           may_be_direct(source, input, type) && may_be_direct(weight_, weight, type) &&
           may_be_direct(old_bias, new_bias, type) && is_plain_linear(input, weight, bias);
}

}  // namespace warpwright
