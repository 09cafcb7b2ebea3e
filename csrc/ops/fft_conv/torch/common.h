// Shared by the files of torch/: the operator through the dispatcher, its checks and sizes.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymIntArrayRef.h>

#include <string_view>
#include <vector>

#include "torch/autograd.h"
#include "torch/check_argument.h"
#include "torch/checked_math.h"
#include "torch/dispatch.h"

namespace warpwright {

using c10::SymInt;
using c10::SymIntArrayRef;

// The convolution output = input * weight has three tensors; the operator takes two and returns
// the third: the output, or with the output's gradient the gradient of input or weight.
//   "output": first = input,       second = weight
//   "input":  first = grad_output, second = weight
//   "weight": first = input,       second = grad_output
enum class FftConvWanted { kOutput, kInput, kWeight };

struct FftConvGeometry {
  std::vector<SymInt> padding;  // before each dimension, then after each
  SymInt groups;
  FftConvWanted wanted;
};

inline FftConvWanted fft_conv_wanted(std::string_view wanted) {
  if (wanted == "output") return FftConvWanted::kOutput;
  if (wanted == "input") return FftConvWanted::kInput;
  TORCH_CHECK(wanted == "weight", "fft_conv: wanted: expected 'output', 'input' or 'weight', got '",
              wanted, "'");
  return FftConvWanted::kWeight;
}

inline std::string_view name_of(FftConvWanted wanted) {
  return wanted == FftConvWanted::kOutput  ? "output"
         : wanted == FftConvWanted::kInput ? "input"
                                           : "weight";
}

namespace call {

inline Tensor fft_conv(const Tensor& first, const Tensor& second, const Tensor& bias,
                       const FftConvGeometry& g, FftConvWanted wanted) {
  static const auto op =
      find_op<Tensor(const Tensor&, const Tensor&, const OptionalTensor&, SymIntArrayRef, SymInt,
                     std::string_view)>("warpwright::fft_conv");
  return op.call(first, second, optional_if_defined(bias), g.padding, g.groups, name_of(wanted));
}

}  // namespace call

// Throws for arguments that do not fit together; returns the sizes of the result.
std::vector<SymInt> fft_conv_sizes(const Tensor& first, const Tensor& second, const Tensor& bias,
                                   const FftConvGeometry& geometry);

}  // namespace warpwright
