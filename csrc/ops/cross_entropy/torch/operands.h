// Inputs of the kernels of cross entropy's ops: output shapes, and operands in a form that kernels
// take.
#pragma once

#include <optional>
#include <tuple>

#include "host/error_word.h"
#include "ops/cross_entropy/cross_entropy.h"
#include "ops/cross_entropy/torch/common.h"
#include "torch/check_argument.h"
#include "torch/dense.h"
#include "torch/dispatch.h"

namespace warpwright {

// ---- output shapes ----

inline TargetKind kind_of(const Tensor& input, const Tensor& target, double label_smoothing) {
  if (is_probabilities(input, target)) return TargetKind::kProbabilities;
  // One class is its own uniform distribution; unsmoothed, its gradient is exactly 0.
  const bool smoothed = label_smoothing > 0 && input.sym_size(class_dim(input)) != 1;
  return smoothed ? TargetKind::kSmoothedLabels : TargetKind::kLabels;
}

// The sizes of row_stats; from the second on, the labels' sizes.
template <class Int>
c10::SmallVector<Int, 6> stats_sizes(const Tensor& input, TargetKind kind) {
  const auto sizes = sizes_of(input, Int());
  c10::SmallVector<Int, 6> result{Int(num_stats(kind))};
  for (int64_t d = 0; d < input.dim(); ++d) {
    if (d != class_dim(input)) result.push_back(sizes[d]);
  }
  return result;
}

// (loss, row_stats, total_weight); a row's index is the flat index of its label.
template <class Int>
std::tuple<Tensor, Tensor, Tensor> empty_outputs(const Tensor& input, TargetKind kind,
                                                 int64_t reduction, at::ScalarType dtype) {
  const auto sizes = stats_sizes<Int>(input, kind);
  const c10::ArrayRef<Int> all(sizes);
  const auto options = input.options().dtype(accum_type(input.scalar_type()));
  return {empty_of(reduction == at::Reduction::None ? all.slice(1) : c10::ArrayRef<Int>(),
                   input.options().dtype(dtype)),
          empty_of(all, options), empty_of(c10::ArrayRef<Int>(), options)};
}

inline std::optional<RowLayout> find_layout(const Tensor& tensor) {
  const auto rows = find_rows<int64_t>(tensor);
  if (!rows) return std::nullopt;
  return RowLayout{rows->inner, rows->outer_stride, rows->inner_stride, rows->class_stride};
}

// ---- checks ----

// The pairs of types with kernels; `cross_entropy` converts to one of them.
inline void check_kernel_dtypes(const Tensor& input, const Tensor& target,
                                at::ScalarType loss_dtype) {
  const at::ScalarType type = input.scalar_type(), accum = accum_type(type);
  TORCH_CHECK(loss_dtype == type || loss_dtype == accum, "cross_entropy: dtype: expected ", type,
              " or ", accum, ", got ", loss_dtype);
  if (!is_probabilities(input, target)) return;
  const at::ScalarType q = target.scalar_type();
  TORCH_CHECK(q == type || q == accum, "cross_entropy: target: expected probabilities of type ",
              type, " or ", accum, ", got ", q);
}

// A direction of the double backward; undefined: zero.
inline void check_direction(const OptionalTensor& tensor, const Tensor& like, const char* name) {
  if (!tensor.has_value() || !tensor->defined()) return;
  check_argument(*tensor, name, like.sym_sizes(), tensor->scalar_type(), like);
}

// Whether one walk covers both. Strips of pixels stay inside an image of either.
inline bool walks_like(const std::optional<RowLayout>& layout, const RowLayout& other) {
  return layout && layout->is_rows() == other.is_rows() &&
         (layout->is_rows() || layout->inner == other.inner);
}

// The operands in a form the kernels take, kept alive while a kernel is set up.
struct Operands {
  Tensor input, target, weight;

  Operands(const Tensor& input_, const Tensor& target_, const std::optional<Tensor>& weight_)
      : input(input_), target(target_) {
    check_has_storage(input, "cross_entropy: input");
    check_has_storage(target, "cross_entropy: target");
    if (weight_.has_value() && weight_->defined()) {
      check_has_storage(*weight_, "cross_entropy: weight");
      weight = weight_->to(accum_type(input.scalar_type())).contiguous();
    }
  }

  // Makes logits and probabilities walkable together; `like` (if defined) prescribes the walk.
  void arrange(bool probabilities, const Tensor& like) {
    if (!probabilities) target = target.contiguous();
    auto layout = find_layout(input);
    auto target_layout = probabilities ? find_layout(target) : layout;
    const auto wanted = like.defined() ? find_layout(like) : layout;
    const bool fits = wanted && walks_like(layout, *wanted) && walks_like(target_layout, *wanted);
    if (fits) return;
    const Tensor order =
        like.defined() ? like : empty_gradient<int64_t>(input, input.scalar_type());
    input = in_order_of(input, order);
    if (probabilities) target = in_order_of(target, order);
  }

  CrossEntropyProblem problem(TargetKind kind, const LossOptions& options,
                              at::ScalarType loss_dtype) const {
    const int64_t classes = input.size(class_dim(input));
    int64_t rows = 1;
    for (int64_t d = 0; d < input.dim(); ++d) rows *= d == class_dim(input) ? 1 : input.size(d);
    const bool probabilities = kind == TargetKind::kProbabilities;
    const RowLayout layout = *find_layout(input);
    CrossEntropyProblem p;
    p.dtype = dtype_of(input);
    p.target_dtype = dtype_of(target);
    p.loss_dtype = *find_dtype(loss_dtype);
    p.kind = kind;
    p.reduction = static_cast<LossReduction>(options.reduction);
    p.rows = rows;
    p.classes = classes;
    p.ignore_index = options.ignore_index.guard_int(__FILE__, __LINE__);
    const double smoothing = options.label_smoothing;
    p.label_smoothing = kind != TargetKind::kLabels && smoothing > 0 ? smoothing : 0;
    p.z_loss = options.z_loss;
    p.layout = layout;
    p.target_layout = probabilities ? *find_layout(target) : layout;
    p.input = input.const_data_ptr();
    p.target = target.const_data_ptr();
    p.weight = weight.defined() ? weight.const_data_ptr() : nullptr;
    return p;
  }
};

}  // namespace warpwright
