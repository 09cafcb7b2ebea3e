// grad_norm on every dispatch key: the norm of all gradients and the factor that clips them.
// `counter`: on a GPU, one zero that is zero again afterwards.
#include <ATen/ops/empty.h>

#include <vector>

#include "ops/optim/optim.h"
#include "ops/optim/optim_torch.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include "torch/cuda.h"
#endif

namespace warpwright {
namespace {

using NormSignature = Tensor(TensorList grads, TensorList counter, double max_norm,
                             const OptionalTensor& grad_scale);

// ---- checks and output shape ----

void check_grad_norm(TensorList grads, TensorList counter, const OptionalTensor& grad_scale) {
  const char* op = "grad_norm";
  TORCH_CHECK(!grads.empty(), op, ": grads: expected at least one tensor");
  const c10::Device device = grads[0].device();
  for (size_t i = 0; i < grads.size(); ++i) {
    TORCH_CHECK(grads[i].layout() == at::kStrided, op, ": grads[", i,
                "]: expected a dense tensor, got ", grads[i].layout());
    TORCH_CHECK_NOT_IMPLEMENTED(is_floating(grads[i].scalar_type()), op, ": grads[", i,
                                "]: expected float32, float64, bfloat16 or float16, got ",
                                grads[i].scalar_type());
    TORCH_CHECK(grads[i].device() == device, op, ": grads[", i, "]: expected device ", device,
                ", got ", grads[i].device());
  }
  check_counter(op, counter, device, device.is_cuda());
  check_scalar(op, "grad_scale", grad_scale, device, {at::kFloat});
}

Tensor empty_norm(const Tensor& grad) { return at::empty({2}, grad.options().dtype(at::kDouble)); }

// ---- CPU and CUDA ----

template <class Run>
Tensor grad_norm_with(TensorList grads, TensorList counter, double max_norm,
                      const OptionalTensor& grad_scale, Run&& run) {
  check_grad_norm(grads, counter, grad_scale);
  Tensor result = empty_norm(grads[0]);
  std::vector<GradNormTensor> tensors;
  std::vector<Tensor> copies;
  tensors.reserve(grads.size());
  for (const Tensor& grad : grads) {
    check_has_storage(grad, "grad_norm: grads");
    Tensor dense = grad;
    if (!grad.is_non_overlapping_and_dense()) copies.push_back(dense = grad.contiguous());
    tensors.push_back({dense.numel(), dense.const_data_ptr(), dtype_of(dense)});
  }
  GradNormParams p{tensors.data(),
                   static_cast<int64_t>(tensors.size()),
                   max_norm,
                   float_pointer(grad_scale, "grad_norm: grad_scale"),
                   result.mutable_data_ptr<double>(),
                   nullptr};
  if (result.is_cuda()) p.counter = counter_pointer(counter[0]);
  run(p);
  return result;
}

constexpr auto norm_cpu = [](const auto&... args) {
  return grad_norm_with(args..., grad_norm_cpu);
};

#ifdef WARPWRIGHT_WITH_CUDA
constexpr auto norm_cuda = [](TensorList grads, const auto&... args) {
  const CudaCall call(first_of("grad_norm", "grads", grads));
  return grad_norm_with(grads, args..., [&](const GradNormParams& p) {
    const GradNormPlan plan = choose_grad_norm(p);
    const Tensor workspace =
        at::empty({plan.workspace_bytes()}, grads[0].options().dtype(at::kByte));
    launch_grad_norm(p, plan, workspace.mutable_data_ptr(), call.stream);
  });
};
#endif

// ---- Meta ----

constexpr auto norm_meta = [](TensorList grads, TensorList counter, double,
                              const OptionalTensor& grad_scale) {
  check_grad_norm(grads, counter, grad_scale);
  return empty_norm(grads[0]);
};

// ---- Autograd ----

constexpr auto norm_autograd = [](TensorList grads, TensorList counter, const auto&... scalars) {
  static const auto op = find_op<NormSignature>("warpwright::grad_norm");
  check_not_recorded("grad_norm", grads);
  Tensor result = below_autograd([&] { return op.call(grads, counter, scalars...); });
  bump_versions(counter);
  return result;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def(
      "grad_norm(Tensor[] grads, Tensor(a!)[] counter, float max_norm, Tensor? grad_scale=None) "
      "-> Tensor",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) { m.impl("grad_norm", Kernel<NormSignature>::of<norm_cpu>); }

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) {
  m.impl("grad_norm", Kernel<NormSignature>::of<norm_cuda>);
}
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) {
  m.impl("grad_norm", Kernel<NormSignature>::of<norm_meta>);
}

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) {
  m.impl("grad_norm", Kernel<NormSignature>::of<norm_autograd>);
}

}  // namespace warpwright
