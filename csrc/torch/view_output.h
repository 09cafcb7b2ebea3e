// Views as outputs of our nodes.
#pragma once

#include <torch/csrc/autograd/variable.h>

namespace warpwright {

// A write to this view, or to its base, raises, as for all views that share a node: the node's
// gradient of one output cannot follow it.
inline void forbid_writes(const at::Tensor& view) {
  auto* meta = torch::autograd::impl::get_view_autograd_meta(view);
  if (meta != nullptr && meta->has_bw_view()) {
    meta->set_creation_meta(torch::autograd::CreationMeta::MULTI_OUTPUT_NODE);
  }
}

}  // namespace warpwright
