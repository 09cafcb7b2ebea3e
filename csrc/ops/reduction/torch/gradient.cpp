// Layouts and numbers of the one-pass gradients, as their kernel takes them.
#include "ops/reduction/torch/gradient.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include "ops/reduction/cpu_gradient.h"
#include "torch/plain.h"

namespace warpwright {
namespace {

// The axes of `input` in memory, with the outputs' pitches in the order of the dimensions.
GradientLayout layout_of(const Tensor& input, const DimMask& mask) {
  c10::SmallVector<ReductionAxis, 8> axes(static_cast<size_t>(input.dim()));
  int64_t pitch = 1;
  for (int64_t d = input.dim() - 1; d >= 0; --d) {
    const auto at = static_cast<size_t>(d);
    axes[at] = {input.size(d), input.stride(d), pitch, mask[at]};
    if (!mask[at]) pitch *= input.size(d);
  }
  return gradient_layout(axes.data(), static_cast<int>(axes.size()));
}

// A tensor of numbers per output as the kernel reads it.
Tensor per_output(const Tensor& numbers, const Tensor& input) {
  return numbers.defined() ? numbers.to(accumulator_of(input)).contiguous() : numbers;
}

void run(ReductionGradientParams p, const Tensor& input, const DimMask& mask) {
  p.dtype = dtype_of(input);
  p.numel = input.numel();
  p.input = input.const_data_ptr();
  p.layout = layout_of(input, mask);
#ifdef WARPWRIGHT_WITH_CUDA
  if (input.is_cuda()) {
    const CudaCall cuda(input);
    return launch_reduction_gradient(p, choose_reduction_gradient(p), cuda.stream);
  }
#endif
  reduction_gradient_cpu(p);
}

#ifdef WARPWRIGHT_WITH_CUDA
Tensor count_maxima_cuda(const Tensor& input, const DimMask& mask, const Tensor& value) {
  Tensor counts = at::zeros(value.sizes(), value.options().dtype(at::kLong));
  const Tensor numbers = per_output(value, input);
  run({.kind = ReductionGradient::kMaximum,
       .value = numbers.const_data_ptr(),
       .counts = static_cast<unsigned long long*>(counts.mutable_data_ptr())},
      input, mask);
  return counts;
}
#endif

}  // namespace

bool takes_gradient_kernel(const Tensor& input, const DimMask& mask, const Tensor& grad) {
  if (at::GradMode::is_enabled() || !is_plain(input) || !is_plain(grad)) return false;
  return is_floating(input.scalar_type()) && input.numel() > 0 &&
         input.is_non_overlapping_and_dense() && layout_of(input, mask).fits;
}

Tensor reduction_gradient(ReductionGradient kind, const Tensor& input, const DimMask& mask,
                          const Tensor& value, const Tensor& scale, const Tensor& other) {
  check_has_storage(input, "reduction: input");
  Tensor gradient = at::empty_like(input);
  const Tensor numbers[] = {per_output(value, input), per_output(scale, input),
                            per_output(other, input)};
  run({.kind = kind,
       .gradient = gradient.mutable_data_ptr(),
       .value = numbers[0].const_data_ptr(),
       .scale = numbers[1].const_data_ptr(),
       .other = other.defined() ? numbers[2].const_data_ptr() : nullptr},
      input, mask);
  return gradient;
}

Tensor count_maxima(const Tensor& input, const DimMask& mask,
                    [[maybe_unused]] const Tensor& value) {
  check_has_storage(input, "reduction: input");
#ifdef WARPWRIGHT_WITH_CUDA
  if (input.is_cuda()) return count_maxima_cuda(input, mask, value);
#endif
  return reduce_with(input,
                     {"reduction: input", ReductionKind::kMax, mask, true, accumulator_of(input)},
                     [](const ReductionParams& p, const Tensor&) { count_maxima_cpu(p); });
}

}  // namespace warpwright
