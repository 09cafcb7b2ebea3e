// split_qkv: query, key and value as views of a fused projection's result. The node of the views
// takes the gradients of attention's backward without a copy (thirds.h).
#include "ops/attention/torch/thirds.h"

#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>

#include "ops/attention/torch/common.h"
#include "torch/plain.h"
#include "torch/view_output.h"

namespace warpwright {
namespace {

// The matrix whose rows' thirds the gradients are; undefined if they are not, or if it has gaps.
Tensor matrix_of_thirds(const variable_list& grads) {
  const Tensor& q = grads[0];
  for (const Tensor& grad : grads) {
    if (!is_plain(grad)) return {};
  }
  if (!are_thirds(q, grads[1], grads[2], -2)) return {};
  std::vector<int64_t> sizes = q.sizes().vec(), strides = q.strides().vec();
  const int64_t width = q.size(-2) * q.size(-1);
  sizes.pop_back(), strides.pop_back();
  sizes.back() = 3 * width, strides.back() = 1;
  const Tensor matrix = q.as_strided(sizes, strides);
  return matrix.is_non_overlapping_and_dense() ? matrix : Tensor();
}

struct SplitQkvBackward {
  static constexpr const char* kName = kSplitQkvNode;
  struct Attributes {};
  static variable_list backward(const Attributes&, const variable_list&, const variable_list& given,
                                const NeedsGrad&) {
    variable_list grads = given;
    for (const Tensor& one : given) {
      if (!one.defined()) continue;
      for (Tensor& grad : grads) {
        if (!grad.defined()) grad = at::zeros_like(one);
      }
    }
    if (!at::GradMode::is_enabled()) {
      if (const Tensor matrix = matrix_of_thirds(grads); matrix.defined()) return {matrix};
    }
    const Tensor& q = grads[0];
    c10::SymDimVector sizes(q.sym_sizes().begin(), q.sym_sizes().end() - 1);
    sizes.back() = 3 * q.sym_size(-2) * q.sym_size(-1);
    return {at::stack(grads, -3).view_symint(sizes)};
  }
};

Tensors3 thirds_of(const Tensor& qkv, int64_t heads) {
  const c10::SymInt width = qkv.sym_size(-1) / 3, head = width / heads;
  auto third = [&](int i) {
    return qkv.narrow_symint(-1, width * i, width).unflatten_symint(-1, {heads, head});
  };
  return {third(0), third(1), third(2)};
}

Tensors3 split_qkv(const Tensor& qkv, int64_t heads) {
  TORCH_CHECK(heads > 0, "split_qkv: heads: expected a positive number, got ", heads);
  TORCH_CHECK(qkv.dim() >= 1 && qkv.sym_size(-1) % 3 == 0 && qkv.sym_size(-1) / 3 % heads == 0,
              "split_qkv: qkv: expected a last dimension of 3 * heads * head size with ", heads,
              " heads, got sizes ", qkv.sym_sizes());
  auto node = is_plain(qkv) ? make_node<SplitQkvBackward>({}, qkv) : nullptr;
  if (!node) return thirds_of(qkv, heads);
  const at::AutoGradMode without_nodes(false);
  Tensors3 thirds = thirds_of(qkv, heads);
  const auto& [q, k, v] = thirds;
  set_history(variable_list{q, k, v}, node);
  for (const Tensor* third : {&q, &k, &v}) forbid_writes(*third);
  return thirds;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def("split_qkv(Tensor(a) qkv, int heads) -> (Tensor(a) query, Tensor(a) key, Tensor(a) value)",
        {at::Tag::pt2_compliant_tag});
  m.impl("split_qkv", c10::DispatchKey::CompositeImplicitAutograd, TORCH_FN(split_qkv));
}

}  // namespace warpwright
