// explain() of reductions and scans. Pure host functions, as in explain.cpp.
#ifdef WARPWRIGHT_WITH_CUDA
#undef WARPWRIGHT_WITH_CUDA
#endif
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "ops/reduction/global_avg_pool2d.h"
#include "ops/reduction/gradient.h"
#include "ops/reduction/reduction.h"
#include "ops/scan/scan.h"
#include "python/explain.h"

namespace py = pybind11;

namespace warpwright {
namespace {

// ---- scans ----

// As if the input were dense. Copies and the gates begin where allocations begin.
Lines explain_scan(const std::string& op, const std::string& dtype, const TensorLayout& input,
                   int64_t dim) {
  ScanParams p{};
  p.dtype = dtype_from(dtype);
  for (size_t d = 0; d < input.sizes.size(); ++d) {
    const auto place = static_cast<int64_t>(d);
    (place < dim ? p.outer : place == dim ? p.length : p.inner) *= input.sizes[d];
  }
  if (p.length == 0 || p.outer * p.inner == 0) return {{"forward, backward", "nothing to do"}};
  constexpr uintptr_t kFresh = 256;  // not null, which stands for no gates
  if (op == "linear_scan") p.gate = reinterpret_cast<const void*>(kFresh);
  if (op == "cumprod") p.kind = ScanKind::kProduct;
  if (op == "logcumsumexp") p.kind = ScanKind::kLogSumExp;
  p.input = reinterpret_cast<const void*>(input.address);
  const std::string forward = describe(choose_scan(p));
  p.input = nullptr;
  const bool is_recurrence = p.kind != ScanKind::kSum;
  if (is_recurrence) p.gate = reinterpret_cast<const void*>(kFresh);
  return {{"forward", forward},
          {"backward", (is_recurrence ? "linear_scan over " : "") + describe(choose_scan(p)) +
                           ", the other way"}};
}

// ---- reductions ----

using Axes = std::vector<ReductionAxis>;

// The axes of a tensor with these strides. A dense output has the kept axes in their order.
Axes axes_of(const TensorLayout& input, const std::vector<int64_t>& strides,
             const std::vector<int64_t>& dims) {
  Axes axes(input.sizes.size());
  int64_t pitch = 1;
  for (size_t d = axes.size(); d-- > 0;) {
    const bool is_reduced =
        dims.empty() || std::count(dims.begin(), dims.end(), static_cast<int64_t>(d)) > 0;
    axes[d] = {input.sizes[d], strides[d], pitch, is_reduced};
    if (!is_reduced) pitch *= input.sizes[d];
  }
  return axes;
}

// Whether memory from the first to the last element has each element once, and nothing else.
bool is_dense(Axes axes) {
  std::sort(axes.begin(), axes.end(), [](const ReductionAxis& a, const ReductionAxis& b) {
    return a.stride != b.stride ? a.stride < b.stride : a.size < b.size;
  });
  int64_t pitch = 1;
  for (const ReductionAxis& axis : axes) {
    if (axis.size > 1 && axis.stride != pitch) return false;
    pitch *= axis.size;
  }
  return true;
}

constexpr const char* kGradientByFormula =
    "ATen's formula: the input is not dense, or has many axes";

// The kernel that writes the gradient of amax, logsumexp, var and std, or ATen's operators.
std::string describe_gradient(DType dtype, const TensorLayout& input, Axes axes) {
  ReductionGradientParams p{};
  p.dtype = dtype;
  p.input = reinterpret_cast<const void*>(input.address);
  const bool dense = is_dense(axes);
  p.layout = gradient_layout(axes.data(), static_cast<int>(axes.size()));
  if (!dense || !p.layout.fits) return kGradientByFormula;
  const ReductionGradientPlan plan = choose_reduction_gradient(p);
  return "one pass, " + std::to_string(plan.vec) + " element(s) per access: " + plan.reason;
}

// `dims`: wrapped; all if there are none.
Lines explain_reduction(const std::string& kind, const std::string& dtype,
                        const TensorLayout& input, const std::vector<int64_t>& dims,
                        const DeviceInfo& device) {
  constexpr const char* kNames[] = {"sum", "mean", "amax", "logsumexp", "var", "std"};
  ReductionParams p{};
  for (int i = 0; i < 6; ++i) {
    if (kind == kNames[i]) p.kind = static_cast<ReductionKind>(i);
  }
  p.dtype = p.output_dtype = dtype_from(dtype);
  p.input = reinterpret_cast<const void*>(input.address);
  if (numel(input) == 0) return {{"forward, backward", "nothing to do"}};
  Axes axes = axes_of(input, input.strides, dims);
  p.layout = canonical_layout(axes.data(), static_cast<int>(axes.size()));
  std::string copied;
  if (!p.layout.fits) {
    ReductionAxis whole[2] = {{p.layout.per_output(), 1, 0, true},
                              {p.layout.outputs(), p.layout.per_output(), 1, false}};
    p.layout = canonical_layout(whole, 2);
    p.input = nullptr;
    copied = "of a copy with the reduced dimensions last, because the layout has too many axes: ";
  }
  const bool is_linear = p.kind == ReductionKind::kSum || p.kind == ReductionKind::kMean;
  return {{"forward", copied + describe(choose_reduction(p, device))},
          {"backward",
           is_linear ? "a view of the result's gradient"
                     : describe_gradient(p.dtype, input, axes_of(input, input.strides, dims))}};
}

Lines explain_reduction_cpu(const std::string& kind, const std::string& dtype,
                            const TensorLayout& input, const std::vector<int64_t>& dims) {
  if (numel(input) == 0) return {{"forward, backward", "nothing to do"}};
  Axes axes = axes_of(input, input.strides, dims);
  const ReductionLayout layout = canonical_layout(axes.data(), static_cast<int>(axes.size()));
  const int64_t lanes = dtype_from(dtype) == DType::kFloat64 ? 4 : 8;
  const char* forward =
      !layout.fits                   ? "along rows of a copy: the layout has too many axes"
      : walks_columns(layout, lanes) ? "across rows, with the sums of a run of columns in cache: "
                                       "the innermost dimension is kept"
      : layout.is_rows               ? "along rows, in blocks: the innermost dimension is reduced"
                                     : "along rows, in blocks: there are fewer columns than lanes";
  const char* numbers = kind == "amax" ? "" : "; partial results are double";
  if (kind == "sum" || kind == "mean") {
    return {{"forward", std::string(forward) + numbers},
            {"backward", "a view of the result's gradient"}};
  }
  axes = axes_of(input, input.strides, dims);
  const bool dense = is_dense(axes);
  const bool fits = gradient_layout(axes.data(), static_cast<int>(axes.size())).fits;
  return {{"forward", std::string(forward) + numbers},
          {"backward", dense && fits ? "one pass over the input" : kGradientByFormula}};
}

// ---- global average pooling ----

// `last`: channels_last. The gradient begins where an allocation begins.
Lines explain_global_avg_pool2d(const std::string& dtype, const TensorLayout& input, bool last,
                                const DeviceInfo& device) {
  if (numel(input) == 0) return {{"forward, backward", "nothing to do"}};
  const size_t dims = input.sizes.size();
  const std::vector<int64_t> planes{static_cast<int64_t>(dims) - 2, static_cast<int64_t>(dims) - 1};
  const Lines mean = explain_reduction("mean", dtype, input, planes, device);
  RepeatMeansParams p{};
  p.shape = {.dtype = dtype_from(dtype),
             .images = dims == 4 ? input.sizes[0] : 1,
             .channels = input.sizes.at(dims - 3),
             .pixels = input.sizes[dims - 2] * input.sizes[dims - 1],
             .channels_last = last};
  return {mean.front(), {"backward", describe(choose_repeat_means(p))}};
}

}  // namespace

void define_explain_reduction(py::module_& m) {
  m.def("explain_reduction", &explain_reduction);
  m.def("explain_reduction_cpu", &explain_reduction_cpu);
  m.def("explain_scan", &explain_scan);
  m.def("explain_global_avg_pool2d", &explain_global_avg_pool2d);
}

}  // namespace warpwright
