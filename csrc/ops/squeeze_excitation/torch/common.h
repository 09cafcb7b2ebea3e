// Shared by the files of torch/: a call's arguments, their checks, and the ops through the
// dispatcher.
#pragma once

#include <array>
#include <string_view>
#include <tuple>

#include "ops/squeeze_excitation/squeeze_excitation.h"
#include "torch/activation.h"
#include "torch/autograd.h"
#include "torch/check_argument.h"
#include "torch/dispatch.h"

namespace warpwright::squeeze_excitation {

using Tensors4 = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Tensors5 = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
using Mask = std::array<bool, 5>;  // input, fc1_weight, fc1_bias, fc2_weight, fc2_bias

struct Functions {
  Activation activation;
  ScaleActivation scale_activation;

  std::string_view activation_text() const { return activation_name(activation); }
  std::string_view scale_activation_text() const {
    return scale_activation == ScaleActivation::kSigmoid ? "sigmoid" : "hardsigmoid";
  }
};

inline Functions find_functions(std::string_view activation, std::string_view scale_activation,
                                const char* op) {
  const Activation found = find_activation(activation, op, {Activation::kRelu, Activation::kSilu});
  const bool is_sigmoid = scale_activation == "sigmoid";
  TORCH_CHECK(is_sigmoid || scale_activation == "hardsigmoid", op,
              ": scale_activation: expected sigmoid or hardsigmoid, got ", scale_activation);
  return {found, is_sigmoid ? ScaleActivation::kSigmoid : ScaleActivation::kHardsigmoid};
}

// The tensors of a call. Weights are (out, in) or (out, in, 1, 1); biases may be undefined.
struct Arguments {
  const Tensor& input;
  const Tensor& fc1_weight;
  Tensor fc1_bias;
  const Tensor& fc2_weight;
  Tensor fc2_bias;

  std::array<const Tensor*, 4> parameters() const {
    return {&fc1_weight, &fc1_bias, &fc2_weight, &fc2_bias};
  }
};

inline at::ScalarType sums_type(const Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// channels_last stays; anything else becomes contiguous.
inline at::MemoryFormat format_of(const Tensor& x) {
  return x.suggest_memory_format() == at::MemoryFormat::ChannelsLast
             ? at::MemoryFormat::ChannelsLast
             : at::MemoryFormat::Contiguous;
}

// Whether x is dense with H and W exchanged. The op does not tell them apart, so it then runs on
// the exchanged view, whose layout is that of format_of().
inline bool is_turned(const Tensor& x) {
  const auto is_dense = [](const Tensor& t) {
    return t.is_contiguous() || t.is_contiguous(at::MemoryFormat::ChannelsLast);
  };
  return !is_dense(x) && is_dense(x.transpose(2, 3));
}
inline Tensor turned_if(bool turned, const Tensor& x) { return turned ? x.transpose(2, 3) : x; }

// `t` in the layout that results have for x.
inline Tensor in_layout_of(const Tensor& t, const Tensor& x) {
  const bool turned = is_turned(x);
  const Tensor dense = turned_if(turned, t).contiguous(format_of(turned_if(turned, x)));
  return turned_if(turned, dense);
}

inline void check_weight(const Tensor& weight, const std::string& name, const c10::SymInt& rows,
                         const c10::SymInt& cols) {
  const bool is_convolution =
      weight.dim() == 4 && weight.sym_size(2) == 1 && weight.sym_size(3) == 1;
  TORCH_CHECK((weight.dim() == 2 || is_convolution) && weight.sym_size(0) == rows &&
                  weight.sym_size(1) == cols,
              name, ": expected shape [", rows, ", ", cols, "] or [", rows, ", ", cols,
              ", 1, 1], got ", weight.sym_sizes());
}

inline void check_bias(const Tensor& bias, const std::string& name, const c10::SymInt& size) {
  if (!bias.defined()) return;
  TORCH_CHECK(bias.dim() == 1 && bias.sym_size(0) == size, name, ": expected shape [", size,
              "], got ", bias.sym_sizes());
}

// Every parameter has the input's type, or all are float32 next to a 16-bit input, as autocast has
// them.
inline void check_types(const Arguments& a, const std::string& op) {
  constexpr const char* kNames[] = {": fc1_weight", ": fc1_bias", ": fc2_weight", ": fc2_bias"};
  const auto type = a.input.scalar_type(), first = a.fc1_weight.scalar_type();
  const bool is_mixed = a.input.element_size() == 2 && first == at::kFloat;
  size_t place = 0;
  for (const Tensor* parameter : a.parameters()) {
    const std::string name = op + kNames[place++];
    if (!parameter->defined()) continue;
    TORCH_CHECK(parameter->scalar_type() == (is_mixed ? at::kFloat : type), name, ": expected ",
                is_mixed ? at::kFloat : type, ", got ", parameter->scalar_type());
    check_same_device(*parameter, a.input, name.c_str());
  }
}

inline void check_arguments(const Arguments& a, const std::string& op) {
  const Tensor& x = a.input;
  TORCH_CHECK_NOT_IMPLEMENTED(is_floating(x.scalar_type()), op,
                              ": input: expected a real floating-point tensor, got ",
                              x.scalar_type());
  TORCH_CHECK(x.dim() == 4, op, ": input: expected 4 dimensions (N, C, H, W), got shape ",
              x.sym_sizes());
  TORCH_CHECK(x.sym_size(1) != 0, op, ": input: expected at least one channel, got shape ",
              x.sym_sizes());
  TORCH_CHECK(a.fc1_weight.dim() >= 2 && a.fc1_weight.sym_size(0) != 0, op,
              ": fc1_weight: expected at least one row and 2 or 4 dimensions, got shape ",
              a.fc1_weight.sym_sizes());
  const c10::SymInt channels = x.sym_size(1), squeezed = a.fc1_weight.sym_size(0);
  check_weight(a.fc1_weight, op + ": fc1_weight", squeezed, channels);
  check_bias(a.fc1_bias, op + ": fc1_bias", squeezed);
  check_weight(a.fc2_weight, op + ": fc2_weight", channels, squeezed);
  check_bias(a.fc2_bias, op + ": fc2_bias", channels);
  check_types(a, op);
}

// What the forward keeps for the backward, in the type of the sums.
struct Kept {
  const Tensor& mean;    // (N, C)
  const Tensor& hidden;  // (N, S), before the activation
  const Tensor& scale;   // (N, C)
};

inline void check_backward(const Tensor& grad_output, const Arguments& a, const Kept& kept) {
  const std::string op = "squeeze_excitation_backward";
  check_arguments(a, op);
  const Tensor& x = a.input;
  const auto type = sums_type(x);
  const c10::SymInt images = x.sym_size(0), channels = x.sym_size(1),
                    squeezed = a.fc1_weight.sym_size(0);
  check_argument(grad_output, (op + ": grad_output").c_str(), x.sym_sizes(), x.scalar_type(), x);
  check_argument(kept.mean, (op + ": mean").c_str(), {images, channels}, type, x);
  check_argument(kept.hidden, (op + ": hidden").c_str(), {images, squeezed}, type, x);
  check_argument(kept.scale, (op + ": scale").c_str(), {images, channels}, type, x);
}

namespace call {

inline Tensors4 squeeze_excitation(const Arguments& a, const Functions& f) {
  static const auto op =
      find_op<Tensors4(const Tensor&, const Tensor&, const OptionalTensor&, const Tensor&,
                       const OptionalTensor&, std::string_view, std::string_view)>(
          "warpwright::squeeze_excitation");
  return op.call(a.input, a.fc1_weight, optional_if_defined(a.fc1_bias), a.fc2_weight,
                 optional_if_defined(a.fc2_bias), f.activation_text(), f.scale_activation_text());
}

inline Tensors5 squeeze_excitation_backward(const Tensor& grad_output, const Arguments& a,
                                            const Kept& kept, const Functions& f, Mask wanted) {
  static const auto op =
      find_op<Tensors5(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                       const Tensor&, const OptionalTensor&, const Tensor&, const Tensor&,
                       const Tensor&, std::string_view, std::string_view, Mask)>(
          "warpwright::squeeze_excitation_backward");
  return op.call(grad_output, a.input, a.fc1_weight, optional_if_defined(a.fc1_bias), a.fc2_weight,
                 optional_if_defined(a.fc2_bias), kept.mean, kept.hidden, kept.scale,
                 f.activation_text(), f.scale_activation_text(), wanted);
}

}  // namespace call

}  // namespace warpwright::squeeze_excitation
