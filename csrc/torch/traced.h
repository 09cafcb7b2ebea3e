// Which tensors torch.compile traces.
#pragma once

#include <c10/core/impl/TorchDispatchModeTLS.h>

#include "torch/autograd.h"
#include "torch/plain.h"

namespace warpwright {

// A tensor of a trace that torch.compile makes: Dynamo's, of fake tensors, or AOTAutograd's. Our
// autograd nodes run in it as in an eager pass. The operators that they call make up the backward.
inline bool is_traced(const Tensor& x) {
  using c10::DispatchKey;
  using c10::impl::TorchDispatchModeKey;
  using c10::impl::TorchDispatchModeTLS;
  static constexpr c10::DispatchKeySet kTransforms({DispatchKey::FuncTorchBatched,
                                                    DispatchKey::FuncTorchGradWrapper,
                                                    DispatchKey::Functionalize});
  const bool has_mode =
      TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::FAKE).has_value() ||
      TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::FUNCTIONAL).has_value();
  return has_mode && x.key_set().has(DispatchKey::Python) && !x.key_set().has_any(kTransforms) &&
         !has_tangent(x);
}

// What a node of ours may lead to.
inline bool is_plain_or_traced(const Tensor& x) { return is_plain(x) || is_traced(x); }

}  // namespace warpwright
