// Cross entropy on the CPU, forward. Row losses are summed in row order, so the result does not
// depend on the number of threads. If the gradient is wanted too, a block of rows runs its
// backward while it is in cache.
#include <memory>

#include "ops/cross_entropy/cpu/rows.h"

namespace warpwright {
namespace {

// Bytes of logits that stay in a core's cache from a forward to a backward.
constexpr int64_t kBlockBytes = 1 << 18;

template <class T, class Q, TargetKind kKind>
void forward(const CrossEntropyParams& p, const CrossEntropyBackwardParams* gradient) {
  using Compute = CpuCompute<T>;
  const CrossEntropyView<T, Q> view(p);
  constexpr bool kHasLabels = kKind != TargetKind::kProbabilities;
  double total = kHasLabels ? check_labels(view) : static_cast<double>(p.classes == 0 ? 0 : p.rows);

  const bool reduced = p.reduction != LossReduction::kNone;
  *static_cast<Compute*>(p.total_weight) = reduced ? static_cast<Compute>(total) : Compute(0);

  Compute* row_max = static_cast<Compute*>(p.stats);
  Compute* row_sum = row_max + p.rows;
  std::unique_ptr<Compute[]> scratch(new Compute[(kKind == TargetKind::kLabels ? 1 : 2) * p.rows]);
  Compute* row_loss = scratch.get();
  Compute* linear_of = row_loss + p.rows;
  Compute* mass_of = row_max + 2 * p.rows;

  const auto find_sums = WARPWRIGHT_LOOPS(cross_entropy_forward_loops);
  auto forward_block = [&](int64_t begin, int64_t end) {
    find_sums(p, {row_max, row_sum, linear_of, mass_of}, begin, end);
    for (int64_t row = begin; row < end && p.classes != 0; ++row) {
      const bool finite = row_max[row] - row_max[row] == 0;
      if (!finite) row_sum[row] = std::numeric_limits<Compute>::quiet_NaN();
    }
    // The logarithms, vectorised, written to where the losses will be. Always for AVX2: at::vec's
    // logarithms may differ in bits with AVX-512.
    at::vec::map<Compute>([](Vectorized<Compute> sum) { return sum.log(); }, row_loss + begin,
                          row_sum + begin, end - begin);
    for (int64_t row = begin; row < end; ++row) {
      const Compute log_sum = p.classes == 0 ? Compute(0) : row_loss[row];
      if (p.lse != nullptr) static_cast<Compute*>(p.lse)[row] = row_max[row] + log_sum;
      if constexpr (kHasLabels) {
        const int64_t label = label_of(p, row);
        if (label == p.ignore_index) {
          row_loss[row] = 0;
          if constexpr (kKind == TargetKind::kSmoothedLabels) mass_of[row] = 0;
          continue;
        }
        const int64_t at = row_offset(p.layout, row) + label * p.layout.class_stride;
        const Compute distance = static_cast<Compute>(view.input[at]) - row_max[row];
        row_loss[row] = view.weight_of(label) * (log_sum - distance);
        if constexpr (kKind == TargetKind::kSmoothedLabels) {
          row_loss[row] = view.keep * row_loss[row] + (mass_of[row] * log_sum - linear_of[row]);
          mass_of[row] += view.keep * view.weight_of(label);
        }
      } else {
        row_loss[row] = mass_of[row] * log_sum - linear_of[row];
      }
      if (p.z_loss != 0 && p.classes != 0) {
        const Compute lse = row_max[row] + log_sum;
        row_loss[row] += static_cast<Compute>(p.z_loss) * lse * lse;
      }
    }
  };
  const int64_t row_bytes = std::max<int64_t>(1, p.classes * sizeof(T));
  const int64_t block = gradient == nullptr ? std::max<int64_t>(1, p.rows)
                                            : ceil_div(std::max(kBlockBytes, row_bytes), row_bytes);
  at::parallel_for(0, p.rows, view.rows_per_task(), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row += block) {
      const int64_t last = std::min(end, row + block);
      forward_block(row, last);
      if (gradient != nullptr) WARPWRIGHT_LOOPS(cross_entropy_backward_loops)(*gradient, row, last);
    }
  });

  if (!reduced) {
    for (int64_t row = 0; row < p.rows; ++row) {
      write_either<T>(p.loss, view.loss_is_compute, row, row_loss[row]);
    }
    return;
  }
  double sum = 0;
  for (int64_t row = 0; row < p.rows; ++row) sum += row_loss[row];
  if (p.reduction == LossReduction::kMean) sum /= total;
  write_either<T>(p.loss, view.loss_is_compute, 0, static_cast<Compute>(sum));
}

}  // namespace

void cross_entropy_cpu(const CrossEntropyParams& p) {
  for_problem(p, [&]<class T, class Q, TargetKind kKind>() { forward<T, Q, kKind>(p, nullptr); });
}

void cross_entropy_gradient_cpu(const CrossEntropyGradientParams& p) {
  const CrossEntropyBackwardParams gradient = backward_of(p);
  for_problem(p, [&]<class T, class Q, TargetKind kKind>() {
    if constexpr (kKind != TargetKind::kProbabilities) {
      forward<T, Q, kKind>(p, p.grad_input == nullptr ? nullptr : &gradient);
    }
  });
}

}  // namespace warpwright
