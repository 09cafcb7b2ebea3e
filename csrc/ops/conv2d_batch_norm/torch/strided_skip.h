// Shortcuts that begin with a strided 1x1 convolution and its batch norm. The convolution reads the
// pixels of x at multiples of its strides alone. A gradient of every pixel would hold three
// quarters of zeros at strides of 2. So the shortcut's node computes the gradient of those pixels
// alone. It leaves it at the node whose skip it reads (torch/skip.h), and gives autograd zeros
// without memory. The other node runs later in the same backward pass. It adds the pixels to its
// own gradient of x.
#pragma once

#include <ATen/ops/_efficientzerotensor.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <optional>
#include <utility>

#include "ops/conv2d/torch/common.h"
#include "torch/plain.h"

namespace warpwright::conv_norm {

using Strides = std::array<int64_t, 2>;  // (h, w)

// Whether it is a 1x1 convolution without padding or groups, of tensors in memory.
inline bool is_1x1_in_memory(const Tensor& input, const Tensor& weight, const Conv2dGeometry& g) {
  if (!is_plain(input) || !is_plain(weight) || weight.size(2) != 1 || weight.size(3) != 1) {
    return false;
  }
  auto is_zero = [](const SymInt& size) { return size == 0; };
  return std::all_of(g.padding.begin(), g.padding.end(), is_zero) && g.groups == 1;
}

inline Strides strides_of(const Conv2dGeometry& g) {
  return {g.stride.front().expect_int(), g.stride.back().expect_int()};
}

// A tensor with the shape and layout that these pixels have as rows of channels. Only dgrad takes
// it, which reads no values of the input.
inline Tensor rows_like_pixels_of(const Tensor& image, Strides strides) {
  const int64_t c = image.size(1), h = ceil_div(image.size(2), strides[0]);
  const int64_t w = ceil_div(image.size(3), strides[1]);
  return image.as_strided({image.size(0), c, h, w}, {h * w * c, 1, w * c, c});
}

// A view of the pixels at multiples of the strides.
inline Tensor pixels_of(const Tensor& image, Strides strides) {
  return image.slice(2, 0, std::nullopt, strides[0]).slice(3, 0, std::nullopt, strides[1]);
}

// An image like `image` with these pixels there, and zeros elsewhere.
inline Tensor with_zeros_between(const Tensor& pixels, Strides strides, const Tensor& image) {
  Tensor whole = at::zeros_like(image);
  pixels_of(whole, strides).copy_(pixels);
  return whole;
}

// What autograd gets in place of the gradient that was left: any gradient can be added to it.
inline Tensor zeros_without_memory(const Tensor& image) {
  return at::_efficientzerotensor(image.sizes(), image.options());
}

// Where the gradients are left, one per node.
class SkipPixels {
 public:
  struct Gradient {
    Tensor pixels;
    Strides strides;
  };

  // False if another gradient is there: of another backward pass, or of another shortcut.
  bool leave(const Tensor& pixels, Strides strides) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (left_) return false;
    left_ = {pixels, strides};
    task_ = torch::autograd::get_current_graph_task_id();
    return true;
  }
  // What was left in the running backward pass. A pass that broke off may have left another one.
  std::optional<Gradient> take() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (task_ != torch::autograd::get_current_graph_task_id()) return std::nullopt;
    return std::exchange(left_, std::nullopt);
  }

 private:
  std::mutex mutex_;
  std::optional<Gradient> left_;
  int task_ = -1;
};

}  // namespace warpwright::conv_norm
