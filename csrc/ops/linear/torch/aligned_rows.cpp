// One copy of a large gradient to padded rows, for the two products that read it.
#include "ops/linear/torch/aligned_rows.h"

#include <ATen/ops/empty.h>

namespace warpwright {
namespace {

// From these sizes on the copy costs less than the products lose (docs/kernels/linear.md).
constexpr int64_t kElements = int64_t{1} << 22;
constexpr int64_t kFeatures = 256;

}  // namespace

Tensor with_aligned_rows(const Tensor& grad_output, const OptionalTensor& input,
                         std::array<bool, 3> output_mask) {
  const bool both = output_mask[0] && output_mask[1];
  if (!both || !is_16bit(grad_output.scalar_type())) return grad_output;
  const int64_t cols = grad_output.size(-1);
  const int64_t vector = 16 / static_cast<int64_t>(grad_output.element_size());
  const bool is_large = grad_output.numel() >= kElements && input->size(-1) >= kFeatures;
  if (!is_large || cols % vector == 0 || !grad_output.is_contiguous()) return grad_output;
  const int64_t rows = grad_output.numel() / cols;
  const int64_t padded = (cols + vector - 1) / vector * vector;
  const Tensor copy = at::empty({rows, padded}, grad_output.options()).narrow(1, 0, cols);
  copy.copy_(grad_output.view({rows, cols}));
  return copy.view(grad_output.sizes());
}

}  // namespace warpwright
