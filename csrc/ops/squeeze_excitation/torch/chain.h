// The op in ATen's operators, which have all derivatives: the CPU's kernels, tangents, and
// whatever differentiates the backward.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/hardsigmoid.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include "ops/squeeze_excitation/torch/common.h"

namespace warpwright::squeeze_excitation {

constexpr int64_t kSpatial[] = {2, 3};

// Whether ATen's own derivatives of the result are asked for.
enum class Differentiated { kNo, kYes };

// The two layers, in the type of the sums.
struct Layers {
  Tensor fc1_weight, fc1_bias, fc2_weight, fc2_bias;

  explicit Layers(const Arguments& a) {
    const auto type = sums_type(a.input);
    const auto matrix = [&](const Tensor& weight) {
      const Tensor found = weight.to(type);
      return found.dim() == 2 ? found : found.squeeze(-1).squeeze(-1);
    };
    const auto vector = [&](const Tensor& bias) {
      return bias.defined() ? bias.to(type) : Tensor();
    };
    fc1_weight = matrix(a.fc1_weight);
    fc1_bias = vector(a.fc1_bias);
    fc2_weight = matrix(a.fc2_weight);
    fc2_bias = vector(a.fc2_bias);
  }
};

struct Excitation {
  Tensor mean, hidden, activated, scale;
};

// ATen's hardsigmoid has no second derivative. This form has, and the first one at the kinks.
inline Tensor differentiable_hardsigmoid(const Tensor& z) {
  const Tensor inside = z.gt(-3).logical_and(z.lt(3));
  return at::where(inside, (z + 3) * (1.0 / 6.0), at::hardsigmoid(z.detach()));
}

inline Tensor activated_of(const Tensor& hidden, Activation activation) {
  return activation == Activation::kRelu ? at::relu(hidden) : at::silu(hidden);
}

inline Excitation excite(const Tensor& mean, const Layers& layers, const Functions& f,
                         Differentiated differentiated) {
  Excitation e;
  e.mean = mean;
  e.hidden = at::linear(mean, layers.fc1_weight, optional_if_defined(layers.fc1_bias));
  e.activated = activated_of(e.hidden, f.activation);
  const Tensor z = at::linear(e.activated, layers.fc2_weight, optional_if_defined(layers.fc2_bias));
  if (f.scale_activation == ScaleActivation::kSigmoid) {
    e.scale = at::sigmoid(z);
  } else {
    e.scale =
        differentiated == Differentiated::kYes ? differentiable_hardsigmoid(z) : at::hardsigmoid(z);
  }
  return e;
}

// (N, C) -> (N, C, 1, 1) in the type of `like`.
inline Tensor per_image(const Tensor& values, const Tensor& like) {
  return values.to(like.scalar_type()).unsqueeze(-1).unsqueeze(-1);
}

// The gradients by the input and the parameters. `x` and `dy` may have the type of the sums in
// place of the input's.
inline Tensors5 chain_backward(const Tensor& dy, const Tensor& x, const Excitation& e,
                               const Layers& layers, const Arguments& a, const Functions& f,
                               Mask wanted, Differentiated differentiated) {
  const Tensor ds = (dy * x).sum(kSpatial).to(e.scale.scalar_type());
  const Tensor of_argument = f.scale_activation == ScaleActivation::kSigmoid
                                 ? ds * ((1 - e.scale) * e.scale)
                                 : at::where(e.scale.gt(0).logical_and(e.scale.lt(1)),
                                             ds * (1.0 / 6.0), at::zeros_like(ds));
  const Tensor of_activated = of_argument.mm(layers.fc2_weight);
  Tensor of_hidden;
  if (f.activation == Activation::kRelu) {
    of_hidden = at::where(e.hidden.le(0), at::zeros_like(of_activated), of_activated);
  } else {
    const Tensor s = at::sigmoid(e.hidden);
    of_hidden = of_activated * (s * (1 + e.hidden * (1 - s)));
  }
  // The kernels' results have the strides of a dense parameter, which fused optimizers demand.
  const auto shaped = [&](const Tensor& gradient, const Tensor& parameter) {
    const Tensor found = gradient.to(parameter.scalar_type()).reshape_symint(parameter.sym_sizes());
    const bool is_free = differentiated == Differentiated::kYes || !parameter.is_contiguous() ||
                         found.sym_strides() == parameter.sym_strides();
    return is_free ? found : at::empty_like(parameter).copy_(found);
  };
  Tensors5 result;
  if (wanted[0]) {
    const Tensor of_mean = of_hidden.mm(layers.fc1_weight) / (x.sym_size(2) * x.sym_size(3));
    Tensor dx = dy * per_image(e.scale, dy);
    if (differentiated == Differentiated::kYes) {
      dx = dx + per_image(of_mean, dy);
    } else {
      dx.add_(per_image(of_mean, dy));
    }
    std::get<0>(result) = in_layout_of(dx.to(a.input.scalar_type()), a.input);
  }
  if (wanted[1]) std::get<1>(result) = shaped(of_hidden.t().mm(e.mean), a.fc1_weight);
  if (wanted[2] && a.fc1_bias.defined()) {
    std::get<2>(result) = shaped(of_hidden.sum(0), a.fc1_bias);
  }
  if (wanted[3]) std::get<3>(result) = shaped(of_argument.t().mm(e.activated), a.fc2_weight);
  if (wanted[4] && a.fc2_bias.defined()) {
    std::get<4>(result) = shaped(of_argument.sum(0), a.fc2_bias);
  }
  return result;
}

}  // namespace warpwright::squeeze_excitation
