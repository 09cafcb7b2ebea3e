// Which tensors an op may treat as memory alone.
#pragma once

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/TracerMode.h>
#include <ATen/core/Tensor.h>

#include "torch/autograd.h"

namespace warpwright {

// A tensor in memory that no mode, transform or tracer watches. Those see single ops and their
// nodes.
inline bool is_plain(const Tensor& x) {
  using c10::DispatchKey;
  static constexpr c10::DispatchKeySet kLazy(
      {DispatchKey::Negative, DispatchKey::Conjugate, DispatchKey::ZeroTensor});
  return !at::isTensorSubclassLike(x) && !at::tracer::impl::is_dispatch_enabled() &&
         x.layout() == at::kStrided && !x.is_nested() && (x.is_cuda() || x.is_cpu()) &&
         !x.key_set().has_any(kLazy) && !has_tangent(x);
}
// The same of an argument that may be missing.
inline bool is_plain_or_none(const Tensor& x) { return !x.defined() || is_plain(x); }

}  // namespace warpwright
