// Nodes that take the gradient of a shortcut along. A residual block reads x twice: in its first
// layer, and in the shortcut around it. Autograd would add the two gradients of x by a kernel of
// its own. A node with one more output, which is x itself, gets the shortcut's gradient too and
// hands on the sum. conv2d_join_skip adds that output to a node that exists.
#pragma once

#include <torch/csrc/autograd/variable.h>

#include <cstdint>

namespace warpwright {

// A kind of these nodes. Its first input is x.
struct SkipNode {
  const char* name;
  uint32_t outputs;  // its own; the skip comes after them

  // The shortcut's gradient among the node's; undefined without a skip.
  at::Tensor gradient(const torch::autograd::variable_list& grads) const {
    return grads.size() > outputs ? grads[outputs] : at::Tensor();
  }
};

constexpr SkipNode kConv2dNode{"WarpwrightConv2dBackward", 1};
constexpr SkipNode kConv2dBatchNormNode{"WarpwrightConv2DBatchNormBackward", 2};
constexpr SkipNode kSkipNodes[] = {kConv2dNode, kConv2dBatchNormNode};

}  // namespace warpwright
