// Checks of cross entropy's operands, in native's order and words.
#include "ops/cross_entropy/torch/common.h"
#include "torch/dispatch.h"

namespace warpwright {
namespace {

void check_one_target_a_row(const Tensor& target) {
  TORCH_CHECK(target.dim() <= 1,
              "0D or 1D target tensor expected, multi-target not supported, got ", target.dim(),
              "D");
}

void check_label_shape(const Tensor& input, const Tensor& target) {
  const auto sizes = input.sym_sizes();
  const auto labels = target.sym_sizes();
  if (input.dim() == 1) {
    TORCH_CHECK_VALUE(target.dim() != 1 || labels[0] == 1,
                      "For 1D input, 1D target must have size 1, but got target size: ",
                      target.dim() == 1 ? labels[0] : c10::SymInt(0));
    check_one_target_a_row(target);
    return;
  }
  const c10::SymInt batch = target.dim() == 0 ? c10::SymInt(0) : labels[0];
  TORCH_CHECK_VALUE(sizes[0] == batch, "Expected input batch_size (", sizes[0],
                    ") to match target batch_size (", batch, ").");
  if (input.dim() == 2) {
    check_one_target_a_row(target);
  } else if (input.dim() == 4) {
    TORCH_CHECK(target.dim() == 3,
                "only batches of spatial targets supported (3D tensors) but got targets of "
                "dimension: ",
                target.dim());
    TORCH_CHECK(labels[1] == sizes[2] && labels[2] == sizes[3], "size mismatch (got input: ", sizes,
                " , target: ", labels);
  } else {
    c10::SmallVector<c10::SymInt, 6> expected{sizes[0]};
    expected.append(sizes.begin() + 2, sizes.end());
    TORCH_CHECK(labels == c10::SymIntArrayRef(expected), "Expected target size ",
                c10::SymIntArrayRef(expected), ", got ", labels);
  }
}

}  // namespace

void check_cross_entropy_dtypes(const Tensor& input, const Tensor& target) {
  if (is_probabilities(input, target)) {
    TORCH_CHECK(at::isFloatingType(target.scalar_type()),
                "Expected floating point type for target with class probabilities, got ",
                target.scalar_type());
  }
  TORCH_CHECK_NOT_IMPLEMENTED(is_floating(input.scalar_type()),
                              "\"cross_entropy\" not implemented for '", input.scalar_type(), "'");
}

void check_cross_entropy(const Tensor& input, const Tensor& target, const Tensor& weight,
                         const LossOptions& options) {
  const auto& [reduction, ignore_index, label_smoothing, z_loss, inplace] = options;
  check_cross_entropy_dtypes(input, target);
  TORCH_CHECK_INDEX(input.dim() > 0, "Dimension specified as 1 but tensor has no dimensions");
  TORCH_CHECK(!(label_smoothing > 1),
              "label_smoothing must be between 0.0 and 1.0. Got: ", label_smoothing);
  TORCH_CHECK_VALUE(reduction >= 0 && reduction <= 2, reduction,
                    " is not a valid value for reduction");
  TORCH_CHECK(target.device() == input.device(),
              "Expected all tensors to be on the same device, but target is on ", target.device(),
              " and input is on ", input.device());
  if (is_probabilities(input, target)) {
    TORCH_CHECK(ignore_index < 0, "ignore_index is not supported for floating point target");
    TORCH_CHECK_NOT_IMPLEMENTED(is_floating(target.scalar_type()),
                                "\"cross_entropy\" not implemented for probabilities of type '",
                                target.scalar_type(), "'");
  } else {
    check_label_shape(input, target);
    const bool takes_bytes = input.dim() <= 2;
    const bool is_label =
        target.scalar_type() == at::kLong || (takes_bytes && target.scalar_type() == at::kByte);
    // Both of native's messages; newer releases use the second.
    const auto message = "expected scalar type Long but found ";
    const auto hint = takes_bytes ? " (expected target dtype to be Long or Byte)" : "";
    // Native's CUDA kernels for at most 2 dimensions reject other types of labels; its other
    // kernels report a wrong pointer.
    if (input.is_cuda() && input.dim() <= 2) {
      TORCH_CHECK_NOT_IMPLEMENTED(is_label, message, target.scalar_type(), hint);
    }
    TORCH_CHECK(is_label, message, target.scalar_type(), hint);
  }
  if (!weight.defined()) return;
  const c10::SymInt classes = input.sym_size(class_dim(input));
  TORCH_CHECK(weight.dim() == 1 && weight.sym_size(0) == classes,
              "cross_entropy: weight tensor should be defined either for all ", classes,
              " classes or no classes but got weight tensor of shape: ", weight.sym_sizes());
  TORCH_CHECK(weight.device() == input.device(),
              "Expected all tensors to be on the same device, but weight is on ", weight.device(),
              " and input is on ", input.device());
}

void settle_unbatched_mean(const Tensor& input, const Tensor& target, const LossOptions& options,
                           const Tensor& loss, const Tensor& total_weight) {
  if (!input.is_cuda() || input.dim() != 1 || options.reduction != at::Reduction::Mean ||
      options.label_smoothing > 0 || is_probabilities(input, target)) {
    return;
  }
  const Tensor ignored = target.reshape({}).eq(options.ignore_index.expect_int());
  Tensor(loss).masked_fill_(ignored, 0);
  Tensor(total_weight).masked_fill_(ignored, 1);
}

}  // namespace warpwright
