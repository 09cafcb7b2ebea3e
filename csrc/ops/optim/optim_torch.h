// Shared by the *_torch.cpp of the optimizers: checks, and kernels without their list of arguments.
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <optional>

#include "torch/autograd.h"
#include "torch/checks.h"
#include "torch/dispatch.h"

namespace warpwright {

using at::TensorList;

// Wraps a generic lambda in a function of that signature. The lists of arguments are written once.
template <class Signature>
struct Kernel;
template <class Result, class... Args>
struct Kernel<Result(Args...)> {
  template <auto kBody>
  static Result of(Args... args) {
    return kBody(args...);
  }
};

// ---- checks ----

inline void check_scalar(const char* op, const char* name, const OptionalTensor& tensor,
                         c10::Device device, std::initializer_list<at::ScalarType> types,
                         int64_t numel = 1) {
  if (!tensor.has_value()) return;
  TORCH_CHECK(tensor->sym_numel() == numel, op, ": ", name, ": expected ", numel,
              " element(s), got ", tensor->sym_numel());
  TORCH_CHECK(numel == 1 || tensor->is_contiguous(), op, ": ", name,
              ": expected a contiguous tensor, got strides ", tensor->sym_strides());
  TORCH_CHECK(tensor->device() == device, op, ": ", name, ": expected device ", device, ", got ",
              tensor->device());
  bool found = false;
  for (const at::ScalarType type : types) found |= tensor->scalar_type() == type;
  TORCH_CHECK(found, op, ": ", name, ": expected ", *types.begin(), ", got ",
              tensor->scalar_type());
}

inline void check_counter(const char* op, TensorList counter, c10::Device device, bool needed) {
  TORCH_CHECK(counter.size() <= 1 && (!needed || counter.size() == 1), op, ": counter: expected ",
              needed ? "one tensor" : "at most one tensor", ", got ", counter.size());
  if (counter.empty()) return;
  TORCH_CHECK(counter[0].device() == device && counter[0].scalar_type() == at::kInt &&
                  counter[0].sym_numel() == 1,
              op, ": counter: expected one Int on ", device, ", got ", counter[0].sym_numel(), " ",
              counter[0].scalar_type(), " on ", counter[0].device());
}

inline const Tensor& first_of(const char* op, const char* name, TensorList list) {
  TORCH_CHECK(!list.empty(), op, ": ", name, ": expected at least one tensor");
  return list[0];
}

template <class... Lists>
void check_not_recorded(const char* op, const Lists&... lists) {
  auto check = [&](TensorList list) {
    for (const Tensor& tensor : list) {
      if (at::GradMode::is_enabled()) {
        torch::autograd::check_inplace(tensor, tensor.requires_grad());
      }
      TORCH_CHECK(!is_differentiated(tensor), op,
                  ": expected torch.no_grad(), or tensors that require no gradient: it is not "
                  "differentiable");
    }
  };
  (check(lists), ...);
}

template <class... Lists>
void bump_versions(const Lists&... lists) {
  auto bump = [](TensorList list) {
    for (const Tensor& tensor : list) {
      if (!tensor.is_inference()) torch::autograd::impl::bump_version(tensor);
    }
  };
  (bump(lists), ...);
}

// ---- tensors in the form that the kernels take ----

// `name` is "op: argument".
inline const void* pointer_of(const OptionalTensor& tensor, const char* name) {
  if (!tensor.has_value()) return nullptr;
  check_has_storage(*tensor, name);
  return tensor->const_data_ptr();
}

inline const float* float_pointer(const OptionalTensor& tensor, const char* name) {
  return static_cast<const float*>(pointer_of(tensor, name));
}

inline unsigned* counter_pointer(const Tensor& counter) {
  check_has_storage(counter, "counter");
  return static_cast<unsigned*>(counter.mutable_data_ptr());
}

}  // namespace warpwright
