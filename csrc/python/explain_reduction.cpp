// explain() of reductions and scans. Pure host functions, as in explain.cpp.
#ifdef WARPWRIGHT_WITH_CUDA
#undef WARPWRIGHT_WITH_CUDA
#endif
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

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

// `dims`: wrapped; all if there are none.
Lines explain_reduction(const std::string& kind, const std::string& dtype,
                        const TensorLayout& input, const std::vector<int64_t>& dims,
                        const DeviceInfo& device) {
  constexpr const char* kNames[] = {"sum", "mean", "amax", "logsumexp", "var", "std"};
  ReductionParams p{};
  for (int i = 0; i < 6; ++i) {
    if (kind == kNames[i]) p.kind = static_cast<Reduction>(i);
  }
  p.dtype = p.output_dtype = dtype_from(dtype);
  p.input = reinterpret_cast<const void*>(input.address);
  if (numel(input) == 0) return {{"forward, backward", "nothing to do"}};
  std::vector<ReductionAxis> axes(input.sizes.size());
  auto set = [&](const std::vector<int64_t>& strides) {
    int64_t pitch = 1;
    for (size_t d = axes.size(); d-- > 0;) {
      const bool is_reduced =
          dims.empty() || std::count(dims.begin(), dims.end(), static_cast<int64_t>(d)) > 0;
      axes[d] = {input.sizes[d], strides[d], pitch, is_reduced};
      if (!is_reduced) pitch *= input.sizes[d];
    }
    p.layout = canonical_layout(axes.data(), static_cast<int>(axes.size()));
  };
  set(input.strides);
  std::string copied;
  if (!p.layout.fits) {
    ReductionAxis whole[2] = {{p.layout.per_output(), 1, 0, true},
                              {p.layout.outputs(), p.layout.per_output(), 1, false}};
    p.layout = canonical_layout(whole, 2);
    p.input = nullptr;
    copied = "of a copy with the reduced dimensions last, because the layout has too many axes: ";
  }
  const bool is_linear = p.kind == Reduction::kSum || p.kind == Reduction::kMean;
  return {{"forward", copied + describe(choose_reduction(p, device))},
          {"backward", is_linear ? "a view of the result's gradient" : "ATen's formula"}};
}

}  // namespace

void define_explain_reduction(py::module_& m) {
  m.def("explain_reduction", &explain_reduction);
  m.def("explain_scan", &explain_scan);
}

}  // namespace warpwright
