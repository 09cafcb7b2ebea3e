// The ops that cross_entropy (cross_entropy/torch/call.cpp) is composed of, on every dispatch key.
//   cross_entropy_forward          one read of the logits -> (loss, row_stats, total_weight)
//   cross_entropy_backward         gradient by input and by probabilities
//   cross_entropy_backward_        gradient by input, in place
//   cross_entropy_lse              log sum exp of the rows, from the forward's max and sum
//   cross_entropy_double_backward  Hessian times (v, u): the derivative of the backward, and every
//                                  forward-mode derivative, since the Hessian is symmetric
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>

#include <array>
#include <tuple>

#include "ops/cross_entropy/torch/operands.h"
#include "torch/autograd.h"
#include "torch/dispatch.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include "host/launch.h"
#include "host/sm90.h"
#include "torch/cuda.h"
#endif

namespace warpwright {
namespace {

// ---- CPU and CUDA ----

template <class Run>
Tensor3 cross_entropy_forward_with(const Tensor& input, const Tensor& target,
                                   const OptionalTensor& weight, const LossOptions& options,
                                   ScalarType dtype, Run&& run) {
  check_cross_entropy(input, target, value_or_undefined(weight), options);
  check_kernel_dtypes(input, target, dtype);
  const TargetKind kind = kind_of(input, target, options.label_smoothing);
  Tensor3 outputs = empty_outputs<int64_t>(input, kind, options.reduction, dtype);
  Operands operands(input, target, weight);
  operands.arrange(kind == TargetKind::kProbabilities, Tensor());
  CrossEntropyParams p{operands.problem(kind, options, dtype)};
  p.loss = std::get<0>(outputs).mutable_data_ptr();
  p.stats = std::get<1>(outputs).mutable_data_ptr();
  p.total_weight = std::get<2>(outputs).mutable_data_ptr();
  run(p);
  return outputs;
}

void check_inplace_logits(const Tensor& input, const Tensor& target) {
  TORCH_CHECK(!is_probabilities(input, target) && is_walkable_in_place(input),
              "cross_entropy_backward_: input: expected dense logits of labels, got strides ",
              input.sym_strides());
}

// log sum exp of every row, from the forward's statistics.
Tensor lse_of(const Tensor& input, const Tensor& row_stats) {
  if (!row_stats.is_meta()) check_has_storage(row_stats, "cross_entropy_lse: row_stats");
  return row_stats.select(0, 0) + row_stats.select(0, 1).log();
}

// The derivative ops' checks of the forward's results.
void check_saved(const Tensor& input, const Tensor& target, const Tensor& weight,
                 const Tensor& grad_output, const Tensor& row_stats, const Tensor& total_weight,
                 const LossOptions& options) {
  check_cross_entropy(input, target, weight, options);
  check_kernel_dtypes(input, target, grad_output.scalar_type());
  const ScalarType accum = accum_type(input.scalar_type());
  const TargetKind kind = kind_of(input, target, options.label_smoothing);
  const auto sizes = stats_sizes<SymInt>(input, kind);
  const c10::SymIntArrayRef rows = c10::SymIntArrayRef(sizes).slice(1);
  check_argument(row_stats, "cross_entropy_backward: row_stats", sizes, accum, input);
  check_contiguous(row_stats, "cross_entropy_backward: row_stats");
  check_argument(total_weight, "cross_entropy_backward: total_weight", {}, accum, input);
  check_argument(grad_output, "cross_entropy_backward: grad_output",
                 options.reduction == at::Reduction::None ? rows : c10::SymIntArrayRef(),
                 grad_output.scalar_type(), input);
}

constexpr const char* kGradGradInput = "cross_entropy_double_backward: grad_grad_input";
constexpr const char* kGradGradTarget = "cross_entropy_double_backward: grad_grad_target";

Tensor contiguous_gradient(const Tensor& grad_output) {
  check_has_storage(grad_output, "cross_entropy_backward: grad_output");
  return grad_output.contiguous();
}

template <class Params>
void set_saved(Params& p, const Tensor& dloss, const Tensor& row_stats,
               const Tensor& total_weight) {
  check_has_storage(row_stats, "cross_entropy_backward: row_stats");
  check_has_storage(total_weight, "cross_entropy_backward: total_weight");
  p.grad_output = dloss.const_data_ptr();
  p.stats = row_stats.const_data_ptr();
  p.total_weight = total_weight.const_data_ptr();
}

CrossEntropyBackwardParams backward_params(const Operands& operands, TargetKind kind,
                                           const Tensor& dloss, const Tensor& row_stats,
                                           const Tensor& total_weight, const LossOptions& options) {
  CrossEntropyBackwardParams p{operands.problem(kind, options, dloss.scalar_type())};
  set_saved(p, dloss, row_stats, total_weight);
  return p;
}

template <class Run>
Tensor2 cross_entropy_backward_with(const Tensor& grad_output, const Tensor& input,
                                    const Tensor& target, const OptionalTensor& weight,
                                    const Tensor& row_stats, const Tensor& total_weight,
                                    const LossOptions& options, Mask2 output_mask, Run&& run) {
  check_saved(input, target, value_or_undefined(weight), grad_output, row_stats, total_weight,
              options);
  const TargetKind kind = kind_of(input, target, options.label_smoothing);
  const bool probabilities = kind == TargetKind::kProbabilities;
  const Tensor grad_input = empty_gradient<int64_t>(input, input.scalar_type());
  Tensor grad_target;
  if (output_mask[1] && probabilities) {
    grad_target = empty_gradient<int64_t>(input, target.scalar_type());
  }
  Operands operands(input, target, weight);
  operands.arrange(probabilities, grad_input);
  const Tensor dloss = contiguous_gradient(grad_output);
  auto p = backward_params(operands, kind, dloss, row_stats, total_weight, options);
  p.grad_layout = *find_layout(grad_input);
  p.grad_input = output_mask[0] ? grad_input.mutable_data_ptr() : nullptr;
  p.grad_target = grad_target.defined() ? grad_target.mutable_data_ptr() : nullptr;
  if (input.numel() != 0 && (p.grad_input != nullptr || p.grad_target != nullptr)) run(p);
  return {output_mask[0] ? grad_input : Tensor(), grad_target};
}

// The thread that reads an element of the logits also writes it.
template <class Run>
void cross_entropy_backward_inplace_with(const Tensor& grad_output, const Tensor& input,
                                         const Tensor& target, const OptionalTensor& weight,
                                         const Tensor& row_stats, const Tensor& total_weight,
                                         const LossOptions& options, Run&& run) {
  check_saved(input, target, value_or_undefined(weight), grad_output, row_stats, total_weight,
              options);
  check_inplace_logits(input, target);
  Operands operands(input, target, weight);
  operands.arrange(/*probabilities=*/false, input);
  const Tensor dloss = contiguous_gradient(grad_output);
  auto p = backward_params(operands, kind_of(input, target, options.label_smoothing), dloss,
                           row_stats, total_weight, options);
  p.grad_layout = p.layout;
  p.grad_input = input.mutable_data_ptr();
  if (input.numel() != 0) run(p);
}

template <class Run>
Tensor3 cross_entropy_double_backward_with(const OptionalTensor& v, const OptionalTensor& u,
                                           const Tensor& grad_output, const Tensor& input,
                                           const Tensor& target, const OptionalTensor& weight,
                                           const Tensor& row_stats, const Tensor& total_weight,
                                           const LossOptions& options, Mask3 output_mask,
                                           Run&& run) {
  check_saved(input, target, value_or_undefined(weight), grad_output, row_stats, total_weight,
              options);
  const TargetKind kind = kind_of(input, target, options.label_smoothing);
  const bool probabilities = kind == TargetKind::kProbabilities;
  const Tensor grad_input = empty_gradient<int64_t>(input, input.scalar_type());
  Operands operands(input, target, weight);
  operands.input = in_order_of(input, grad_input);
  operands.target = probabilities ? in_order_of(target, grad_input) : target.contiguous();
  check_direction(v, input, kGradGradInput);
  if (probabilities) check_direction(u, target, kGradGradTarget);
  auto arranged = [&](const OptionalTensor& tensor, const Tensor& like, const char* name) {
    if (!tensor.has_value() || !tensor->defined()) return Tensor();
    check_has_storage(*tensor, name);
    return in_order_of(tensor->to(like.scalar_type()), grad_input);
  };
  const Tensor v_arranged = arranged(v, input, kGradGradInput);
  const Tensor u_arranged = probabilities ? arranged(u, target, kGradGradTarget) : Tensor();
  const Tensor dloss = contiguous_gradient(grad_output);
  const bool want_target = output_mask[2] && probabilities;
  const Tensor grad_target =
      want_target ? empty_gradient<int64_t>(input, target.scalar_type()) : Tensor();
  const Tensor per_row = output_mask[0] ? at::empty_like(row_stats.select(0, 0)) : Tensor();

  CrossEntropyDoubleBackwardParams p{operands.problem(kind, options, grad_output.scalar_type())};
  set_saved(p, dloss, row_stats, total_weight);
  p.v = v_arranged.defined() ? v_arranged.const_data_ptr() : nullptr;
  p.u = u_arranged.defined() ? u_arranged.const_data_ptr() : nullptr;
  p.grad_grad_output = per_row.defined() ? per_row.mutable_data_ptr() : nullptr;
  p.grad_input = output_mask[1] ? grad_input.mutable_data_ptr() : nullptr;
  p.grad_target = want_target ? grad_target.mutable_data_ptr() : nullptr;
  if (p.rows != 0) run(p);

  Tensor grad_grad_output = per_row;
  if (output_mask[0]) {
    if (options.reduction != at::Reduction::None) grad_grad_output = per_row.sum();
    // Divides once, after the sum. A mean over no rows is 0 / 0, as in native.
    if (options.reduction == at::Reduction::Mean)
      grad_grad_output = grad_grad_output / total_weight;
    grad_grad_output = grad_grad_output.to(grad_output.scalar_type());
  }
  return {grad_grad_output, output_mask[1] ? grad_input : Tensor(), grad_target};
}

Tensor3 cross_entropy_forward_cpu(const Tensor& input, const Tensor& target,
                                  const OptionalTensor& weight, int64_t reduction,
                                  int64_t ignore_index, double label_smoothing, ScalarType dtype,
                                  double z_loss, bool) {
  return cross_entropy_forward_with(input, target, weight,
                                    {reduction, ignore_index, label_smoothing, z_loss}, dtype,
                                    cross_entropy_cpu);
}

Tensor2 cross_entropy_backward_cpu_kernel(const Tensor& grad_output, const Tensor& input,
                                          const Tensor& target, const OptionalTensor& weight,
                                          const Tensor& row_stats, const Tensor& total_weight,
                                          int64_t reduction, int64_t ignore_index,
                                          double label_smoothing, Mask2 output_mask,
                                          double z_loss) {
  return cross_entropy_backward_with(grad_output, input, target, weight, row_stats, total_weight,
                                     {reduction, ignore_index, label_smoothing, z_loss},
                                     output_mask, cross_entropy_backward_cpu);
}

void cross_entropy_backward_inplace_cpu(const Tensor& grad_output, const Tensor& input,
                                        const Tensor& target, const OptionalTensor& weight,
                                        const Tensor& row_stats, const Tensor& total_weight,
                                        int64_t reduction, int64_t ignore_index,
                                        double label_smoothing, double z_loss) {
  cross_entropy_backward_inplace_with(grad_output, input, target, weight, row_stats, total_weight,
                                      {reduction, ignore_index, label_smoothing, z_loss},
                                      cross_entropy_backward_cpu);
}

Tensor3 cross_entropy_double_backward_cpu_kernel(const OptionalTensor& v, const OptionalTensor& u,
                                                 const Tensor& grad_output, const Tensor& input,
                                                 const Tensor& target, const OptionalTensor& weight,
                                                 const Tensor& row_stats,
                                                 const Tensor& total_weight, int64_t reduction,
                                                 int64_t ignore_index, double label_smoothing,
                                                 Mask3 output_mask, double z_loss) {
  return cross_entropy_double_backward_with(v, u, grad_output, input, target, weight, row_stats,
                                            total_weight,
                                            {reduction, ignore_index, label_smoothing, z_loss},
                                            output_mask, cross_entropy_double_backward_cpu);
}

#ifdef WARPWRIGHT_WITH_CUDA
Tensor3 cross_entropy_forward_cuda(const Tensor& input, const Tensor& target,
                                   const OptionalTensor& weight, int64_t reduction,
                                   int64_t ignore_index, double label_smoothing, ScalarType dtype,
                                   double z_loss, bool) {
  const CudaCall call(input);
  const LossOptions options{reduction, ignore_index, label_smoothing, z_loss};
  Tensor3 outputs =
      cross_entropy_forward_with(input, target, weight, options, dtype, [&](CrossEntropyParams& p) {
        const bool has_labels = p.kind != TargetKind::kProbabilities;
        p.error = has_labels ? error_record(ErrorSource::kCrossEntropy) : nullptr;
        const CrossEntropyPlan plan =
            choose_cross_entropy(p, current_device_info(), sm90_path_available());
        const Workspace workspace(plan.workspace_bytes, input);
        launch_cross_entropy(p, plan, workspace.data(), call.stream);
        if (!has_labels) return;
        const auto error = check_strict(call.stream);
        TORCH_CHECK_INDEX(!error.has_value(), error.value_or(""));
      });
  settle_unbatched_mean(input, target, options, std::get<0>(outputs), std::get<2>(outputs));
  return outputs;
}

Tensor2 cross_entropy_backward_cuda(const Tensor& grad_output, const Tensor& input,
                                    const Tensor& target, const OptionalTensor& weight,
                                    const Tensor& row_stats, const Tensor& total_weight,
                                    int64_t reduction, int64_t ignore_index, double label_smoothing,
                                    Mask2 output_mask, double z_loss) {
  const CudaCall call(input);
  return cross_entropy_backward_with(
      grad_output, input, target, weight, row_stats, total_weight,
      {reduction, ignore_index, label_smoothing, z_loss}, output_mask,
      [&](const CrossEntropyBackwardParams& p) {
        launch_cross_entropy_backward(p, choose_cross_entropy_backward(p, current_device_info()),
                                      call.stream);
      });
}

void cross_entropy_backward_inplace_cuda(const Tensor& grad_output, const Tensor& input,
                                         const Tensor& target, const OptionalTensor& weight,
                                         const Tensor& row_stats, const Tensor& total_weight,
                                         int64_t reduction, int64_t ignore_index,
                                         double label_smoothing, double z_loss) {
  const CudaCall call(input);
  cross_entropy_backward_inplace_with(
      grad_output, input, target, weight, row_stats, total_weight,
      {reduction, ignore_index, label_smoothing, z_loss}, [&](const CrossEntropyBackwardParams& p) {
        launch_cross_entropy_backward(p, choose_cross_entropy_backward(p, current_device_info()),
                                      call.stream);
      });
}

Tensor3 cross_entropy_double_backward_cuda(const OptionalTensor& v, const OptionalTensor& u,
                                           const Tensor& grad_output, const Tensor& input,
                                           const Tensor& target, const OptionalTensor& weight,
                                           const Tensor& row_stats, const Tensor& total_weight,
                                           int64_t reduction, int64_t ignore_index,
                                           double label_smoothing, Mask3 output_mask,
                                           double z_loss) {
  const CudaCall call(input);
  return cross_entropy_double_backward_with(
      v, u, grad_output, input, target, weight, row_stats, total_weight,
      {reduction, ignore_index, label_smoothing, z_loss}, output_mask,
      [&](const CrossEntropyDoubleBackwardParams& p) {
        launch_cross_entropy_double_backward(p, call.stream);
      });
}
#endif

// ---- Meta ----

Tensor3 cross_entropy_forward_meta(const Tensor& input, const Tensor& target,
                                   const OptionalTensor& weight, int64_t reduction,
                                   SymInt ignore_index, double label_smoothing, ScalarType dtype,
                                   double z_loss, bool) {
  check_cross_entropy(input, target, value_or_undefined(weight),
                      {reduction, ignore_index, label_smoothing, z_loss});
  check_kernel_dtypes(input, target, dtype);
  return empty_outputs<SymInt>(input, kind_of(input, target, label_smoothing), reduction, dtype);
}

Tensor2 cross_entropy_backward_meta(const Tensor& grad_output, const Tensor& input,
                                    const Tensor& target, const OptionalTensor& weight,
                                    const Tensor& row_stats, const Tensor& total_weight,
                                    int64_t reduction, SymInt ignore_index, double label_smoothing,
                                    Mask2 output_mask, double z_loss) {
  check_saved(input, target, value_or_undefined(weight), grad_output, row_stats, total_weight,
              {reduction, ignore_index, label_smoothing, z_loss});
  const bool want_target = output_mask[1] && is_probabilities(input, target);
  return {output_mask[0] ? empty_gradient<SymInt>(input, input.scalar_type()) : Tensor(),
          want_target ? empty_gradient<SymInt>(input, target.scalar_type()) : Tensor()};
}

void cross_entropy_backward_inplace_meta(const Tensor& grad_output, const Tensor& input,
                                         const Tensor& target, const OptionalTensor& weight,
                                         const Tensor& row_stats, const Tensor& total_weight,
                                         int64_t reduction, SymInt ignore_index,
                                         double label_smoothing, double z_loss) {
  check_saved(input, target, value_or_undefined(weight), grad_output, row_stats, total_weight,
              {reduction, std::move(ignore_index), label_smoothing, z_loss});
  check_inplace_logits(input, target);
}

Tensor3 cross_entropy_double_backward_meta(const OptionalTensor& v, const OptionalTensor& u,
                                           const Tensor& grad_output, const Tensor& input,
                                           const Tensor& target, const OptionalTensor& weight,
                                           const Tensor& row_stats, const Tensor& total_weight,
                                           int64_t reduction, SymInt ignore_index,
                                           double label_smoothing, Mask3 output_mask,
                                           double z_loss) {
  const auto [grad_input, grad_target] = cross_entropy_backward_meta(
      grad_output, input, target, weight, row_stats, total_weight, reduction, ignore_index,
      label_smoothing, {output_mask[1], output_mask[2]}, z_loss);
  check_direction(v, input, kGradGradInput);
  if (is_probabilities(input, target)) check_direction(u, target, kGradGradTarget);
  return {output_mask[0] ? at::empty_like(grad_output, at::MemoryFormat::Contiguous) : Tensor(),
          grad_input, grad_target};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def(
      "cross_entropy_forward(Tensor input, Tensor target, Tensor? weight, int reduction, "
      "SymInt ignore_index, float label_smoothing, ScalarType dtype, float z_loss=0.0, "
      "bool inplace_backward=False) -> "
      "(Tensor loss, Tensor row_stats, Tensor total_weight)",
      tags);
  m.def(
      "cross_entropy_backward(Tensor grad_output, Tensor input, Tensor target, Tensor? weight, "
      "Tensor row_stats, Tensor total_weight, int reduction, SymInt ignore_index, "
      "float label_smoothing, bool[2] output_mask, float z_loss=0.0) -> (Tensor grad_input, Tensor "
      "grad_target)",
      tags);
  m.def(
      "cross_entropy_backward_(Tensor grad_output, Tensor(a!) input, Tensor target, "
      "Tensor? weight, Tensor row_stats, Tensor total_weight, int reduction, SymInt ignore_index, "
      "float label_smoothing, float z_loss=0.0) -> ()",
      tags);
  m.def("cross_entropy_lse(Tensor input, Tensor row_stats) -> Tensor", tags);
  m.def(
      "cross_entropy_double_backward(Tensor? grad_grad_input, Tensor? grad_grad_target, "
      "Tensor grad_output, Tensor input, Tensor target, Tensor? weight, Tensor row_stats, "
      "Tensor total_weight, int reduction, SymInt ignore_index, float label_smoothing, "
      "bool[3] output_mask, float z_loss=0.0) -> "
      "(Tensor grad_grad_output, Tensor grad_input, Tensor grad_target)",
      tags);
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) {
  m.impl("cross_entropy_forward", cross_entropy_forward_cpu);
  m.impl("cross_entropy_backward", cross_entropy_backward_cpu_kernel);
  m.impl("cross_entropy_backward_", cross_entropy_backward_inplace_cpu);
  m.impl("cross_entropy_lse", lse_of);
  m.impl("cross_entropy_double_backward", cross_entropy_double_backward_cpu_kernel);
}

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) {
  m.impl("cross_entropy_forward", cross_entropy_forward_cuda);
  m.impl("cross_entropy_backward", cross_entropy_backward_cuda);
  m.impl("cross_entropy_backward_", cross_entropy_backward_inplace_cuda);
  m.impl("cross_entropy_lse", lse_of);
  m.impl("cross_entropy_double_backward", cross_entropy_double_backward_cuda);
}
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) {
  m.impl("cross_entropy_forward", cross_entropy_forward_meta);
  m.impl("cross_entropy_backward", cross_entropy_backward_meta);
  m.impl("cross_entropy_backward_", cross_entropy_backward_inplace_meta);
  m.impl("cross_entropy_lse", lse_of);
  m.impl("cross_entropy_double_backward", cross_entropy_double_backward_meta);
}

}  // namespace warpwright
