// sgd_step_ and adam_step_ on every dispatch key. The lists hold one tensor per parameter; empty
// lists: absent. warpwright.optim makes the calls.
#include <ATen/ops/empty_like.h>

#include <cmath>
#include <utility>
#include <vector>

#include "ops/optim/optim.h"
#include "ops/optim/optim_torch.h"
#include "torch/check_argument.h"
#include "torch/weight_copies.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include "torch/cuda.h"
#endif

namespace warpwright {
namespace {

using SgdSignature = void(TensorList params, TensorList grads, TensorList buffers,
                          TensorList masters, TensorList copies, double lr,
                          const OptionalTensor& lr_tensor, double momentum, double dampening,
                          double weight_decay, bool nesterov, bool maximize, bool first_step,
                          bool zero_grad, const OptionalTensor& grad_scale,
                          const OptionalTensor& found_inf, const OptionalTensor& clip);
using AdamSignature = void(TensorList params, TensorList grads, TensorList exp_avgs,
                           TensorList exp_avg_sqs, TensorList max_exp_avg_sqs, TensorList steps,
                           TensorList masters, TensorList copies, TensorList counter, double lr,
                           const OptionalTensor& lr_tensor, double beta1,
                           const OptionalTensor& beta1_tensor, double beta2,
                           const OptionalTensor& beta2_tensor, double weight_decay, double eps,
                           bool decoupled_weight_decay, bool maximize, bool zero_grad,
                           const OptionalTensor& grad_scale, const OptionalTensor& found_inf,
                           const OptionalTensor& clip);

// ---- checks ----

struct NamedList {
  const char* name;
  TensorList tensors;
  bool optional;   // may be empty
  bool is_state;   // may be fp32 next to 16-bit parameters
  bool is_master;  // fp32
};

void check_like_params(const char* op, TensorList params, const NamedList& list) {
  if (list.optional && list.tensors.empty()) return;
  TORCH_CHECK(list.tensors.size() == params.size(), op, ": ", list.name, ": expected ",
              params.size(), " tensors, one per parameter, got ", list.tensors.size());
  for (size_t i = 0; i < params.size(); ++i) {
    const Tensor& param = params[i];
    const Tensor& tensor = list.tensors[i];
    TORCH_CHECK(tensor.layout() == at::kStrided, op, ": ", list.name, "[", i,
                "]: expected a dense tensor, got ", tensor.layout());
    TORCH_CHECK(tensor.sym_sizes() == param.sym_sizes(), op, ": ", list.name, "[", i,
                "]: expected shape ", param.sym_sizes(), ", got ", tensor.sym_sizes());
    TORCH_CHECK(tensor.device() == params[0].device(), op, ": ", list.name, "[", i,
                "]: expected device ", params[0].device(), ", got ", tensor.device());
    const at::ScalarType dtype = list.is_master  ? at::kFloat
                                 : list.is_state ? list.tensors[0].scalar_type()
                                                 : params[0].scalar_type();
    TORCH_CHECK(tensor.scalar_type() == dtype, op, ": ", list.name, "[", i, "]: expected ", dtype,
                ", got ", tensor.scalar_type());
  }
}

bool is_16_bit(at::ScalarType type) { return type == at::kBFloat16 || type == at::kHalf; }

void check_step(const char* op, TensorList params, std::initializer_list<NamedList> lists) {
  TORCH_CHECK(!params.empty(), op, ": params: expected at least one tensor");
  TORCH_CHECK_NOT_IMPLEMENTED(is_floating(params[0].scalar_type()), op,
                              ": params: expected float32, float64, bfloat16 or float16, got ",
                              params[0].scalar_type());
  check_like_params(op, params, {"params", params, false, false, false});
  for (const NamedList& list : lists) {
    check_like_params(op, params, list);
    if (list.tensors.empty()) continue;
    const at::ScalarType type = list.tensors[0].scalar_type();
    const at::ScalarType param = params[0].scalar_type();
    TORCH_CHECK(type == param || (type == at::kFloat && is_16_bit(param)), op, ": ", list.name,
                ": expected ", param, is_16_bit(param) ? " or Float" : "", ", got ", type);
  }
}

void check_same_dtype(const char* op, const NamedList& a, const NamedList& b) {
  if (a.tensors.empty() || b.tensors.empty()) return;
  TORCH_CHECK(a.tensors[0].scalar_type() == b.tensors[0].scalar_type(), op, ": ", b.name,
              ": expected ", a.tensors[0].scalar_type(), " as ", a.name, ", got ",
              b.tensors[0].scalar_type());
}

void check_common(const char* op, TensorList params, const OptionalTensor& lr,
                  const OptionalTensor& grad_scale, const OptionalTensor& found_inf,
                  const OptionalTensor& clip) {
  const c10::Device device = params[0].device();
  check_scalar(op, "lr_tensor", lr, device, {at::kFloat, at::kDouble});
  check_scalar(op, "grad_scale", grad_scale, device, {at::kFloat});
  check_scalar(op, "found_inf", found_inf, device, {at::kFloat});
  check_scalar(op, "clip", clip, device, {at::kDouble}, 2);
}

// 16-bit copies of float32 parameters, which the step writes too.
void check_copies(const char* op, TensorList params, TensorList masters, TensorList copies) {
  if (copies.empty()) return;
  check_like_params(op, params, {"copies", copies, false, true, false});
  TORCH_CHECK(is_16_bit(copies[0].scalar_type()), op,
              ": copies[0]: expected BFloat16 or Half, got ", copies[0].scalar_type());
  TORCH_CHECK(params[0].scalar_type() == at::kFloat, op,
              ": params[0]: expected Float beside copies, got ", params[0].scalar_type());
  TORCH_CHECK(masters.empty(), op, ": masters: expected none beside copies, got ", masters.size());
}

void check_sgd(TensorList params, TensorList grads, TensorList buffers, TensorList masters,
               TensorList copies, double momentum) {
  const char* op = "sgd_step_";
  const NamedList buffer_list{"momentum_buffers", buffers, momentum == 0, true, false};
  const NamedList master_list{"masters", masters, true, false, true};
  check_step(op, params, {{"grads", grads, false, false, false}, buffer_list, master_list});
  check_same_dtype(op, master_list, buffer_list);
  check_copies(op, params, masters, copies);
}

void check_adam(TensorList params, TensorList grads, TensorList exp_avgs, TensorList exp_avg_sqs,
                TensorList max_exp_avg_sqs, TensorList steps, TensorList masters, TensorList copies,
                TensorList counter) {
  const char* op = "adam_step_";
  const NamedList first{"exp_avgs", exp_avgs, false, true, false};
  const NamedList second{"exp_avg_sqs", exp_avg_sqs, false, true, false};
  const NamedList largest{"max_exp_avg_sqs", max_exp_avg_sqs, true, true, false};
  const NamedList master_list{"masters", masters, true, false, true};
  check_step(op, params,
             {{"grads", grads, false, false, false}, first, second, largest, master_list});
  check_same_dtype(op, first, second);
  check_same_dtype(op, first, largest);
  check_same_dtype(op, master_list, first);
  check_copies(op, params, masters, copies);
  TORCH_CHECK(steps.size() == params.size(), op, ": state_steps: expected ", params.size(),
              " tensors, one per parameter, got ", steps.size());
  for (size_t i = 0; i < steps.size(); ++i) {
    TORCH_CHECK(steps[i].sym_numel() == 1 && steps[i].device() == steps[0].device() &&
                    steps[i].scalar_type() == steps[0].scalar_type() &&
                    (steps[i].scalar_type() == at::kFloat || steps[i].scalar_type() == at::kDouble),
                op, ": state_steps[", i, "]: expected one Float or Double on one device, got ",
                steps[i].sym_numel(), " ", steps[i].scalar_type(), " on ", steps[i].device());
  }
  const c10::Device device = params[0].device();
  TORCH_CHECK(steps[0].device() == device || steps[0].is_cpu(), op,
              ": state_steps: expected device ", device, " or cpu, got ", steps[0].device());
  check_counter(op, counter, device, device.is_cuda() && steps[0].is_cuda());
}

// ---- tensors as the kernels see them ----

bool same_order(const Tensor& a, const Tensor& b) {
  for (int64_t d = 0; d < a.dim(); ++d) {
    if (a.size(d) != 1 && a.stride(d) != b.stride(d)) return false;
  }
  return true;
}

// The lists in one dense memory order a parameter. Operands in another order are copied, and what
// the step writes is copied back by finish().
class StepTensors {
 public:
  std::vector<StepTensor> tensors;

  explicit StepTensors(TensorList params) : tensors(params.size()), orders_(params.size()) {
    for (size_t i = 0; i < params.size(); ++i) {
      tensors[i].numel = params[i].numel();
      if (!params[i].is_non_overlapping_and_dense()) orders_[i] = at::empty_like(params[i]);
    }
    params_ = params;
    add("params", params, true, [](StepTensor& t, void* data) { t.param = data; });
  }

  template <class Set>
  void add(const char* name, TensorList list, bool written, Set&& set) {
    for (size_t i = 0; i < list.size(); ++i) {
      check_has_storage(list[i], name);
      const Tensor& order = orders_[i].defined() ? orders_[i] : params_[i];
      Tensor tensor = list[i];
      if (tensor.numel() != 0 && !same_order(tensor, order)) {
        tensor = at::empty_like(order, list[i].options()).copy_(list[i]);
        copies_.push_back({written ? list[i] : Tensor(), tensor});
      }
      set(tensors[i],
          written ? tensor.mutable_data_ptr() : const_cast<void*>(tensor.const_data_ptr()));
    }
  }

  // A GPU's kernels write the rounded copy as they write a 16-bit parameter with a float32 master.
  void add_copies(TensorList copies) {
    add("copies", copies, true, [](StepTensor& t, void* data) {
      t.master = static_cast<float*>(std::exchange(t.param, data));
    });
  }

  void finish() {
    for (auto& [original, copy] : copies_) {
      if (original.defined()) original.copy_(copy);
    }
  }

 private:
  TensorList params_;
  std::vector<Tensor> orders_;
  std::vector<std::pair<Tensor, Tensor>> copies_;
};

Hyper hyper_of(double value, const OptionalTensor& tensor, const char* name) {
  if (!tensor.has_value()) return {value};
  return {value, pointer_of(tensor, name), tensor->scalar_type() == at::kDouble};
}

DType state_dtype_of(TensorList params, TensorList states, TensorList masters) {
  if (!masters.empty()) return DType::kFloat32;
  return dtype_of(states.empty() ? params[0] : states[0]);
}

// `copies`: those that the kernel writes.
StepParams common_params(TensorList params, TensorList states, TensorList masters,
                         TensorList copies, const StepTensors& step, double lr,
                         const OptionalTensor& lr_tensor, double weight_decay, bool maximize,
                         bool zero_grad, const OptionalTensor& grad_scale,
                         const OptionalTensor& found_inf, const OptionalTensor& clip) {
  return {dtype_of(copies.empty() ? params[0] : copies[0]),
          state_dtype_of(params, states, masters),
          dtype_of(params[0]),
          step.tensors.data(),
          static_cast<int64_t>(step.tensors.size()),
          hyper_of(lr, lr_tensor, "lr_tensor"),
          weight_decay,
          maximize,
          zero_grad,
          float_pointer(grad_scale, "grad_scale"),
          float_pointer(found_inf, "found_inf"),
          static_cast<const double*>(pointer_of(clip, "clip"))};
}

double host_value(const Hyper& hyper) {
  if (hyper.pointer == nullptr) return hyper.value;
  return hyper.is_double ? *static_cast<const double*>(hyper.pointer)
                         : *static_cast<const float*>(hyper.pointer);
}

// Advances steps on the host and takes the bias corrections from them, in double.
void advance_host_steps(TensorList steps, double beta1, double beta2,
                        const OptionalTensor& found_inf, std::vector<StepTensor>& tensors) {
  TORCH_CHECK(!found_inf.has_value() || found_inf->is_cpu(),
              "adam_step_: state_steps: expected steps on ", found_inf->device(),
              " (fused=True or capturable=True) beside found_inf, got cpu: a skipped step must "
              "not count, and only the device knows");
  if (found_inf.has_value() && *found_inf->const_data_ptr<float>() != 0) return;
  double taken = -1, inv_correction1 = 1, inv_correction2_sqrt = 1;
  for (size_t i = 0; i < steps.size(); ++i) {
    double t;
    if (steps[i].scalar_type() == at::kDouble) {
      t = *steps[i].mutable_data_ptr<double>() += 1;
    } else {
      t = *steps[i].mutable_data_ptr<float>() += 1;
    }
    if (t != taken) {
      taken = t;
      inv_correction1 = 1 / (1 - std::pow(beta1, t));
      inv_correction2_sqrt = 1 / std::sqrt(1 - std::pow(beta2, t));
    }
    tensors[i].inv_correction1 = inv_correction1;
    tensors[i].inv_correction2_sqrt = inv_correction2_sqrt;
  }
}

// ---- CPU and CUDA ----

void copy_all(TensorList copies, TensorList params) {
  for (size_t i = 0; i < copies.size(); ++i) {
    check_plain_storage(copies[i], "copies");
    Tensor(copies[i]).copy_(params[i]);
  }
}

template <class Run>
void sgd_step_with(TensorList params, TensorList grads, TensorList buffers, TensorList masters,
                   TensorList copies, double lr, const OptionalTensor& lr_tensor, double momentum,
                   double dampening, double weight_decay, bool nesterov, bool maximize,
                   bool first_step, bool zero_grad, const OptionalTensor& grad_scale,
                   const OptionalTensor& found_inf, const OptionalTensor& clip, Run&& run) {
  check_sgd(params, grads, buffers, masters, copies, momentum);
  check_common("sgd_step_", params, lr_tensor, grad_scale, found_inf, clip);
  StepTensors step(params);
  const bool grads_written = zero_grad || grad_scale.has_value();
  step.add("grads", grads, grads_written, [](StepTensor& t, void* data) { t.grad = data; });
  if (momentum != 0) {
    step.add("momentum_buffers", buffers, true,
             [](StepTensor& t, void* data) { t.state[0] = data; });
  }
  step.add("masters", masters, true,
           [](StepTensor& t, void* data) { t.master = static_cast<float*>(data); });
  const TensorList in_kernel = params[0].is_cuda() ? copies : TensorList();
  step.add_copies(in_kernel);
  SgdParams p{
      common_params(params, momentum != 0 ? buffers : TensorList(), masters, in_kernel, step, lr,
                    lr_tensor, weight_decay, maximize, zero_grad, grad_scale, found_inf, clip),
      momentum, dampening, nesterov, first_step};
  run(p);
  step.finish();
  if (in_kernel.empty()) copy_all(copies, params);
}

template <class Run>
void adam_step_with(TensorList params, TensorList grads, TensorList exp_avgs,
                    TensorList exp_avg_sqs, TensorList max_exp_avg_sqs, TensorList steps,
                    TensorList masters, TensorList copies, TensorList counter, double lr,
                    const OptionalTensor& lr_tensor, double beta1,
                    const OptionalTensor& beta1_tensor, double beta2,
                    const OptionalTensor& beta2_tensor, double weight_decay, double eps,
                    bool decoupled_weight_decay, bool maximize, bool zero_grad,
                    const OptionalTensor& grad_scale, const OptionalTensor& found_inf,
                    const OptionalTensor& clip, Run&& run) {
  const char* op = "adam_step_";
  check_adam(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, masters, copies,
             counter);
  check_common(op, params, lr_tensor, grad_scale, found_inf, clip);
  const c10::Device device = params[0].device();
  check_scalar(op, "beta1_tensor", beta1_tensor, device, {at::kFloat, at::kDouble});
  check_scalar(op, "beta2_tensor", beta2_tensor, device, {at::kFloat, at::kDouble});

  StepTensors step(params);
  const bool grads_written = zero_grad || grad_scale.has_value();
  step.add("grads", grads, grads_written, [](StepTensor& t, void* data) { t.grad = data; });
  step.add("exp_avgs", exp_avgs, true, [](StepTensor& t, void* data) { t.state[0] = data; });
  step.add("exp_avg_sqs", exp_avg_sqs, true, [](StepTensor& t, void* data) { t.state[1] = data; });
  step.add("max_exp_avg_sqs", max_exp_avg_sqs, true,
           [](StepTensor& t, void* data) { t.state[2] = data; });
  step.add("masters", masters, true,
           [](StepTensor& t, void* data) { t.master = static_cast<float*>(data); });
  const TensorList in_kernel = device.is_cuda() ? copies : TensorList();
  step.add_copies(in_kernel);
  for (const Tensor& taken : steps) check_has_storage(taken, "state_steps");
  for (const Tensor& taken : counter) check_has_storage(taken, "counter");
  const bool device_steps = device.is_cuda() && steps[0].is_cuda();
  AdamParams p{common_params(params, exp_avgs, masters, in_kernel, step, lr, lr_tensor,
                             weight_decay, maximize, zero_grad, grad_scale, found_inf, clip),
               hyper_of(beta1, beta1_tensor, "beta1_tensor"),
               hyper_of(beta2, beta2_tensor, "beta2_tensor"),
               eps,
               !max_exp_avg_sqs.empty(),
               decoupled_weight_decay,
               steps[0].scalar_type() == at::kDouble,
               device_steps ? counter_pointer(counter[0]) : nullptr};
  if (device_steps) {
    for (size_t i = 0; i < steps.size(); ++i) step.tensors[i].step = steps[i].mutable_data_ptr();
  } else {
    TORCH_CHECK(device.is_cpu() || (!beta1_tensor.has_value() && !beta2_tensor.has_value()), op,
                ": state_steps: expected steps on ", device,
                " (capturable=True) beside betas on that device, got cpu");
    // Last of what may raise: steps that have advanced belong to a step that was taken.
    advance_host_steps(steps, host_value(p.beta1), host_value(p.beta2), found_inf, step.tensors);
  }
  run(p);
  step.finish();
  if (in_kernel.empty()) copy_all(copies, params);
}

constexpr auto sgd_cpu = [](const auto&... args) { sgd_step_with(args..., sgd_step_cpu); };
constexpr auto adam_cpu = [](const auto&... args) { adam_step_with(args..., adam_step_cpu); };

#ifdef WARPWRIGHT_WITH_CUDA
constexpr auto sgd_cuda = [](TensorList params, const auto&... args) {
  const CudaCall call(first_of("sgd_step_", "params", params));
  sgd_step_with(params, args...,
                [&](const SgdParams& p) { launch_sgd_step(p, choose_sgd_step(p), call.stream); });
};
constexpr auto adam_cuda = [](TensorList params, const auto&... args) {
  const CudaCall call(first_of("adam_step_", "params", params));
  adam_step_with(params, args..., [&](const AdamParams& p) {
    launch_adam_step(p, choose_adam_step(p), call.stream);
  });
};
#endif

// ---- Meta ----

constexpr auto sgd_meta = [](TensorList params, TensorList grads, TensorList buffers,
                             TensorList masters, TensorList copies, double,
                             const OptionalTensor& lr_tensor, double momentum, double, double, bool,
                             bool, bool, bool, const OptionalTensor& grad_scale,
                             const OptionalTensor& found_inf, const OptionalTensor& clip) {
  check_sgd(params, grads, buffers, masters, copies, momentum);
  check_common("sgd_step_", params, lr_tensor, grad_scale, found_inf, clip);
};
constexpr auto adam_meta = [](TensorList params, TensorList grads, TensorList exp_avgs,
                              TensorList exp_avg_sqs, TensorList max_exp_avg_sqs, TensorList steps,
                              TensorList masters, TensorList copies, TensorList counter,
                              const auto&...) {
  check_adam(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, masters, copies,
             counter);
};

// ---- Autograd ----

constexpr auto sgd_autograd = [](TensorList params, TensorList grads, TensorList buffers,
                                 TensorList masters, TensorList copies, const auto&... scalars) {
  static const auto op = find_op<SgdSignature>("warpwright::sgd_step_");
  check_not_recorded("sgd_step_", params, grads, buffers, masters, copies);
  below_autograd([&] {
    refresh_weight_copies(params, copies);
    op.call(params, grads, buffers, masters, copies, scalars...);
  });
  bump_versions(params, grads, buffers, masters, copies);
  remember_weight_copies(params, copies);
};

constexpr auto adam_autograd = [](TensorList params, TensorList grads, TensorList exp_avgs,
                                  TensorList exp_avg_sqs, TensorList max_exp_avg_sqs,
                                  TensorList steps, TensorList masters, TensorList copies,
                                  TensorList counter, const auto&... scalars) {
  static const auto op = find_op<AdamSignature>("warpwright::adam_step_");
  check_not_recorded("adam_step_", params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps,
                     masters, copies);
  below_autograd([&] {
    refresh_weight_copies(params, copies);
    op.call(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, masters, copies, counter,
            scalars...);
  });
  bump_versions(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, masters, copies,
                counter);
  remember_weight_copies(params, copies);
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def(
      "sgd_step_(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] momentum_buffers, "
      "Tensor(d!)[] masters, Tensor(e!)[] copies, float lr, Tensor? lr_tensor, float momentum, "
      "float dampening, float weight_decay, bool nesterov, bool maximize, bool first_step, "
      "bool zero_grad=False, Tensor? grad_scale=None, Tensor? found_inf=None, "
      "Tensor? clip=None) -> ()",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "adam_step_(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] exp_avgs, "
      "Tensor(d!)[] exp_avg_sqs, Tensor(e!)[] max_exp_avg_sqs, Tensor(f!)[] state_steps, "
      "Tensor(g!)[] masters, Tensor(h!)[] copies, Tensor(i!)[] counter, float lr, "
      "Tensor? lr_tensor, float beta1, Tensor? beta1_tensor, float beta2, Tensor? beta2_tensor, "
      "float weight_decay, float eps, "
      "bool decoupled_weight_decay, bool maximize, bool zero_grad=False, "
      "Tensor? grad_scale=None, Tensor? found_inf=None, Tensor? clip=None) -> ()",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) {
  m.impl("sgd_step_", Kernel<SgdSignature>::of<sgd_cpu>);
  m.impl("adam_step_", Kernel<AdamSignature>::of<adam_cpu>);
}

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) {
  m.impl("sgd_step_", Kernel<SgdSignature>::of<sgd_cuda>);
  m.impl("adam_step_", Kernel<AdamSignature>::of<adam_cuda>);
}
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) {
  m.impl("sgd_step_", Kernel<SgdSignature>::of<sgd_meta>);
  m.impl("adam_step_", Kernel<AdamSignature>::of<adam_meta>);
}

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) {
  m.impl("sgd_step_", Kernel<SgdSignature>::of<sgd_autograd>);
  m.impl("adam_step_", Kernel<AdamSignature>::of<adam_autograd>);
}

}  // namespace warpwright
