// Loss and gradient in one op, below autograd:
//
//   cross_entropy_forward_gradient  the forward's results, and d loss / d input
//   cross_entropy_scale_            its backward: times the incoming gradient, unless that is 1
//   cross_entropy_chunk_            the same for a chunk of rows, overwriting the logits
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/where.h>

#include <array>
#include <cmath>
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

// The kernels for the device of `input`.
void run_gradient(const Tensor& input, CrossEntropyGradientParams& p) {
  if (input.is_cpu()) return cross_entropy_gradient_cpu(p);
#ifdef WARPWRIGHT_WITH_CUDA
  const CudaCall call(input);
  p.error = error_record(ErrorSource::kCrossEntropy);
  const CrossEntropyFusedPlan plan =
      choose_cross_entropy_fused(p, current_device_info(), sm90_path_available());
  const Workspace workspace(plan.workspace_bytes, input);
  launch_cross_entropy_fused(p, plan, workspace.data(), call.stream);
  const auto error = check_strict(call.stream);
  TORCH_CHECK_INDEX(!error.has_value(), error.value_or(""));
#endif
}

void check_gradient(const Tensor& input, const Tensor& target, const Tensor& weight,
                    const LossOptions& options, ScalarType dtype) {
  check_cross_entropy(input, target, weight, options);
  check_kernel_dtypes(input, target, dtype);
  TORCH_CHECK(!is_probabilities(input, target) && options.reduction != at::Reduction::None,
              "cross_entropy_forward_gradient: expected labels and a reduced loss");
}

// ---- CPU and CUDA ----

Tensor4 forward_gradient(const Tensor& input, const Tensor& target, const OptionalTensor& weight,
                         int64_t reduction, int64_t ignore_index, double label_smoothing,
                         ScalarType dtype, double z_loss) {
  const LossOptions options{reduction, ignore_index, label_smoothing, z_loss};
  check_gradient(input, target, value_or_undefined(weight), options, dtype);
  const TargetKind kind = kind_of(input, target, label_smoothing);
  const auto [loss, row_stats, total_weight] =
      empty_outputs<int64_t>(input, kind, reduction, dtype);
  const Tensor grad_input = empty_gradient<int64_t>(input, input.scalar_type());
  Operands operands(input, target, weight);
  operands.arrange(/*probabilities=*/false, grad_input);
  CrossEntropyGradientParams p{{operands.problem(kind, options, dtype)}};
  p.loss = loss.mutable_data_ptr();
  p.stats = row_stats.mutable_data_ptr();
  p.total_weight = total_weight.mutable_data_ptr();
  p.grad_layout = *find_layout(grad_input);
  p.grad_input = grad_input.mutable_data_ptr();
  run_gradient(input, p);
  settle_unbatched_mean(input, target, options, loss, total_weight);
  return {loss, row_stats, total_weight, grad_input};
}

void check_scale(const Tensor& gradient, const Tensor& factor) {
  TORCH_CHECK_NOT_IMPLEMENTED(is_floating(gradient.scalar_type()),
                              "cross_entropy_scale_: gradient: expected a floating-point type of "
                              "at most 64 bits, got ",
                              gradient.scalar_type());
  TORCH_CHECK(gradient.is_non_overlapping_and_dense(),
              "cross_entropy_scale_: gradient: expected a dense tensor, got strides ",
              gradient.sym_strides());
  check_same_device(factor, gradient, "cross_entropy_scale_: factor");
  TORCH_CHECK(factor.sym_numel() == 1, "cross_entropy_scale_: factor: expected one number, got ",
              factor.sym_sizes());
  TORCH_CHECK(factor.scalar_type() == gradient.scalar_type() ||
                  factor.scalar_type() == accum_type(gradient.scalar_type()),
              "cross_entropy_scale_: factor: expected ", gradient.scalar_type(), " or ",
              accum_type(gradient.scalar_type()), ", got ", factor.scalar_type());
}

void check_scale_storage(const Tensor& gradient, const Tensor& factor) {
  check_has_storage(gradient, "cross_entropy_scale_: gradient");
  check_has_storage(factor, "cross_entropy_scale_: factor");
}

void scale_cpu(const Tensor& gradient, const Tensor& factor) {
  check_scale(gradient, factor);
  check_scale_storage(gradient, factor);
  const double value = *factor.to(at::kDouble).const_data_ptr<double>();
  if (value == 1) return;
  if (std::isfinite(value) && !std::signbit(value)) {
    Tensor(gradient).mul_(factor.reshape({}));
  } else {  // the zeros of ignored rows stay 0, not NaN or -0
    Tensor(gradient).mul_(at::where(gradient == 0, 1, factor.reshape({})).to(gradient.dtype()));
  }
}

#ifdef WARPWRIGHT_WITH_CUDA
void scale_cuda(const Tensor& gradient, const Tensor& factor) {
  check_scale(gradient, factor);
  check_scale_storage(gradient, factor);
  const CudaCall call(gradient);
  launch_cross_entropy_scale(gradient.mutable_data_ptr(), gradient.numel(), dtype_of(gradient),
                             factor.const_data_ptr(), dtype_of(factor), call.stream);
}
#endif

// ---- Meta ----

Tensor4 forward_gradient_meta(const Tensor& input, const Tensor& target,
                              const OptionalTensor& weight, int64_t reduction, SymInt ignore_index,
                              double label_smoothing, ScalarType dtype, double z_loss) {
  check_gradient(input, target, value_or_undefined(weight),
                 {reduction, ignore_index, label_smoothing, z_loss}, dtype);
  return std::tuple_cat(
      empty_outputs<SymInt>(input, kind_of(input, target, label_smoothing), reduction, dtype),
      std::make_tuple(empty_gradient<SymInt>(input, input.scalar_type())));
}

void scale_meta(const Tensor& gradient, const Tensor& factor) { check_scale(gradient, factor); }

}  // namespace

// ---- a chunk of rows ----

void cross_entropy_chunk_(const Tensor& logits, const Tensor& target, const Tensor& weight,
                          const ChunkOptions& options, const Tensor& scale, const Tensor& loss,
                          const Tensor& lse) {
  const ScalarType accum = accum_type(logits.scalar_type());
  if (options.softcap != 0) {
    // s = cap tanh(z / cap), d s / d z = 1 - tanh^2.
    const Tensor t = at::tanh(logits.to(accum).div(options.softcap));
    const Tensor capped = t * options.softcap;
    ChunkOptions uncapped = options;
    uncapped.softcap = 0;
    cross_entropy_chunk_(capped, target, weight, uncapped, scale, loss, lse);
    if (options.gradient) logits.copy_(capped.mul_(1 - t * t));
    return;
  }
  const int64_t rows = logits.size(0);
  TORCH_CHECK(logits.dim() == 2 && (logits.stride(1) == 1 || logits.size(1) == 1),
              "cross_entropy_chunk_: logits: expected rows of neighbours, got strides ",
              logits.strides());
  TORCH_CHECK(loss.scalar_type() == accum && loss.is_contiguous() && loss.numel() == rows,
              "cross_entropy_chunk_: loss: expected ", rows, " numbers of ", accum, ", got ",
              loss.scalar_type(), " ", loss.sizes());
  TORCH_CHECK(
      !lse.defined() || (lse.scalar_type() == accum && lse.is_contiguous() && lse.numel() == rows),
      "cross_entropy_chunk_: lse: expected ", rows, " numbers of ", accum);
  TORCH_CHECK(!scale.defined() || (scale.scalar_type() == accum && scale.is_contiguous() &&
                                   (scale.numel() == 1 || scale.numel() == rows)),
              "cross_entropy_chunk_: scale: expected one number of ", accum, " or one a row");
  const LossOptions loss_options{at::Reduction::None, options.ignore_index, options.label_smoothing,
                                 options.z_loss};
  check_cross_entropy(logits, target, weight, loss_options);
  TORCH_CHECK(!is_probabilities(logits, target), "cross_entropy_chunk_: target: expected labels");
  const TargetKind kind = kind_of(logits, target, options.label_smoothing);
  const Tensor stats = at::empty({num_stats(kind), rows}, loss.options());
  const Tensor total_weight = at::empty({}, loss.options());
  Operands operands(logits, target, optional_if_defined(weight));
  operands.target = target.contiguous();
  CrossEntropyGradientParams p{{operands.problem(kind, loss_options, accum)}};
  p.loss = loss.mutable_data_ptr();
  p.stats = stats.mutable_data_ptr();
  p.total_weight = total_weight.mutable_data_ptr();
  p.lse = lse.defined() ? lse.mutable_data_ptr() : nullptr;
  p.grad_output = scale.defined() ? scale.const_data_ptr() : nullptr;
  p.grad_per_row = scale.defined() && scale.numel() == rows && rows != 1;
  p.grad_layout = p.layout;
  p.grad_input = options.gradient ? logits.mutable_data_ptr() : nullptr;
  run_gradient(logits, p);
}

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def(
      "cross_entropy_forward_gradient(Tensor input, Tensor target, Tensor? weight, int reduction, "
      "SymInt ignore_index, float label_smoothing, ScalarType dtype, float z_loss=0.0) -> "
      "(Tensor loss, Tensor row_stats, Tensor total_weight, Tensor grad_input)",
      tags);
  m.def("cross_entropy_scale_(Tensor(a!) gradient, Tensor factor) -> ()", tags);
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) {
  m.impl("cross_entropy_forward_gradient", forward_gradient);
  m.impl("cross_entropy_scale_", scale_cpu);
}

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) {
  m.impl("cross_entropy_forward_gradient", forward_gradient);
  m.impl("cross_entropy_scale_", scale_cuda);
}
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) {
  m.impl("cross_entropy_forward_gradient", forward_gradient_meta);
  m.impl("cross_entropy_scale_", scale_meta);
}

}  // namespace warpwright
