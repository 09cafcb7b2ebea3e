// group_norm and its backward on every dispatch key.
//
// Whatever differentiates further runs a group as a row of layer_norm, with the affine step in
// ATen's operators: these have all derivatives.
#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <array>
#include <tuple>

#include "ops/group_norm/group_norm.h"
#include "torch/autograd.h"
#include "torch/check_argument.h"
#include "torch/dispatch.h"
#include "torch/missing_terms.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include "host/sm90.h"
#include "torch/cuda.h"
#endif

namespace warpwright {
namespace {

using Tensors3 = std::tuple<Tensor, Tensor, Tensor>;
using Mask = std::array<bool, 3>;  // input, weight, bias

namespace call {

Tensors3 group_norm(const Tensor& input, int64_t num_groups, const OptionalTensor& weight,
                    const OptionalTensor& bias, double eps) {
  static const auto op = find_op<Tensors3(const Tensor&, int64_t, const OptionalTensor&,
                                          const OptionalTensor&, double)>("warpwright::group_norm");
  return op.call(input, num_groups, weight, bias, eps);
}

Tensors3 group_norm_backward(const Tensor& grad_output, const Tensor& input, int64_t num_groups,
                             const OptionalTensor& weight, const Tensor& mean, const Tensor& rstd,
                             Mask wanted) {
  static const auto op =
      find_op<Tensors3(const Tensor&, const Tensor&, int64_t, const OptionalTensor&, const Tensor&,
                       const Tensor&, Mask)>("warpwright::group_norm_backward");
  return op.call(grad_output, input, num_groups, weight, mean, rstd, wanted);
}

Tensors3 layer_norm(const Tensor& input, c10::SymIntArrayRef shape, double eps) {
  static const auto op =
      find_op<Tensors3(const Tensor&, c10::SymIntArrayRef, const OptionalTensor&,
                       const OptionalTensor&, double, std::optional<at::ScalarType>)>(
          "warpwright::layer_norm");
  return op.call(input, shape, std::nullopt, std::nullopt, eps, std::nullopt);
}

Tensor layer_norm_backward(const Tensor& grad_output, const Tensor& input,
                           c10::SymIntArrayRef shape, const Tensor& mean, const Tensor& rstd) {
  static const auto op =
      find_op<Tensors3(const Tensor&, const Tensor&, c10::SymIntArrayRef, const OptionalTensor&,
                       const Tensor&, const Tensor&, Mask)>("warpwright::layer_norm_backward");
  return std::get<0>(
      op.call(grad_output, input, shape, std::nullopt, mean, rstd, {true, false, false}));
}

}  // namespace call

// ---- output shape and checks ----

at::ScalarType stats_type(const Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// channels_last stays; anything else becomes contiguous.
at::MemoryFormat format_of(const Tensor& input) {
  const auto format = input.suggest_memory_format();
  const bool last =
      format == at::MemoryFormat::ChannelsLast || format == at::MemoryFormat::ChannelsLast3d;
  return last ? format : at::MemoryFormat::Contiguous;
}

Tensor empty_like_input(const Tensor& input) {
  return at::empty_symint(input.sym_sizes(), input.options(), format_of(input));
}

c10::SymDimVector stats_sizes(const Tensor& input, int64_t num_groups) {
  return {input.sym_size(0), c10::SymInt(num_groups)};
}

void check_channel_vector(const Tensor& vector, const char* name, const Tensor& input) {
  if (!vector.defined()) return;
  TORCH_CHECK(vector.dim() == 1 && vector.sym_size(0) == input.sym_size(1), "Expected ", name,
              " to be a vector of size equal to the number of channels in input, but got ", name,
              " of shape ", vector.sym_sizes(), " and input of shape ", input.sym_sizes());
  check_same_device(vector, input, name[0] == 'w' ? "group_norm: weight" : "group_norm: bias");
}

// All of one type, or float32 vectors next to a 16-bit input.
void check_vector_types(const Tensor& input, const Tensor& weight, const Tensor& bias) {
  const auto type = input.scalar_type();
  const bool has_other = (weight.defined() && weight.scalar_type() != type) ||
                         (bias.defined() && bias.scalar_type() != type);
  if (!has_other) return;
  const char* device = input.is_cuda() ? "CUDA" : "CPU";
  for (const Tensor* vector : {&weight, &bias}) {
    if (!vector->defined()) continue;
    const char* name = vector == &weight ? "weight" : "bias";
    TORCH_CHECK(vector->scalar_type() == at::kFloat, "mixed dtype (", device,
                "): expect parameter to have scalar type of Float, but ", name, " has ",
                vector->scalar_type());
    TORCH_CHECK(type == at::kHalf || type == at::kBFloat16, "mixed dtype (", device,
                "): all inputs must share same datatype, but input has ", type, " and ", name,
                " has ", vector->scalar_type());
  }
}

void check_input(const Tensor& input, int64_t num_groups) {
  TORCH_CHECK(input.dim() >= 2, "Expected at least 2 dimensions for input tensor but received ",
              input.dim());
  TORCH_CHECK(num_groups > 0, "Expected num groups to be greater than 0, got ", num_groups);
  TORCH_CHECK(input.sym_size(1) % num_groups == 0,
              "Expected number of channels in input to be divisible by num_groups, but got input "
              "of shape ",
              input.sym_sizes(), " and num_groups=", num_groups);
  TORCH_CHECK_NOT_IMPLEMENTED(is_floating(input.scalar_type()),
                              "\"GroupNormKernelImpl\" not implemented for '", input.scalar_type(),
                              "'");
}

void check_forward(const Tensor& input, int64_t num_groups, const Tensor& weight,
                   const Tensor& bias) {
  check_input(input, num_groups);
  check_channel_vector(weight, "weight", input);
  check_channel_vector(bias, "bias", input);
  check_vector_types(input, weight, bias);
}

void check_backward(const Tensor& grad_output, const Tensor& input, int64_t num_groups,
                    const Tensor& weight, const Tensor& mean, const Tensor& rstd) {
  check_forward(input, num_groups, weight, Tensor());
  check_argument(grad_output, "group_norm_backward: grad_output", input.sym_sizes(),
                 input.scalar_type(), input);
  const auto sizes = stats_sizes(input, num_groups);
  check_argument(mean, "group_norm_backward: mean", sizes, stats_type(input), input);
  check_argument(rstd, "group_norm_backward: rstd", sizes, stats_type(input), input);
}

// ---- CPU and CUDA ----

GroupNormShape group_norm_shape(const Tensor& input, int64_t num_groups) {
  GroupNormShape shape{.dtype = dtype_of(input),
                       .batch = input.size(0),
                       .channels = input.size(1),
                       .spatial = 1,
                       .groups = num_groups,
                       .is_rows = format_of(input) != at::MemoryFormat::Contiguous};
  for (int64_t d = 2; d < input.dim(); ++d) shape.spatial *= input.size(d);
#ifdef WARPWRIGHT_WITH_CUDA
  shape.sm90 = input.is_cuda() && sm90_path_available();
#endif
  return shape;
}

GroupNormVector vector_of(const Tensor& vector) {
  if (!vector.defined()) return {};
  return {const_cast<void*>(vector.const_data_ptr()), dtype_of(vector)};
}
GroupNormVector result_of(const Tensor& vector) {
  if (!vector.defined()) return {};
  return {vector.mutable_data_ptr(), dtype_of(vector)};
}

// An undefined one stays so. `name` is "op: argument".
Tensor contiguous_vector(const OptionalTensor& vector, const char* name) {
  const Tensor tensor = value_or_undefined(vector);
  if (!tensor.defined()) return tensor;
  check_plain_storage(tensor, name);
  return tensor.contiguous();
}

template <class Run>
Tensors3 forward_with(const Tensor& input, int64_t num_groups, const OptionalTensor& weight_,
                      const OptionalTensor& bias_, double eps, Run&& run) {
  const Tensor weight = contiguous_vector(weight_, "group_norm: weight"),
               bias = contiguous_vector(bias_, "group_norm: bias");
  check_forward(input, num_groups, weight, bias);
  check_has_storage(input, "group_norm: input");
  Tensor output = empty_like_input(input);
  const auto options = input.options().dtype(stats_type(input));
  const std::array<int64_t, 2> sizes{input.size(0), num_groups};
  if (input.numel() == 0) return {output, at::zeros(sizes, options), at::zeros(sizes, options)};
  Tensor mean = at::empty(sizes, options), rstd = at::empty(sizes, options);
  const Tensor x = input.contiguous(format_of(input));
  run(GroupNormParams{group_norm_shape(input, num_groups), x.const_data_ptr(),
                      output.mutable_data_ptr(), vector_of(weight), vector_of(bias), eps,
                      mean.mutable_data_ptr(), rstd.mutable_data_ptr()});
  return {output, mean, rstd};
}

// The gradients of weight and bias have the weight's type, else the statistics'.
Tensor empty_vector(const Tensor& input, const Tensor& weight, bool wanted) {
  if (!wanted) return {};
  const auto options =
      weight.defined() ? weight.options() : input.options().dtype(stats_type(input));
  return input.sym_numel() == 0 ? at::zeros_symint({input.sym_size(1)}, options)
                                : at::empty_symint({input.sym_size(1)}, options);
}

template <class Run>
Tensors3 backward_with(const Tensor& grad_output, const Tensor& input, int64_t num_groups,
                       const OptionalTensor& weight_, const Tensor& mean, const Tensor& rstd,
                       Mask wanted, Run&& run) {
  const Tensor weight = contiguous_vector(weight_, "group_norm_backward: weight");
  check_backward(grad_output, input, num_groups, weight, mean, rstd);
  check_has_storage(grad_output, "group_norm_backward: grad_output");
  check_has_storage(input, "group_norm_backward: input");
  check_has_storage(mean, "group_norm_backward: mean");
  check_has_storage(rstd, "group_norm_backward: rstd");
  Tensor grad_input = wanted[0] ? empty_like_input(input) : Tensor();
  Tensor grad_weight = empty_vector(input, weight, wanted[1]),
         grad_bias = empty_vector(input, weight, wanted[2]);
  if (input.numel() == 0 || !(wanted[0] || wanted[1] || wanted[2])) {
    return {grad_input, grad_weight, grad_bias};
  }
  const auto format = format_of(input);
  const Tensor x = input.contiguous(format), dy = grad_output.contiguous(format);
  const Tensor means = mean.contiguous(), rstds = rstd.contiguous();
  run(GroupNormBackwardParams{group_norm_shape(input, num_groups), dy.const_data_ptr(),
                              x.const_data_ptr(), vector_of(weight), means.const_data_ptr(),
                              rstds.const_data_ptr(),
                              wanted[0] ? grad_input.mutable_data_ptr() : nullptr,
                              result_of(grad_weight), result_of(grad_bias)});
  return {grad_input, grad_weight, grad_bias};
}

Tensors3 group_norm_cpu_kernel(const Tensor& input, int64_t num_groups,
                               const OptionalTensor& weight, const OptionalTensor& bias,
                               double eps) {
  return forward_with(input, num_groups, weight, bias, eps, group_norm_cpu);
}
Tensors3 group_norm_backward_cpu_kernel(const Tensor& grad_output, const Tensor& input,
                                        int64_t num_groups, const OptionalTensor& weight,
                                        const Tensor& mean, const Tensor& rstd, Mask wanted) {
  return backward_with(grad_output, input, num_groups, weight, mean, rstd, wanted,
                       group_norm_backward_cpu);
}

#ifdef WARPWRIGHT_WITH_CUDA
Tensor workspace_of(int64_t bytes, const Tensor& like) {
  return at::empty({bytes}, like.options().dtype(at::kByte));
}

Tensors3 group_norm_cuda_kernel(const Tensor& input, int64_t num_groups,
                                const OptionalTensor& weight, const OptionalTensor& bias,
                                double eps) {
  const CudaCall cuda(input);
  return forward_with(input, num_groups, weight, bias, eps, [&](const GroupNormParams& p) {
    const GroupNormPlan plan = choose_group_norm(p, current_device_info());
    const Tensor workspace = workspace_of(group_norm_workspace(p, plan, false), input);
    launch_group_norm(p, plan, workspace.mutable_data_ptr(), cuda.stream);
  });
}
Tensors3 group_norm_backward_cuda_kernel(const Tensor& grad_output, const Tensor& input,
                                         int64_t num_groups, const OptionalTensor& weight,
                                         const Tensor& mean, const Tensor& rstd, Mask wanted) {
  const CudaCall cuda(input);
  return backward_with(
      grad_output, input, num_groups, weight, mean, rstd, wanted,
      [&](const GroupNormBackwardParams& p) {
        const GroupNormPlan plan = choose_group_norm_backward(p, current_device_info());
        const Tensor workspace = workspace_of(group_norm_workspace(p, plan, true), input);
        launch_group_norm_backward(p, plan, workspace.mutable_data_ptr(), cuda.stream);
      });
}
#endif

// ---- Meta ----

Tensors3 group_norm_meta(const Tensor& input, int64_t num_groups, const OptionalTensor& weight,
                         const OptionalTensor& bias, double) {
  check_forward(input, num_groups, value_or_undefined(weight), value_or_undefined(bias));
  const auto options = input.options().dtype(stats_type(input));
  const auto sizes = stats_sizes(input, num_groups);
  return {empty_like_input(input), at::empty_symint(sizes, options),
          at::empty_symint(sizes, options)};
}

Tensors3 group_norm_backward_meta(const Tensor& grad_output, const Tensor& input,
                                  int64_t num_groups, const OptionalTensor& weight_,
                                  const Tensor& mean, const Tensor& rstd, Mask wanted) {
  const Tensor weight = value_or_undefined(weight_);
  check_backward(grad_output, input, num_groups, weight, mean, rstd);
  return {wanted[0] ? empty_like_input(input) : Tensor(), empty_vector(input, weight, wanted[1]),
          empty_vector(input, weight, wanted[2])};
}

// ---- Autograd ----

// A call in differentiable operations: the groups as rows (batch, groups, elements) in the type of
// the statistics, and channels as (batch, channels, elements).
class GroupsAsRows {
 public:
  GroupsAsRows(const Tensor& input, int64_t num_groups)
      : type_(stats_type(input)),
        channels_{input.sym_size(0), input.sym_size(1),
                  input.sym_numel() / (input.sym_size(0) * input.sym_size(1))},
        rows_{channels_[0], num_groups, channels_[1] / num_groups * channels_[2]} {}

  c10::SymIntArrayRef row() const { return c10::SymIntArrayRef(rows_).slice(2); }
  Tensor as_rows(const Tensor& t) const { return t.to(type_).reshape_symint(rows_); }
  Tensor as_channels(const Tensor& t) const { return t.to(type_).reshape_symint(channels_); }
  Tensor of_vector(const Tensor& vector) const { return vector.to(type_).unsqueeze(1); }
  static Tensor sum(const Tensor& channels) { return channels.sum(at::IntArrayRef{0, 2}); }

 private:
  at::ScalarType type_;
  std::array<c10::SymInt, 3> channels_, rows_;
};

Tensors3 group_norm_by_rows(const Tensor& input, int64_t num_groups, const Tensor& weight,
                            const Tensor& bias, double eps) {
  const GroupsAsRows groups(input, num_groups);
  const auto [rows, mean, rstd] = call::layer_norm(groups.as_rows(input), groups.row(), eps);
  Tensor y = groups.as_channels(rows);
  if (weight.defined()) y = y * groups.of_vector(weight);
  if (bias.defined()) y = y + groups.of_vector(bias);
  y = y.to(input.scalar_type()).reshape_symint(input.sym_sizes());
  return {y.contiguous(format_of(input)), mean.squeeze(-1), rstd.squeeze(-1)};
}

struct GroupNormAttributes {
  int64_t num_groups;
};

struct GroupNormBackward {  // saved: input, weight, mean, rstd
  static constexpr const char* kName = "WarpwrightGroupNormBackward";
  using Attributes = GroupNormAttributes;
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    auto [dx, dw, db] =
        call::group_norm_backward(grads[0], saved[0], a.num_groups, optional_if_defined(saved[1]),
                                  saved[2], saved[3], {needs[0], needs[1], needs[2]});
    return {dx, dw, db};
  }
};

Tensors3 group_norm_autograd(const Tensor& input, int64_t num_groups, const OptionalTensor& weight_,
                             const OptionalTensor& bias_, double eps) {
  const Tensor weight = value_or_undefined(weight_), bias = value_or_undefined(bias_);
  if (any_tangent(input, weight, bias) && input.sym_numel() != 0) {
    check_forward(input, num_groups, weight, bias);
    auto [output, mean, rstd] = group_norm_by_rows(input, num_groups, weight, bias, eps);
    if (has_tangent(output) &&
        (needs_gradient(input) || needs_gradient(weight) || needs_gradient(bias))) {
      // Native's tangent is in the graph of all three, with zeros and for the bias with None.
      const Tensor moved =
          with_missing_terms(tangent_with_zero_terms(tangent(output), input, weight),
                             torch::autograd::collect_next_edges(bias));
      output = primal(output);
      set_tangent(output, moved);
    }
    return {output, mean, rstd};
  }
  auto node = make_node<GroupNormBackward>({num_groups}, input, weight, bias);
  auto [output, mean, rstd] =
      below_autograd([&] { return call::group_norm(input, num_groups, weight_, bias_, eps); });
  if (node) {
    for (const Tensor& saved : {input, weight, mean, rstd}) node->save(saved);
    set_history(output, node);
  }
  return {output, mean, rstd};
}

Tensors3 group_norm_backward_autograd(const Tensor& grad_output, const Tensor& input,
                                      int64_t num_groups, const OptionalTensor& weight_,
                                      const Tensor& mean, const Tensor& rstd, Mask wanted) {
  check_constant(mean, "group_norm_backward", "mean");
  check_constant(rstd, "group_norm_backward", "rstd");
  const Tensor weight = value_or_undefined(weight_);
  const bool is_further =
      is_differentiated(grad_output) || is_differentiated(input) || is_differentiated(weight);
  if (!is_further || input.sym_numel() == 0) {
    return below_autograd([&] {
      return call::group_norm_backward(grad_output, input, num_groups, weight_, mean, rstd, wanted);
    });
  }
  check_backward(grad_output, input, num_groups, weight, mean, rstd);
  const GroupsAsRows groups(input, num_groups);
  const Tensor dy = groups.as_channels(grad_output), x = groups.as_rows(input);
  const Tensor means = mean.unsqueeze(-1), rstds = rstd.unsqueeze(-1);
  auto gradient = [&](const Tensor& g) {
    return call::layer_norm_backward(groups.as_rows(g), x, groups.row(), means, rstds);
  };
  Tensors3 results;
  if (wanted[0]) {
    const Tensor dx = gradient(weight.defined() ? dy * groups.of_vector(weight) : dy);
    std::get<0>(results) =
        dx.to(input.scalar_type()).reshape_symint(input.sym_sizes()).contiguous(format_of(input));
  }
  const auto type = weight.defined() ? weight.scalar_type() : stats_type(input);
  if (wanted[1]) {
    // xhat as a function of x: the saved values, with the derivatives of the statistics.
    const Tensor center = x.mean(-1, /*keepdim=*/true), distance = x - center;
    const Tensor square = (distance * distance).mean(-1, /*keepdim=*/true);
    const Tensor scale = (square - square.detach() + rstds.pow(-2)).rsqrt();
    // Native's is in the graph of the weight, with None.
    std::get<1>(results) =
        with_missing_terms(GroupsAsRows::sum(dy * groups.as_channels(distance * scale)).to(type),
                           torch::autograd::collect_next_edges(weight));
  }
  if (wanted[2]) std::get<2>(results) = GroupsAsRows::sum(dy).to(type);
  return results;
}

// ---- Autocast: in float32 on a GPU, as native's ----

Tensors3 group_norm_autocast(const Tensor& input, int64_t num_groups, const OptionalTensor& weight,
                             const OptionalTensor& bias, double eps) {
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::AutocastCUDA);
  auto cast = [](const auto& value) { return at::autocast::cached_cast(at::kFloat, value); };
  return call::group_norm(cast(input), num_groups, cast(weight), cast(bias), eps);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def(
      "group_norm(Tensor input, int num_groups, Tensor? weight, Tensor? bias, float eps) "
      "-> (Tensor output, Tensor mean, Tensor rstd)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "group_norm_backward(Tensor grad_output, Tensor input, int num_groups, Tensor? weight, "
      "Tensor mean, Tensor rstd, bool[3] output_mask) -> (Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) {
  m.impl("group_norm", group_norm_cpu_kernel);
  m.impl("group_norm_backward", group_norm_backward_cpu_kernel);
}

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) {
  m.impl("group_norm", group_norm_cuda_kernel);
  m.impl("group_norm_backward", group_norm_backward_cuda_kernel);
}
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) {
  m.impl("group_norm", group_norm_meta);
  m.impl("group_norm_backward", group_norm_backward_meta);
}

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) {
  m.impl("group_norm", group_norm_autograd);
  m.impl("group_norm_backward", group_norm_backward_autograd);
}

TORCH_LIBRARY_IMPL(warpwright, AutocastCPU, m) {
  m.impl("group_norm", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(warpwright, AutocastCUDA, m) { m.impl("group_norm", group_norm_autocast); }

}  // namespace warpwright
