// Gradients of amax, logsumexp, var and std by a dense input: each element is a function of the
// input's element and of two or three numbers per output. Memory-bound: the input is read once and
// the gradient is written once.
#pragma once

#include "ops/reduction/reduction.h"

namespace warpwright {

enum class ReductionGradient : int8_t {
  kMaximum,      // x == value ? scale : other
  kExponential,  // scale * exp(x - value)
  kDeviation,    // scale * (x - value)
};

// The memory order of the input and its gradient, in which the innermost axis has stride 1. Along
// reduced axes the output_stride is 0.
struct GradientLayout {
  bool fits = true;  // otherwise there are more axes than the table holds
  ReductionAxis inner{1, 1, 0, true};
  ReductionTable outer;
};

// Reorders `axes`, those of a dense tensor.
inline GradientLayout gradient_layout(ReductionAxis* axes, int count) {
  for (int i = 0; i < count; ++i) {
    if (axes[i].is_reduced) axes[i].output_stride = 0;
  }
  const int merged = merge_axes(axes, count);
  GradientLayout layout;
  if (merged > 0) layout.inner = axes[0];
  // One run per launch must fit into its indices.
  layout.fits = merged <= kReductionAxes + 1 && layout.inner.size < (int64_t{1} << 27);
  for (int i = 1; i < merged && layout.fits; ++i) {
    layout.outer.axes[layout.outer.count++] = axes[i];
    layout.outer.total *= axes[i].size;
  }
  return layout;
}

struct ReductionGradientParams {
  ReductionGradient kind;
  DType dtype;  // of input and gradient; the numbers per output have its accumulator's type
  int64_t numel;
  const void* input;
  void* gradient;                        // null: only `counts` is wanted
  const void *value, *scale, *other;     // contiguous over the kept axes
  unsigned long long* counts = nullptr;  // zeroed; how often an input equals the output's value
  GradientLayout layout;
};

enum class GradientPath : int8_t {
  kRows,      // vectors lie inside one reduced run: one look at the output's numbers each
  kColumns,   // vectors lie along kept outputs: their numbers are vectors too
  kElements,  // each element finds its output
};

constexpr int kGradientThreads = 256;
constexpr int kGradientLoads = 4;  // vectors per thread in flight

struct ReductionGradientPlan {
  GradientPath path;
  int64_t vec;   // elements per access: 16 bytes, or 1
  int64_t slab;  // elements per launch: whole runs, a multiple of 16 bytes
  const char* reason;

  int64_t blocks_of(int64_t numel) const {
    return ceil_div(ceil_div(numel, vec), int64_t{kGradientThreads} * kGradientLoads);
  }
};

inline ReductionGradientPlan choose_reduction_gradient(const ReductionGradientParams& p) {
  const int64_t vec = 16 / dtype_size(p.dtype);
  const auto addresses =
      reinterpret_cast<uintptr_t>(p.input) | reinterpret_cast<uintptr_t>(p.gradient);
  const ReductionAxis& inner = p.layout.inner;
  const bool is_aligned = addresses % 16 == 0;
  // Indices have 31 bits, and a step beyond the last run of a slab must not leave them.
  constexpr int64_t kMaxSlab = (int64_t{1} << 31) - (int64_t{1} << 24);
  const int64_t unit = inner.size * vec;
  const int64_t slab = std::max(kMaxSlab / unit, int64_t{1}) * unit;
  if (!is_aligned || inner.size < vec) {
    return {GradientPath::kElements, 1, slab,
            is_aligned ? "runs shorter than a vector" : "memory off 16 bytes"};
  }
  if (inner.size % vec != 0) {
    return {GradientPath::kElements, vec, slab, "runs that end inside vectors"};
  }
  if (inner.is_reduced) return {GradientPath::kRows, vec, slab, "vectors inside reduced runs"};
  if (inner.output_stride != 1) {
    return {GradientPath::kElements, vec, slab, "outputs apart in memory"};
  }
  return {GradientPath::kColumns, vec, slab, "vectors along the outputs"};
}

#ifdef WARPWRIGHT_WITH_CUDA
void launch_reduction_gradient(const ReductionGradientParams& params,
                               const ReductionGradientPlan& plan, cudaStream_t stream);
#endif

}  // namespace warpwright
