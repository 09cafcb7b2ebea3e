// polynomial and polynomial_backward on every dispatch key. The backward is an op of its own, so
// that it can be differentiated again.
#include <ATen/ops/empty_like.h>

#include "polynomial.h"
#include "torch/autograd.h"
#include "torch/check_argument.h"
#include "torch/dispatch.h"

#ifdef POLYNOMIAL_WITH_CUDA
#include "torch/cuda.h"
#endif

namespace polynomial_op {
namespace {

using at::Tensor;
using warpwright::below_autograd;
using warpwright::has_tangent;
using warpwright::make_node;
using warpwright::NeedsGrad;
using warpwright::primal;
using warpwright::set_history;
using warpwright::set_tangent;
using warpwright::tangent;
using warpwright::variable_list;

// The ops through the dispatcher: what they reach depends on the keys that are not excluded.
namespace call {

Tensor polynomial(const Tensor& x) {
  static const auto op = warpwright::find_op<Tensor(const Tensor&)>("polynomial_op::polynomial");
  return op.call(x);
}

Tensor polynomial_backward(const Tensor& dy, const Tensor& x) {
  static const auto op = warpwright::find_op<Tensor(const Tensor&, const Tensor&)>(
      "polynomial_op::polynomial_backward");
  return op.call(dy, x);
}

}  // namespace call

// ---- output shape and checks ----

void check_polynomial(const Tensor& x) {
  TORCH_CHECK_TYPE(warpwright::is_floating(x.scalar_type()),
                   "polynomial: x: expected float32, float64, bfloat16 or float16, got ",
                   x.scalar_type());
}

void check_polynomial_backward(const Tensor& dy, const Tensor& x) {
  check_polynomial(x);
  warpwright::check_argument(dy, "polynomial_backward: dy", x.sym_sizes(), x.scalar_type(), x);
}

// `tensor` in the memory order of `like`, without a copy if it already is.
Tensor in_order_of(const Tensor& tensor, const Tensor& like) {
  if (tensor.strides() == like.strides()) return tensor;
  return at::empty_like(like).copy_(tensor);
}

// ---- CPU and CUDA ----

template <class Run>
Tensor polynomial_with(const Tensor& x, Run&& run) {
  check_polynomial(x);
  warpwright::check_has_storage(x, "polynomial: x");
  Tensor y = at::empty_like(x);
  const Tensor source = in_order_of(x, y);
  run(PolynomialParams{warpwright::dtype_of(x), x.numel(), source.const_data_ptr(),
                       y.mutable_data_ptr()});
  return y;
}

template <class Run>
Tensor polynomial_backward_with(const Tensor& dy, const Tensor& x, Run&& run) {
  check_polynomial_backward(dy, x);
  warpwright::check_has_storage(dy, "polynomial_backward: dy");
  warpwright::check_has_storage(x, "polynomial_backward: x");
  Tensor dx = at::empty_like(x);
  const Tensor dy_source = in_order_of(dy, dx);
  const Tensor x_source = in_order_of(x, dx);
  run(PolynomialBackwardParams{warpwright::dtype_of(x), x.numel(), dy_source.const_data_ptr(),
                               x_source.const_data_ptr(), dx.mutable_data_ptr()});
  return dx;
}

Tensor polynomial_cpu_kernel(const Tensor& x) { return polynomial_with(x, polynomial_cpu); }
Tensor polynomial_backward_cpu_kernel(const Tensor& dy, const Tensor& x) {
  return polynomial_backward_with(dy, x, polynomial_backward_cpu);
}

#ifdef POLYNOMIAL_WITH_CUDA
Tensor polynomial_cuda_kernel(const Tensor& x) {
  const warpwright::CudaCall call(x);
  return polynomial_with(x, [&](const PolynomialParams& p) { launch_polynomial(p, call.stream); });
}
Tensor polynomial_backward_cuda_kernel(const Tensor& dy, const Tensor& x) {
  const warpwright::CudaCall call(x);
  return polynomial_backward_with(dy, x, [&](const PolynomialBackwardParams& p) {
    launch_polynomial_backward(p, call.stream);
  });
}
#endif

// ---- Meta: shapes alone, for torch.compile and torch.export ----

Tensor polynomial_meta(const Tensor& x) {
  check_polynomial(x);
  return at::empty_like(x);
}
Tensor polynomial_backward_meta(const Tensor& dy, const Tensor& x) {
  check_polynomial_backward(dy, x);
  return at::empty_like(x);
}

// ---- Autograd ----

// dx = dy (2x + 1)
struct PolynomialBackward {
  static constexpr const char* kName = "PolynomialBackward";
  struct Attributes {};
  static variable_list backward(const Attributes&, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    return {needs[0] ? call::polynomial_backward(grads[0], saved[0]) : Tensor()};
  }
};

// Of dx = dy (2x + 1), with g the gradient of dx: by dy it is g (2x + 1), by x it is 2 g dy.
struct PolynomialBackwardBackward {
  static constexpr const char* kName = "PolynomialBackwardBackward";
  struct Attributes {};
  static variable_list backward(const Attributes&, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    const Tensor &g = grads[0], &dy = saved[0], &x = saved[1];
    return {needs[0] ? call::polynomial_backward(g, x) : Tensor(),
            needs[1] ? g * dy * 2 : Tensor()};
  }
};

Tensor polynomial_autograd(const Tensor& x) {
  auto node = make_node<PolynomialBackward>({}, x);
  Tensor y = below_autograd([&] { return call::polynomial(x); });
  if (node) {
    node->save(x);
    set_history(y, node);
  }
  if (has_tangent(x)) set_tangent(y, call::polynomial_backward(tangent(x), primal(x)));
  return y;
}

Tensor polynomial_backward_autograd(const Tensor& dy, const Tensor& x) {
  auto node = make_node<PolynomialBackwardBackward>({}, dy, x);
  Tensor dx = below_autograd([&] { return call::polynomial_backward(dy, x); });
  if (node) {
    node->save(dy);
    node->save(x);
    set_history(dx, node);
  }
  Tensor dx_tangent;
  if (has_tangent(dy)) dx_tangent = call::polynomial_backward(tangent(dy), primal(x));
  if (has_tangent(x)) {
    dx_tangent = warpwright::sum_of(dx_tangent, primal(dy) * tangent(x) * 2);
  }
  if (dx_tangent.defined()) set_tangent(dx, dx_tangent);
  return dx;
}

}  // namespace

TORCH_LIBRARY(polynomial_op, m) {
  m.def("polynomial(Tensor x) -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("polynomial_backward(Tensor dy, Tensor x) -> Tensor", {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(polynomial_op, CPU, m) {
  m.impl("polynomial", polynomial_cpu_kernel);
  m.impl("polynomial_backward", polynomial_backward_cpu_kernel);
}

#ifdef POLYNOMIAL_WITH_CUDA
TORCH_LIBRARY_IMPL(polynomial_op, CUDA, m) {
  m.impl("polynomial", polynomial_cuda_kernel);
  m.impl("polynomial_backward", polynomial_backward_cuda_kernel);
}
#endif

TORCH_LIBRARY_IMPL(polynomial_op, Meta, m) {
  m.impl("polynomial", polynomial_meta);
  m.impl("polynomial_backward", polynomial_backward_meta);
}

TORCH_LIBRARY_IMPL(polynomial_op, Autograd, m) {
  m.impl("polynomial", polynomial_autograd);
  m.impl("polynomial_backward", polynomial_backward_autograd);
}

}  // namespace polynomial_op
