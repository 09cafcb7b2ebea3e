// Shared by the files of torch/: stride, padding and dilation in the ops' form and in the kernels',
// and the ops through the dispatcher.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymIntArrayRef.h>

#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include "ops/conv2d/conv2d.h"
#include "torch/autograd.h"
#include "torch/checked_math.h"
#include "torch/dispatch.h"

namespace warpwright {

using c10::SymInt;
using c10::SymIntArrayRef;
using Tensors3 = std::tuple<Tensor, Tensor, Tensor>;
using Conv2dMask = std::array<bool, 3>;  // grad_input, grad_weight, grad_bias

// Arguments after the tensors. `padding` is (h, w), or (top, left, bottom, right) for the uneven
// padding of 'same' with an even kernel.
struct Conv2dGeometry {
  std::vector<SymInt> stride, padding, dilation;
  SymInt groups;
  // Of a backward with 16-bit operands: the gradients of weight and bias are float32.
  bool float32_parameters = false;
};

// Not nested braces in those of a call: if a later initialiser throws, g++ 12 destroys twice what
// nested braces have made.
inline Conv2dGeometry geometry_of(SymIntArrayRef stride, SymIntArrayRef padding,
                                  SymIntArrayRef dilation, SymInt groups,
                                  bool float32_parameters = false) {
  return {stride.vec(), padding.vec(), dilation.vec(), std::move(groups), float32_parameters};
}

// The ops through the dispatcher. Calls are qualified, because ADL would also find at::conv2d.
namespace call {

inline Tensor conv2d(const Tensor& input, const Tensor& weight, const Tensor& bias,
                     const Conv2dGeometry& g) {
  static const auto op =
      find_op<Tensor(const Tensor&, const Tensor&, const OptionalTensor&, SymIntArrayRef,
                     SymIntArrayRef, SymIntArrayRef, SymInt)>("warpwright::conv2d");
  return op.call(input, weight, optional_if_defined(bias), g.stride, g.padding, g.dilation,
                 g.groups);
}

// `addend`: added to the input's gradient, or undefined.
inline Tensors3 conv2d_backward(const Tensor& grad_output, const Tensor& input,
                                const Tensor& weight, const Conv2dGeometry& g, Conv2dMask mask,
                                const Tensor& addend = {}) {
  static const auto op =
      find_op<Tensors3(const Tensor&, const Tensor&, const Tensor&, SymIntArrayRef, SymIntArrayRef,
                       SymIntArrayRef, SymInt, Conv2dMask, const OptionalTensor&, bool)>(
          "warpwright::conv2d_backward");
  return op.call(grad_output, input, weight, g.stride, g.padding, g.dilation, g.groups, mask,
                 optional_if_defined(addend), g.float32_parameters);
}

// The gradients of a node whose input may be a shortcut's too (torch/skip.h). Each of `grad_output`
// and `skip`, the gradient of the shortcut, may be undefined.
inline Tensors3 joined_gradients(const Tensor& grad_output, const Tensor& skip, const Tensor& input,
                                 const Tensor& weight, const Conv2dGeometry& g, Conv2dMask mask) {
  const Tensor addend = mask[0] ? skip : Tensor();
  if (!grad_output.defined()) return {addend, Tensor(), Tensor()};
  return conv2d_backward(grad_output, input, weight, g, mask, addend);
}

inline Tensor input_gradient(const Tensor& grad_output, const Tensor& input, const Tensor& weight,
                             const Conv2dGeometry& g) {
  return std::get<0>(conv2d_backward(grad_output, input, weight, g, {true, false, false}));
}

inline Tensor weight_gradient(const Tensor& grad_output, const Tensor& input, const Tensor& weight,
                              const Conv2dGeometry& g) {
  return std::get<1>(conv2d_backward(grad_output, input, weight, g, {false, true, false}));
}

}  // namespace call

template <class Int>
struct Conv2dWindows {
  Int stride[2], pad_before[2], pad_after[2], dilation[2], groups;
};

// One value is used for both dimensions.
template <class Int>
void expand_pair(const char* name, c10::ArrayRef<Int> values, Int (&pair)[2]) {
  TORCH_CHECK(values.size() == 1 || values.size() == 2, "expected ", name,
              " to be a single integer value or a list of 2 values to match the convolution "
              "dimensions, but got ",
              name, "=", values);
  pair[0] = values[0];
  pair[1] = values[values.size() - 1];
}

template <class Int>
Conv2dWindows<Int> expand_windows(c10::ArrayRef<Int> stride, c10::ArrayRef<Int> padding,
                                  c10::ArrayRef<Int> dilation, Int groups) {
  Conv2dWindows<Int> v;
  TORCH_CHECK(groups > 0, "non-positive groups is not supported");
  expand_pair("stride", stride, v.stride);
  expand_pair("dilation", dilation, v.dilation);
  if (padding.size() == 4) {
    for (int i = 0; i < 2; ++i) {
      v.pad_before[i] = padding[i];
      v.pad_after[i] = padding[i + 2];
    }
  } else {
    expand_pair("padding", padding, v.pad_before);
    for (int i = 0; i < 2; ++i) v.pad_after[i] = v.pad_before[i];
  }
  v.groups = groups;
  constexpr int64_t kMaxPadding = INT64_MAX / 2;  // native's
  for (int i = 0; i < 2; ++i) {
    TORCH_CHECK(v.pad_before[i] >= 0 && v.pad_after[i] >= 0, "negative padding is not supported");
    for (const Int& pad : {v.pad_before[i], v.pad_after[i]}) {
      TORCH_CHECK(!exceeds(pad, kMaxPadding), "Given padding=", pad, " at dimension ", i,
                  ", expected padding to be at most ", kMaxPadding);
    }
  }
  for (int i = 0; i < 2; ++i) {
    TORCH_CHECK(v.stride[i] > 0, "non-positive stride is not supported");
  }
  for (int i = 0; i < 2; ++i) {
    TORCH_CHECK(v.dilation[i] > 0, "dilation should be greater than zero");
  }
  return v;
}

// In onednn.cpp: the output, or the gradients of input and weight, if native's kernels should
// compute them; otherwise undefined.
Tensor conv2d_onednn(const Conv2dShape& shape, const Tensor& input, const Tensor& weight,
                     const OptionalTensor& bias);
std::array<Tensor, 2> conv2d_backward_onednn(const Conv2dShape& shape, const Tensor& grad_output,
                                             const Tensor& input, const Tensor& weight,
                                             const Conv2dMask& mask);

// Native takes the calls that none of our kernels supports: integers (CPU only) and complex
// numbers.
inline bool is_ours(const Tensor& input) { return is_floating(input.scalar_type()); }

}  // namespace warpwright
