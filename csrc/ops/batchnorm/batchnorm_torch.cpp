// batch_norm, batch_norm_update and batch_norm_backward on every dispatch key. Two forward ops,
// because only training with running statistics writes to an argument: vmap and functionalization
// treat an op by its schema.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <array>
#include <tuple>

#include "ops/batchnorm/batchnorm.h"
#include "torch/autograd.h"
#include "torch/dispatch.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include "torch/cuda.h"
#endif

namespace warpwright {
namespace {

using OptionalTensor = std::optional<Tensor>;
using Tensors3 = std::tuple<Tensor, Tensor, Tensor>;
using Mask3 = std::array<bool, 3>;

// The ops through the dispatcher.
namespace call {

Tensors3 batch_norm(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                    const OptionalTensor& running_mean, const OptionalTensor& running_var,
                    bool training, double eps) {
  static const auto op =
      find_op<Tensors3(const Tensor&, const OptionalTensor&, const OptionalTensor&,
                       const OptionalTensor&, const OptionalTensor&, bool, double)>(
          "warpwright::batch_norm");
  return op.call(input, weight, bias, running_mean, running_var, training, eps);
}

Tensors3 batch_norm_update(const Tensor& input, const OptionalTensor& weight,
                           const OptionalTensor& bias, Tensor running_mean, Tensor running_var,
                           double momentum, double eps) {
  static const auto op =
      find_op<Tensors3(const Tensor&, const OptionalTensor&, const OptionalTensor&, Tensor, Tensor,
                       double, double)>("warpwright::batch_norm_update");
  return op.call(input, weight, bias, std::move(running_mean), std::move(running_var), momentum,
                 eps);
}

Tensors3 batch_norm_backward(const Tensor& grad_output, const Tensor& input,
                             const OptionalTensor& weight, const Tensor& mean, const Tensor& rstd,
                             bool training, Mask3 output_mask) {
  static const auto op =
      find_op<Tensors3(const Tensor&, const Tensor&, const OptionalTensor&, const Tensor&,
                       const Tensor&, bool, Mask3)>("warpwright::batch_norm_backward");
  return op.call(grad_output, input, weight, mean, rstd, training, output_mask);
}

}  // namespace call

// ---- layout, shapes and checks ----

c10::SymInt channels_of(const Tensor& input) {
  return input.dim() >= 2 ? input.sym_size(1) : c10::SymInt(0);
}

// Contiguous wins where both hold, as in native's output.
at::MemoryFormat output_format(const Tensor& input) {
  return input.is_contiguous() ? at::MemoryFormat::Contiguous : input.suggest_memory_format();
}

at::ScalarType stats_type(const Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

void check_input(const Tensor& input) {
  TORCH_CHECK_NOT_IMPLEMENTED(is_floating(input.scalar_type()),
                              "\"batch_norm\" not implemented for '", input.scalar_type(), "'");
}

// One value a channel, in the input's type or in float beside a 16-bit input.
void check_vector(const Tensor& vector, const char* name, const Tensor& input) {
  if (!vector.defined()) return;
  TORCH_CHECK(vector.sym_numel() == channels_of(input), name, " should contain ",
              channels_of(input), " elements not ", vector.sym_numel());
  TORCH_CHECK(vector.device() == input.device(),
              "batch_norm: Expected all tensors to be on the same device, but input is on ",
              input.device(), " and ", name, " is on ", vector.device());
  const auto type = vector.scalar_type(), input_type = input.scalar_type();
  if (type == input_type) return;
  const bool input_is_short = input_type == at::kHalf || input_type == at::kBFloat16;
  const char* device = input.is_cuda() ? "CUDA" : "CPU";
  TORCH_CHECK(type == at::kFloat, "mixed dtype (", device,
              "): expect parameter to have scalar type of Float, but ", name, " has ", type);
  TORCH_CHECK(input_is_short, "mixed dtype (", device,
              "): all inputs must share same datatype, but input has ", input_type, " and ", name,
              " has ", type);
}

void check_forward(const Tensor& input, const Tensor& weight, const Tensor& bias,
                   const Tensor& running_mean, const Tensor& running_var, bool training) {
  check_input(input);
  if (!training) {
    TORCH_CHECK(running_mean.defined(), "running_mean must be defined in evaluation mode");
    TORCH_CHECK(running_var.defined(), "running_var must be defined in evaluation mode");
  }
  check_vector(running_mean, "running_mean", input);
  check_vector(running_var, "running_var", input);
  check_vector(weight, "weight", input);
  check_vector(bias, "bias", input);
  TORCH_CHECK(input.dim() >= 2 || input.sym_numel() == 0,
              "batch_norm: input: expected at least 2 dimensions, got ", input.dim());
}

void check_backward(const Tensor& grad_output, const Tensor& input, const Tensor& weight,
                    const Tensor& mean, const Tensor& rstd) {
  check_input(input);
  TORCH_CHECK(grad_output.sym_sizes() == input.sym_sizes(),
              "batch_norm_backward: grad_output: expected shape ", input.sym_sizes(), ", got ",
              grad_output.sym_sizes());
  TORCH_CHECK(grad_output.scalar_type() == input.scalar_type(),
              "batch_norm_backward: grad_output: expected ", input.scalar_type(), ", got ",
              grad_output.scalar_type());
  check_vector(weight, "weight", input);
  for (const Tensor* stat : {&mean, &rstd}) {
    TORCH_CHECK(stat->scalar_type() == stats_type(input) && stat->sym_numel() == channels_of(input),
                "batch_norm_backward: mean and rstd: expected ", channels_of(input), " values of ",
                stats_type(input), ", got ", stat->sym_numel(), " of ", stat->scalar_type());
  }
}

BatchNormExtents extents_of(const Tensor& input, at::MemoryFormat format) {
  BatchNormExtents e;
  e.batch = input.size(0);
  e.channels = input.size(1);
  e.spatial = input.numel() / std::max<int64_t>(e.batch * e.channels, 1);
  e.rows = e.spatial == 1 || format != at::MemoryFormat::Contiguous;
  return e;
}

// Empty for an undefined tensor. A vector of more than one dimension must be contiguous.
ChannelVector channel_vector(const Tensor& tensor, bool writable) {
  if (!tensor.defined()) return {};
  TORCH_CHECK(tensor.dim() <= 1 || tensor.is_contiguous(),
              "batch_norm: a parameter of several dimensions must be contiguous");
  ChannelVector vector;
  vector.data = writable ? tensor.mutable_data_ptr() : const_cast<void*>(tensor.const_data_ptr());
  vector.dtype = dtype_of(tensor);
  vector.stride = tensor.dim() == 1 ? tensor.stride(0) : 1;
  return vector;
}

// ---- CPU and CUDA ----

template <class Run>
Tensors3 forward_with(const Tensor& input, const Tensor& weight, const Tensor& bias,
                      const Tensor& running_mean, const Tensor& running_var, bool training,
                      bool update, double momentum, double eps, Run&& run) {
  check_forward(input, weight, bias, running_mean, running_var, training);
  const auto format = output_format(input);
  const auto options = input.options().dtype(stats_type(input));
  Tensor output = at::empty(input.sizes(), input.options(), format);
  if (input.numel() == 0) {
    const int64_t channels = channels_of(input).expect_int();
    return {output, at::zeros({channels}, options), at::zeros({channels}, options)};
  }
  Tensor mean = at::empty({input.size(1)}, options), rstd = at::empty({input.size(1)}, options);
  const Tensor source = input.contiguous(format);
  BatchNormParams p;
  p.dtype = dtype_of(input);
  p.extents = extents_of(input, format);
  p.input = source.const_data_ptr();
  p.output = output.mutable_data_ptr();
  p.weight = channel_vector(weight, false);
  p.bias = channel_vector(bias, false);
  if (update || !training) {
    p.running_mean = channel_vector(running_mean, update);
    p.running_var = channel_vector(running_var, update);
  }
  p.training = training;
  p.momentum = momentum;
  p.eps = eps;
  p.mean = mean.mutable_data_ptr();
  p.rstd = rstd.mutable_data_ptr();
  p.workspace = nullptr;
  run(p);
  return {output, mean, rstd};
}

template <class Run>
Tensors3 backward_with(const Tensor& grad_output, const Tensor& input, const Tensor& weight,
                       const Tensor& mean, const Tensor& rstd, bool training, Mask3 output_mask,
                       Run&& run) {
  check_backward(grad_output, input, weight, mean, rstd);
  const auto format = output_format(input);
  Tensor grad_input, grad_weight, grad_bias;
  if (output_mask[0]) {
    grad_input = at::empty(input.sizes(), input.options(), input.suggest_memory_format());
  }
  // Without a weight there is no type to follow; autograd casts to the bias's.
  const auto options = weight.defined() ? weight.options() : mean.options();
  const int64_t channels = channels_of(input).expect_int();
  const bool empty = input.numel() == 0;
  auto vector = [&] {
    return empty ? at::zeros({channels}, options) : at::empty({channels}, options);
  };
  if (output_mask[1]) grad_weight = vector();
  if (output_mask[2]) grad_bias = vector();
  if (empty || !(output_mask[0] || output_mask[1] || output_mask[2])) {
    return {grad_input, grad_weight, grad_bias};
  }
  const Tensor dy = grad_output.contiguous(format), x = input.contiguous(format);
  const Tensor means = mean.contiguous(), rstds = rstd.contiguous();
  BatchNormBackwardParams p;
  p.dtype = dtype_of(input);
  p.extents = extents_of(input, format);
  p.grad_output = dy.const_data_ptr();
  p.input = x.const_data_ptr();
  p.weight = channel_vector(weight, false);
  p.mean = means.const_data_ptr();
  p.rstd = rstds.const_data_ptr();
  p.training = training;
  p.grad_input = output_mask[0] ? grad_input.mutable_data_ptr() : nullptr;
  p.grad_weight = channel_vector(grad_weight, true);
  p.grad_bias = channel_vector(grad_bias, true);
  p.workspace = nullptr;
  run(p);
  return {grad_input, grad_weight, grad_bias};
}

Tensors3 batch_norm_cpu_kernel(const Tensor& input, const OptionalTensor& weight,
                               const OptionalTensor& bias, const OptionalTensor& running_mean,
                               const OptionalTensor& running_var, bool training, double eps) {
  return forward_with(input, value_or_undefined(weight), value_or_undefined(bias),
                      value_or_undefined(running_mean), value_or_undefined(running_var), training,
                      /*update=*/false, 0, eps, batch_norm_cpu);
}
Tensors3 batch_norm_update_cpu_kernel(const Tensor& input, const OptionalTensor& weight,
                                      const OptionalTensor& bias, Tensor running_mean,
                                      Tensor running_var, double momentum, double eps) {
  return forward_with(input, value_or_undefined(weight), value_or_undefined(bias), running_mean,
                      running_var, /*training=*/true, /*update=*/true, momentum, eps,
                      batch_norm_cpu);
}
Tensors3 batch_norm_backward_cpu_kernel(const Tensor& grad_output, const Tensor& input,
                                        const OptionalTensor& weight, const Tensor& mean,
                                        const Tensor& rstd, bool training, Mask3 output_mask) {
  return backward_with(grad_output, input, value_or_undefined(weight), mean, rstd, training,
                       output_mask, batch_norm_backward_cpu);
}

#ifdef WARPWRIGHT_WITH_CUDA
uintptr_t address_of(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

Tensor workspace_for(const BatchNormConfig& config, int64_t channels, const Tensor& like) {
  return at::empty({batch_norm_workspace_bytes(config, channels, dtype_of(like))},
                   like.options().dtype(at::kByte));
}

Tensors3 forward_cuda(const Tensor& input, const Tensor& weight, const Tensor& bias,
                      const Tensor& running_mean, const Tensor& running_var, bool training,
                      bool update, double momentum, double eps) {
  const CudaCall call(input);
  return forward_with(input, weight, bias, running_mean, running_var, training, update, momentum,
                      eps, [&](BatchNormParams& p) {
                        const BatchNormConfig config = choose_config(
                            p.extents, p.dtype, address_of(p.input) | address_of(p.output),
                            current_device_info(), training ? 1 : 0);
                        Tensor workspace;
                        if (training) {
                          workspace = workspace_for(config, p.extents.channels, input);
                          p.workspace = workspace.mutable_data_ptr();
                        }
                        launch_batch_norm_fwd(p, config, call.stream);
                      });
}
Tensors3 batch_norm_cuda_kernel(const Tensor& input, const OptionalTensor& weight,
                                const OptionalTensor& bias, const OptionalTensor& running_mean,
                                const OptionalTensor& running_var, bool training, double eps) {
  return forward_cuda(input, value_or_undefined(weight), value_or_undefined(bias),
                      value_or_undefined(running_mean), value_or_undefined(running_var), training,
                      /*update=*/false, 0, eps);
}
Tensors3 batch_norm_update_cuda_kernel(const Tensor& input, const OptionalTensor& weight,
                                       const OptionalTensor& bias, Tensor running_mean,
                                       Tensor running_var, double momentum, double eps) {
  return forward_cuda(input, value_or_undefined(weight), value_or_undefined(bias), running_mean,
                      running_var, /*training=*/true, /*update=*/true, momentum, eps);
}
Tensors3 batch_norm_backward_cuda_kernel(const Tensor& grad_output, const Tensor& input,
                                         const OptionalTensor& weight, const Tensor& mean,
                                         const Tensor& rstd, bool training, Mask3 output_mask) {
  const CudaCall call(input);
  return backward_with(
      grad_output, input, value_or_undefined(weight), mean, rstd, training, output_mask,
      [&](BatchNormBackwardParams& p) {
        const BatchNormConfig config = choose_config(
            p.extents, p.dtype,
            address_of(p.grad_output) | address_of(p.input) | address_of(p.grad_input),
            current_device_info(), training && output_mask[0] ? 2 : 0);
        const Tensor workspace = workspace_for(config, p.extents.channels, input);
        p.workspace = workspace.mutable_data_ptr();
        launch_batch_norm_bwd(p, config, call.stream);
      });
}
#endif

// ---- Meta ----

Tensors3 forward_meta(const Tensor& input) {
  const auto options = input.options().dtype(stats_type(input));
  return {at::empty_symint(input.sym_sizes(), input.options(), output_format(input)),
          at::empty_symint({channels_of(input)}, options),
          at::empty_symint({channels_of(input)}, options)};
}
Tensors3 batch_norm_meta(const Tensor& input, const OptionalTensor& weight,
                         const OptionalTensor& bias, const OptionalTensor& running_mean,
                         const OptionalTensor& running_var, bool training, double) {
  check_forward(input, value_or_undefined(weight), value_or_undefined(bias),
                value_or_undefined(running_mean), value_or_undefined(running_var), training);
  return forward_meta(input);
}
Tensors3 batch_norm_update_meta(const Tensor& input, const OptionalTensor& weight,
                                const OptionalTensor& bias, Tensor running_mean, Tensor running_var,
                                double, double) {
  check_forward(input, value_or_undefined(weight), value_or_undefined(bias), running_mean,
                running_var, /*training=*/true);
  return forward_meta(input);
}
Tensors3 batch_norm_backward_meta(const Tensor& grad_output, const Tensor& input,
                                  const OptionalTensor& weight, const Tensor& mean,
                                  const Tensor& rstd, bool, Mask3 output_mask) {
  check_backward(grad_output, input, value_or_undefined(weight), mean, rstd);
  const auto options = weight.has_value() ? weight->options() : mean.options();
  auto vector = [&](bool wanted) {
    return wanted ? at::empty_symint({channels_of(input)}, options) : Tensor();
  };
  return {output_mask[0]
              ? at::empty_symint(input.sym_sizes(), input.options(), input.suggest_memory_format())
              : Tensor(),
          vector(output_mask[1]), vector(output_mask[2])};
}

// ---- derivatives ----

// a + b, either of which may be undefined (zero).
Tensor plus(const Tensor& a, const Tensor& b) {
  if (!a.defined()) return b;
  return b.defined() ? a + b : a;
}

// The quantities of one call in the type of its statistics, in differentiable tensor operations.
// With P(v) = v - mean(v) - xhat * mean(v * xhat) in training, v in evaluation, the input gradient
// is weight * rstd * P(grad_output); P is self-adjoint, and d xhat = rstd * P(dx).
class Normalized {
 public:
  Normalized(const Tensor& input, const Tensor& weight, const Tensor& mean, const Tensor& rstd,
             bool training)
      : training_(training), type_(mean.scalar_type()), dims_(input.dim()) {
    const Tensor x = input.to(type_);
    weight_ = weight.defined() ? per_channel(weight) : Tensor();
    if (training && at::GradMode::is_enabled() && input.requires_grad()) {
      // For one more derivative: the saved values, as functions of x.
      const Tensor center = average(x);
      const Tensor variance = average((x - center) * (x - center));
      rstd_ = (variance - variance.detach() + per_channel(rstd).pow(-2)).rsqrt();
      xhat_ = (x - center) * rstd_;
    } else {
      rstd_ = per_channel(rstd);
      xhat_ = (x - per_channel(mean)) * rstd_;
    }
  }

  Tensor per_channel(const Tensor& vector) const {
    c10::SmallVector<c10::SymInt, 5> shape(dims_, 1);
    shape[dims_ > 1 ? 1 : 0] = vector.sym_numel();  // an empty 1-D input has no channels
    return vector.to(type_).reshape_symint(shape);
  }
  // Over all but the channels.
  Tensor average(const Tensor& value) const { return value.mean(reduced(), /*keepdim=*/true); }
  Tensor sum(const Tensor& value) const { return dims_ > 1 ? value.sum(reduced()) : value; }
  Tensor project(const Tensor& v) const {
    return training_ ? v - average(v) - xhat_ * average(v * xhat_) : v;
  }
  Tensor scaled(const Tensor& v) const { return weight_.defined() ? v * weight_ : v; }

  const Tensor& xhat() const { return xhat_; }
  const Tensor& rstd() const { return rstd_; }
  at::ScalarType type() const { return type_; }

 private:
  c10::SmallVector<int64_t, 5> reduced() const {
    c10::SmallVector<int64_t, 5> dims{0};
    for (int64_t i = 2; i < dims_; ++i) dims.push_back(i);
    return dims;
  }
  bool training_;
  at::ScalarType type_;
  int64_t dims_;
  Tensor weight_, rstd_, xhat_;
};

// The output's change along (v, v_weight, v_bias); also the double backward's grad_output part,
// since the backward is the forward's transpose. Undefined directions are zero.
Tensor along(const Tensor& v, const Tensor& v_weight, const Tensor& v_bias, const Tensor& input,
             const Tensor& weight, const Tensor& mean, const Tensor& rstd, bool training) {
  Tensor result;
  if (v.defined()) {
    result = std::get<0>(call::batch_norm_backward(v, input, optional_if_defined(weight), mean,
                                                   rstd, training, {true, false, false}));
  }
  if (v_weight.defined() || v_bias.defined()) {
    const Normalized norm(input, weight, mean, rstd, training);
    Tensor more = v_weight.defined() ? norm.xhat() * norm.per_channel(v_weight)
                                     : Tensor(at::zeros_like(norm.xhat()));
    if (v_bias.defined()) more = more + norm.per_channel(v_bias);
    result = result.defined() ? (result.to(norm.type()) + more).to(input.scalar_type())
                              : more.to(input.scalar_type());
  }
  return result;
}

struct TrainingAttribute {
  bool training;
};

struct BatchNormBackward {  // saved: input, weight, mean, rstd
  static constexpr const char* kName = "WarpwrightBatchNormBackward";
  using Attributes = TrainingAttribute;
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    auto [dx, dw, db] =
        call::batch_norm_backward(grads[0], saved[0], optional_if_defined(saved[1]), saved[2],
                                  saved[3], a.training, {needs[0], needs[1], needs[2]});
    return {dx, dw, db};
  }
};

// The gradient of <v, dx> + <v_weight, dweight> + <v_bias, dbias>.
struct BatchNormBackwardBackward {  // saved: grad_output, input, weight, mean, rstd
  static constexpr const char* kName = "WarpwrightBatchNormBackwardBackward";
  using Attributes = TrainingAttribute;
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    const Tensor &grad_output = saved[0], &input = saved[1], &weight = saved[2], &mean = saved[3],
                 &rstd = saved[4];
    const Tensor &v = grads[0], &v_weight = grads[1], &v_bias = grads[2];
    Tensor for_grad_output, for_input, for_weight;
    if (needs[0]) {
      for_grad_output = along(v, v_weight, v_bias, input, weight, mean, rstd, a.training);
    }
    if (!needs[1] && !needs[2]) return {for_grad_output, for_input, for_weight};

    const Normalized norm(input, weight, mean, rstd, a.training);
    const Tensor dy = grad_output.to(norm.type());
    const Tensor direction = v.defined() ? v.to(norm.type()) : Tensor();
    Tensor projected;
    if (direction.defined()) projected = direction * norm.project(dy);
    if (needs[2] && direction.defined()) {
      for_weight = norm.sum(projected * norm.rstd()).to(weight.scalar_type());
    }
    if (needs[1]) {
      Tensor result;
      // Through xhat in dweight ...
      Tensor for_xhat = v_weight.defined() ? dy * norm.per_channel(v_weight) : Tensor();
      if (a.training && direction.defined()) {
        // ... through xhat in P, and through rstd.
        const Tensor in_projection =
            norm.scaled(norm.rstd() * (direction * norm.average(dy * norm.xhat()) +
                                       dy * norm.average(direction * norm.xhat())));
        for_xhat = plus(for_xhat, -in_projection);
        result = -norm.scaled(norm.xhat() * norm.rstd() * norm.rstd() * norm.average(projected));
      }
      if (for_xhat.defined()) result = plus(result, norm.rstd() * norm.project(for_xhat));
      if (result.defined()) for_input = result.to(input.scalar_type());
    }
    return {for_grad_output, for_input, for_weight};
  }
};

// The changes of (dx, dweight, dbias) along the tangents; undefined where zero.
Tensors3 backward_tangents(const Tensor& grad_output, const Tensor& input, const Tensor& weight,
                           const Tensor& mean, const Tensor& rstd, bool training) {
  auto tangent_or_undefined = [](const Tensor& t) {
    return has_tangent(t) ? tangent(t) : Tensor();
  };
  const Tensor dy_t = tangent_or_undefined(grad_output), x_t = tangent_or_undefined(input),
               w_t = tangent_or_undefined(weight);
  const Tensor x = primal(input), w = weight.defined() ? primal(weight) : weight;
  const Normalized norm(x, w, mean, rstd, training);
  const Tensor dy = primal(grad_output).to(norm.type());
  Tensor dx_t, dw_t, db_t;
  if (dy_t.defined()) {
    const auto [dx, dw, db] = call::batch_norm_backward(dy_t, x, optional_if_defined(w), mean, rstd,
                                                        training, {true, true, true});
    dx_t = dx.to(norm.type());
    dw_t = dw.to(norm.type());
    db_t = db;
  }
  if (w_t.defined()) {
    dx_t = plus(dx_t, norm.per_channel(w_t) * norm.rstd() * norm.project(dy));
  }
  if (x_t.defined()) {
    const Tensor direction = x_t.to(norm.type());
    const Tensor xhat_t = norm.rstd() * norm.project(direction);
    dw_t = plus(dw_t, norm.sum(dy * xhat_t));
    if (training) {
      const Tensor rstd_t = -norm.rstd() * norm.rstd() * norm.average(norm.xhat() * direction);
      dx_t = plus(dx_t, norm.scaled(rstd_t * norm.project(dy) -
                                    norm.rstd() * (xhat_t * norm.average(dy * norm.xhat()) +
                                                   norm.xhat() * norm.average(dy * xhat_t))));
    }
  }
  if (dx_t.defined()) dx_t = dx_t.to(input.scalar_type());
  if (dw_t.defined() && weight.defined()) dw_t = dw_t.to(weight.scalar_type());
  return {dx_t, dw_t, db_t};
}

// ---- Autograd ----

void check_constant(const Tensor& tensor, const char* name) {
  TORCH_CHECK(!at::GradMode::is_enabled() || !tensor.defined() || !tensor.requires_grad(),
              "The function 'batch_norm' is not differentiable with respect to argument '", name,
              "'. This input cannot have requires_grad True.");
}

template <class Forward>
Tensors3 forward_autograd(const Tensor& input, const Tensor& weight, const Tensor& bias,
                          const Tensor& running_mean, const Tensor& running_var, bool training,
                          Forward&& forward) {
  check_constant(running_mean, "running_mean");
  check_constant(running_var, "running_var");
  auto node = make_node<BatchNormBackward>({training}, input, weight, bias);
  auto [output, mean, rstd] = below_autograd(forward);
  if (node) {
    node->save(input);
    node->save(weight);
    node->save(mean);
    node->save(rstd);
    set_history(output, node);
  }
  if (any_tangent(input, weight, bias)) {
    auto tangent_or_undefined = [](const Tensor& t) {
      return has_tangent(t) ? tangent(t) : Tensor();
    };
    set_tangent(output, along(tangent_or_undefined(input), tangent_or_undefined(weight),
                              tangent_or_undefined(bias), primal(input),
                              weight.defined() ? primal(weight) : weight, mean, rstd, training));
  }
  return {output, mean, rstd};
}

Tensors3 batch_norm_autograd(const Tensor& input, const OptionalTensor& weight,
                             const OptionalTensor& bias, const OptionalTensor& running_mean,
                             const OptionalTensor& running_var, bool training, double eps) {
  return forward_autograd(
      input, value_or_undefined(weight), value_or_undefined(bias), value_or_undefined(running_mean),
      value_or_undefined(running_var), training, [&] {
        return call::batch_norm(input, weight, bias, running_mean, running_var, training, eps);
      });
}

Tensors3 batch_norm_update_autograd(const Tensor& input, const OptionalTensor& weight,
                                    const OptionalTensor& bias, Tensor running_mean,
                                    Tensor running_var, double momentum, double eps) {
  auto result = forward_autograd(input, value_or_undefined(weight), value_or_undefined(bias),
                                 running_mean, running_var,
                                 /*training=*/true, [&] {
                                   return call::batch_norm_update(input, weight, bias, running_mean,
                                                                  running_var, momentum, eps);
                                 });
  for (const Tensor* stat : {&running_mean, &running_var}) {
    if (!stat->is_inference()) torch::autograd::impl::bump_version(*stat);
  }
  return result;
}

Tensors3 batch_norm_backward_autograd(const Tensor& grad_output, const Tensor& input,
                                      const OptionalTensor& weight, const Tensor& mean,
                                      const Tensor& rstd, bool training, Mask3 output_mask) {
  const Tensor weight_value = value_or_undefined(weight);
  check_constant(mean, "mean");
  check_constant(rstd, "rstd");
  auto node = make_node<BatchNormBackwardBackward>({training}, grad_output, input, weight_value);
  auto grads = below_autograd([&] {
    return call::batch_norm_backward(grad_output, input, weight, mean, rstd, training, output_mask);
  });
  auto& [dx, dw, db] = grads;
  if (node) {
    node->save(grad_output);
    node->save(input);
    node->save(weight_value);
    node->save(mean);
    node->save(rstd);
    set_history({dx, dw, db}, node);
  }
  if (any_tangent(grad_output, input, weight_value)) {
    const auto [dx_t, dw_t, db_t] =
        backward_tangents(grad_output, input, weight_value, mean, rstd, training);
    if (dx.defined() && dx_t.defined()) set_tangent(dx, dx_t);
    if (dw.defined() && dw_t.defined()) set_tangent(dw, dw_t);
    if (db.defined() && db_t.defined()) set_tangent(db, db_t);
  }
  return grads;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def(
      "batch_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor? running_mean, "
      "Tensor? running_var, bool training, float eps) -> (Tensor output, Tensor mean, Tensor rstd)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "batch_norm_update(Tensor input, Tensor? weight, Tensor? bias, Tensor(a!) running_mean, "
      "Tensor(b!) running_var, float momentum, float eps) "
      "-> (Tensor output, Tensor mean, Tensor rstd)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "batch_norm_backward(Tensor grad_output, Tensor input, Tensor? weight, Tensor mean, "
      "Tensor rstd, bool training, bool[3] output_mask) -> (Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) {
  m.impl("batch_norm", batch_norm_cpu_kernel);
  m.impl("batch_norm_update", batch_norm_update_cpu_kernel);
  m.impl("batch_norm_backward", batch_norm_backward_cpu_kernel);
}

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) {
  m.impl("batch_norm", batch_norm_cuda_kernel);
  m.impl("batch_norm_update", batch_norm_update_cuda_kernel);
  m.impl("batch_norm_backward", batch_norm_backward_cuda_kernel);
}
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) {
  m.impl("batch_norm", batch_norm_meta);
  m.impl("batch_norm_update", batch_norm_update_meta);
  m.impl("batch_norm_backward", batch_norm_backward_meta);
}

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) {
  m.impl("batch_norm", batch_norm_autograd);
  m.impl("batch_norm_update", batch_norm_update_autograd);
  m.impl("batch_norm_backward", batch_norm_backward_autograd);
}

}  // namespace warpwright
