// The ops behind linear_cross_entropy (linear_cross_entropy_call_torch.cpp) on every dispatch key.
//   linear_cross_entropy_forward   loss, and with it the gradients that will be asked for
//   linear_cross_entropy_backward  the gradients from their inputs alone: for reduction 'none',
//                                  whose rows' factors the forward does not know, and for whoever
//                                  differentiates them again
// A chunk's products are linear's, its loss and gradient are cross_entropy's.
#include <ATen/TensorOperators.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/graph_task.h>

#include <array>
#include <tuple>

#include "ops/cross_entropy/cross_entropy_torch.h"
#include "ops/linear/linear_torch.h"
#include "ops/linear_cross_entropy/linear_cross_entropy.h"
#include "torch/autograd.h"
#include "torch/dispatch.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include "torch/cuda.h"
#endif

namespace warpwright {

namespace {

using at::ScalarType;
using c10::SymInt;
using OptionalTensor = std::optional<Tensor>;
using Mask2 = std::array<bool, 2>;
using Mask3 = std::array<bool, 3>;
using Tensor2 = std::tuple<Tensor, Tensor>;
using Gradients = std::tuple<Tensor, Tensor, Tensor>;                // of input, weight, bias
using Results = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;  // loss, total_weight, those

// One call. Rows are folded: input (rows, features), weight (classes, features), bias (classes),
// target (rows) or (rows, classes), class_weight (classes).
struct Call {
  Tensor input, weight, bias, target, class_weight;
  int64_t reduction;
  SymInt ignore_index;
  double label_smoothing;
  int64_t chunk_rows;  // 0: choose_chunks() chooses

  bool is_mean() const { return reduction == at::Reduction::Mean; }
  bool is_none() const { return reduction == at::Reduction::None; }
};

// ---- the ops through the dispatcher ----

namespace call {

Tensor linear(const Call& c, const Tensor& input) {
  static const auto op =
      find_op<Tensor(const Tensor&, const Tensor&, const OptionalTensor&)>("warpwright::linear");
  return op.call(input, c.weight, optional_if_defined(c.bias));
}

Gradients linear_backward(const Tensor& grad_output, const Tensor& input, const Tensor& weight,
                          Mask3 output_mask) {
  static const auto op =
      find_op<Gradients(const Tensor&, const OptionalTensor&, const OptionalTensor&, Mask3)>(
          "warpwright::linear_backward");
  return op.call(grad_output, optional_if_defined(input), optional_if_defined(weight), output_mask);
}

// (loss, row_stats, total_weight)
Gradients cross_entropy_forward(const Call& c, const Tensor& logits, const Tensor& target,
                                int64_t reduction, ScalarType dtype) {
  static const auto op =
      find_op<Gradients(const Tensor&, const Tensor&, const OptionalTensor&, int64_t, SymInt,
                        double, ScalarType, double, bool)>("warpwright::cross_entropy_forward");
  return op.call(logits, target, optional_if_defined(c.class_weight), reduction, c.ignore_index,
                 c.label_smoothing, dtype, /*z_loss=*/0, /*inplace_backward=*/false);
}

Tensor cross_entropy_backward(const Call& c, const Tensor& grad_output, const Tensor& logits,
                              const Tensor& target, const Tensor& row_stats,
                              const Tensor& total_weight, int64_t reduction) {
  static const auto op =
      find_op<Tensor2(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                      const Tensor&, const Tensor&, int64_t, SymInt, double, Mask2, double)>(
          "warpwright::cross_entropy_backward");
  return std::get<0>(op.call(grad_output, logits, target, optional_if_defined(c.class_weight),
                             row_stats, total_weight, reduction, c.ignore_index, c.label_smoothing,
                             {true, false}, /*z_loss=*/0));
}

Results linear_cross_entropy_forward(const Call& c, ScalarType dtype, Mask3 output_mask) {
  static const auto op =
      find_op<Results(const Tensor&, const Tensor&, const OptionalTensor&, const Tensor&,
                      const OptionalTensor&, int64_t, SymInt, double, int64_t, ScalarType, Mask3)>(
          "warpwright::linear_cross_entropy_forward");
  return op.call(c.input, c.weight, optional_if_defined(c.bias), c.target,
                 optional_if_defined(c.class_weight), c.reduction, c.ignore_index,
                 c.label_smoothing, c.chunk_rows, dtype, output_mask);
}

Gradients linear_cross_entropy_backward(const Tensor& grad_output, const Call& c,
                                        Mask3 output_mask) {
  static const auto op =
      find_op<Gradients(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                        const Tensor&, const OptionalTensor&, int64_t, SymInt, double, int64_t,
                        Mask3)>("warpwright::linear_cross_entropy_backward");
  return op.call(grad_output, c.input, c.weight, optional_if_defined(c.bias), c.target,
                 optional_if_defined(c.class_weight), c.reduction, c.ignore_index,
                 c.label_smoothing, c.chunk_rows, output_mask);
}

// gradient *= factor, on the device; nothing is written where it is 1.
void cross_entropy_scale_(const Tensor& gradient, const Tensor& factor) {
  static const auto op =
      find_op<void(const Tensor&, const Tensor&)>("warpwright::cross_entropy_scale_");
  op.call(gradient, factor);
}

}  // namespace call

// ---- output shapes ----

// The type in which the forward leaves the gradients of weight and bias. float16 gradients of a
// mean lie below its range until the backward multiplies them with the loss scale, and those of a
// sum may lie above it: the forward leaves the sum's, the backward divides.
ScalarType stored_type(ScalarType type) { return type == at::kHalf ? at::kFloat : type; }
bool divides_late(const Call& c) { return c.input.scalar_type() == at::kHalf && c.is_mean(); }

Gradients empty_gradients(const Call& c, Mask3 mask, ScalarType sum_type) {
  const auto options = c.input.options();
  auto empty = [&](const Tensor& like, ScalarType type) {
    return at::empty_symint(like.sym_sizes(), options.dtype(type));
  };
  Gradients result;
  if (mask[0]) std::get<0>(result) = empty(c.input, c.input.scalar_type());
  if (mask[1]) std::get<1>(result) = empty(c.weight, sum_type);
  if (mask[2]) std::get<2>(result) = empty(c.bias, sum_type);
  return result;
}

// ---- checks ----

void check_call(const Call& c) {
  TORCH_CHECK(c.input.dim() == 2 && c.weight.dim() == 2,
              "linear_cross_entropy: expected matrices as input and weight, got ",
              c.input.sym_sizes(), " and ", c.weight.sym_sizes());
  const auto features = c.input.sym_size(1), classes = c.weight.sym_size(0);
  TORCH_CHECK(features == c.weight.sym_size(1), "linear_cross_entropy: input: expected ",
              c.weight.sym_size(1), " features, got ", features);
  auto check_operand = [&](const Tensor& other, const char* name) {
    TORCH_CHECK(other.scalar_type() == c.input.scalar_type(), "linear_cross_entropy: ", name,
                ": expected the same dtype as input, but got ", other.scalar_type(), " beside ",
                c.input.scalar_type());
    TORCH_CHECK(other.device() == c.input.device(), "linear_cross_entropy: ", name,
                ": Expected all tensors to be on the same device, but got ", other.device(),
                " beside ", c.input.device());
  };
  check_operand(c.weight, "weight");
  if (c.bias.defined()) {
    check_operand(c.bias, "bias");
    TORCH_CHECK(c.bias.dim() == 1 && c.bias.sym_size(0) == classes,
                "linear_cross_entropy: bias: expected (", classes, "), got ", c.bias.sym_sizes());
  }
  if (c.class_weight.defined()) {
    TORCH_CHECK(c.class_weight.dim() == 1 && c.class_weight.sym_size(0) == classes,
                "linear_cross_entropy: class_weight: expected (", classes, "), got ",
                c.class_weight.sym_sizes());
  }
  TORCH_CHECK_VALUE(c.chunk_rows >= 0,
                    "linear_cross_entropy: chunk_rows: expected at least 1, got ", c.chunk_rows);
  // cross_entropy's own checks want logits: one element, seen as all of them.
  const Tensor logits =
      at::empty({1, 1}, c.input.options()).expand_symint({c.input.sym_size(0), classes});
  check_cross_entropy(logits, c.target, c.class_weight,
                      {c.reduction, c.ignore_index, c.label_smoothing});
}

// ---- chunks ----

// What a mean divides by, before any row has been looked at.
Tensor count_rows(const Call& c, ScalarType accum) {
  const auto options = c.input.options().dtype(accum);
  if (!c.is_mean()) return at::zeros({}, options);
  if (c.target.dim() == 2) return at::full({}, c.target.size(0), options);
  const Tensor labels = c.target.to(at::kLong);
  const Tensor valid = labels.ne(c.ignore_index.expect_int());
  if (!c.class_weight.defined() || c.weight.size(0) == 0) return valid.sum(accum);
  // A label out of range must not index: its row's loss says so later.
  const Tensor weights =
      c.class_weight.to(accum).index_select(0, labels.clamp(0, c.weight.size(0) - 1));
  return at::where(valid, weights, at::zeros({}, options)).sum();
}

// The products of a chunk: x is (rows, features), z and dz (rows, classes), their rows padded.
template <class Runner>
struct ChunkProducts {
  const Runner& runner;
  const Matrix weight;
  const Tensor bias;

  void logits(const Tensor& x, Tensor z) const {
    const Matrix rows = as_matrix(x);  // may own a copy
    GemmParams p = gemm_params(rows, weight, optional_if_defined(bias), z);
    p.d_pitch = z.stride(0);
    runner.gemm(p);
  }
  void input_gradient(const Tensor& dz, Tensor dx) const {
    runner.gemm(gemm_params(as_matrix(dz), weight.transposed(), {}, dx));
  }
  // In dw's type: the operands' or the accumulator's.
  void weight_gradient(const Tensor& dz, const Tensor& x, Tensor dw, bool accumulate) const {
    const Matrix a = as_matrix(dz).transposed(), b = as_matrix(x).transposed();
    GemmParams p = gemm_params(a, b, {}, dw);
    p.dtype = dtype_of(dz);
    p.accum_d = dw.scalar_type() == accum_type(dz.scalar_type());
    p.accumulate = accumulate;
    runner.gemm(p);
  }
};

template <class F>
void with_products(const Call& c, F&& f) {
  const Tensor bias = c.bias.defined() ? c.bias.contiguous() : c.bias;
#ifdef WARPWRIGHT_WITH_CUDA
  if (c.input.is_cuda()) {
    const CudaCall call(c.input);
    const LinearCuda runner(call, c.input);
    return f(ChunkProducts<LinearCuda>{runner, as_matrix(c.weight), bias});
  }
#endif
  const LinearCpu runner;
  f(ChunkProducts<LinearCpu>{runner, as_matrix(c.weight), bias});
}

// Whether the weight's gradient may add up in 16 bits: the sm_90a kernels can, from rows of x that
// start at multiples of 16 bytes.
bool can_add_to_narrow([[maybe_unused]] const Tensor& x) {
#ifdef WARPWRIGHT_WITH_CUDA
  return x.is_cuda() && sm90_path_available() && x.stride(1) == 1 && x.stride(0) % 8 == 0 &&
         reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
#else
  return false;
#endif
}

// Loss of a chunk's rows, and scale * gradient in the logits' place if wanted. `scale`: one number,
// or one a row.
void chunk_loss_(const Call& c, const Tensor& logits, const Tensor& target, const Tensor& scale,
                 bool gradient, const Tensor& loss) {
  if (!is_probabilities(logits, target)) {
    const ChunkOptions options{.ignore_index = c.ignore_index.expect_int(),
                               .label_smoothing = c.label_smoothing,
                               .gradient = gradient};
    cross_entropy_chunk_(logits, target, c.class_weight, options, scale, loss, Tensor());
    return;
  }
  const auto [row_loss, row_stats, total_weight] =
      call::cross_entropy_forward(c, logits, target, at::Reduction::None, loss.scalar_type());
  loss.copy_(row_loss);
  if (!gradient) return;
  logits.copy_(call::cross_entropy_backward(c, scale.expand_as(loss), logits, target, row_stats,
                                            total_weight, at::Reduction::None));
}

// The rows' losses and the gradients of weight and bias in `sum_type`, of input in its own type.
// Every chunk's logits give way to their gradient, and both to the next chunk's.
std::tuple<Tensor, Gradients> run_chunks(const Call& c, const Tensor& scale, Mask3 mask,
                                         ScalarType sum_type) {
  const int64_t rows = c.input.size(0), classes = c.weight.size(0);
  const ScalarType type = c.input.scalar_type(), accum = accum_type(type);
  const ChunkPlan plan = choose_chunks(dtype_of(c.input), rows, c.input.size(1), classes,
                                       c.chunk_rows, can_add_to_narrow(c.input));
  const auto options = c.input.options();
  const Tensor loss = at::empty({rows}, options.dtype(accum));
  // On the CPU rows stay dense: oneDNN's 16-bit products do not write padded ones.
  const int64_t pitch = c.input.is_cuda() ? logits_pitch(classes) : classes;
  Tensor buffer = at::empty({plan.rows, pitch}, options);
  auto [dx, dw, db] = empty_gradients(c, {mask[0], false, mask[2]}, accum);
  if (mask[1]) dw = at::empty(c.weight.sizes(), options.dtype(plan.wide_sum ? accum : type));
  if (mask[1] && rows == 0) dw.zero_();
  if (mask[2]) db.zero_();
  const bool wants_gradient = mask[0] || mask[1] || mask[2];
  with_products(c, [&](const auto& products) {
    for (int64_t first = 0; first < rows; first += plan.rows) {
      const int64_t count = std::min(plan.rows, rows - first);
      auto chunk_of = [&](const Tensor& tensor) { return tensor.narrow(0, first, count); };
      const Tensor x = chunk_of(c.input), target = chunk_of(c.target);
      const Tensor logits = buffer.narrow(0, 0, count).narrow(1, 0, classes);
      products.logits(x, logits);
      chunk_loss_(c, logits, target, scale.dim() == 0 ? scale : chunk_of(scale), wants_gradient,
                  chunk_of(loss));
      if (mask[0]) products.input_gradient(logits, chunk_of(dx));
      if (mask[1]) products.weight_gradient(logits, x, dw, /*accumulate=*/first > 0);
      if (mask[2]) db.add_(logits.sum(0, /*keepdim=*/false, accum));
    }
  });
  buffer.reset();  // before a sum in float32 gets its rounded copy
  if (mask[1]) dw = dw.to(sum_type);
  if (mask[2]) db = db.to(sum_type);
  return {loss, Gradients{dx, dw, db}};
}

Results forward(const Call& c, ScalarType dtype, Mask3 mask) {
  check_call(c);
  TORCH_CHECK(!c.is_none() || (!mask[0] && !mask[1] && !mask[2]),
              "linear_cross_entropy_forward: output_mask: the gradients of reduction 'none' are "
              "linear_cross_entropy_backward's");
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const ScalarType type = c.input.scalar_type(), accum = accum_type(type);
  const Tensor total_weight = count_rows(c, accum);
  // Where the division comes late it is by 1 here, but by 0 where it will be by 0: rows that count
  // then get NaN, ignored ones 0.
  Tensor scale = total_weight;
  if (divides_late(c)) scale = scale.ne(0).to(accum);
  scale = c.is_mean() ? scale.reciprocal() : at::full({}, 1, total_weight.options());
  auto [loss, gradients] = run_chunks(c, scale, mask, stored_type(type));
  if (!c.is_none()) loss = loss.sum();
  if (c.is_mean()) loss = loss / total_weight;
  const auto& [dx, dw, db] = gradients;
  return {loss.to(dtype), total_weight, dx, dw, db};
}

Gradients backward(const Tensor& grad_output, const Call& c, Mask3 mask) {
  check_call(c);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const ScalarType type = c.input.scalar_type();
  Tensor scale = grad_output.to(accum_type(type));
  if (c.is_mean()) scale = scale / count_rows(c, scale.scalar_type());
  return std::get<1>(run_chunks(c, scale.contiguous(), mask, type));
}

// ---- the factor ----

// The forward's gradient times `factor`: in its own place if nobody else can see it, and no second
// backward pass will ask for it.
Tensor scaled(const Tensor& gradient, const Tensor& factor, ScalarType dtype) {
  // Traced or batched: a product that a compiler can fuse.
  if (at::areAnyTensorSubclassLike({gradient, factor})) {
    return (gradient.to(factor.scalar_type()) * factor).to(dtype);
  }
  constexpr size_t kNodeAndCaller = 2;  // SavedVariable and the list it was unpacked to
  const bool ours_alone = !torch::autograd::get_current_graph_task_keep_graph() &&
                          gradient.use_count() <= kNodeAndCaller &&
                          gradient.storage().use_count() == 1;
  const Tensor result = ours_alone ? gradient : gradient.clone();
  call::cross_entropy_scale_(result, factor);
  return result.to(dtype);
}

// ---- CPU, CUDA, Meta ----

Call call_of(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
             const Tensor& target, const OptionalTensor& class_weight, int64_t reduction,
             SymInt ignore_index, double label_smoothing, int64_t chunk_rows) {
  return {input,
          weight,
          value_or_undefined(bias),
          target,
          value_or_undefined(class_weight),
          reduction,
          std::move(ignore_index),
          label_smoothing,
          chunk_rows};
}

Results linear_cross_entropy_forward_kernel(const Tensor& input, const Tensor& weight,
                                            const OptionalTensor& bias, const Tensor& target,
                                            const OptionalTensor& class_weight, int64_t reduction,
                                            int64_t ignore_index, double label_smoothing,
                                            int64_t chunk_rows, ScalarType dtype,
                                            Mask3 output_mask) {
  return forward(call_of(input, weight, bias, target, class_weight, reduction, ignore_index,
                         label_smoothing, chunk_rows),
                 dtype, output_mask);
}

Gradients linear_cross_entropy_backward_kernel(const Tensor& grad_output, const Tensor& input,
                                               const Tensor& weight, const OptionalTensor& bias,
                                               const Tensor& target,
                                               const OptionalTensor& class_weight,
                                               int64_t reduction, int64_t ignore_index,
                                               double label_smoothing, int64_t chunk_rows,
                                               Mask3 output_mask) {
  return backward(grad_output,
                  call_of(input, weight, bias, target, class_weight, reduction, ignore_index,
                          label_smoothing, chunk_rows),
                  output_mask);
}

Results linear_cross_entropy_forward_meta(const Tensor& input, const Tensor& weight,
                                          const OptionalTensor& bias, const Tensor& target,
                                          const OptionalTensor& class_weight, int64_t reduction,
                                          SymInt ignore_index, double label_smoothing,
                                          int64_t chunk_rows, ScalarType dtype, Mask3 output_mask) {
  const Call c = call_of(input, weight, bias, target, class_weight, reduction,
                         std::move(ignore_index), label_smoothing, chunk_rows);
  check_call(c);
  const ScalarType type = input.scalar_type();
  const auto [dx, dw, db] = empty_gradients(c, output_mask, stored_type(type));
  const c10::SymInt rows[] = {input.sym_size(0)};
  const c10::SymIntArrayRef loss_sizes(rows, c.is_none() ? 1 : 0);
  return {at::empty_symint(loss_sizes, input.options().dtype(dtype)),
          at::empty({}, input.options().dtype(accum_type(type))), dx, dw, db};
}

Gradients linear_cross_entropy_backward_meta(const Tensor&, const Tensor& input,
                                             const Tensor& weight, const OptionalTensor& bias,
                                             const Tensor& target,
                                             const OptionalTensor& class_weight, int64_t reduction,
                                             SymInt ignore_index, double label_smoothing,
                                             int64_t chunk_rows, Mask3 output_mask) {
  const Call c = call_of(input, weight, bias, target, class_weight, reduction,
                         std::move(ignore_index), label_smoothing, chunk_rows);
  check_call(c);
  return empty_gradients(c, output_mask, input.scalar_type());
}

// ---- Autograd ----

bool is_differentiated(const Tensor& tensor) {
  return tensor.defined() &&
         ((at::GradMode::is_enabled() && tensor.requires_grad()) || has_tangent(tensor));
}

struct LinearCrossEntropyBackward {
  static constexpr const char* kName = "WarpwrightLinearCrossEntropyBackward";
  struct Attributes {
    int64_t reduction;
    SymInt ignore_index;
    double label_smoothing;
    int64_t chunk_rows;
  };
  // saved: input, weight, bias, target, class_weight, total_weight, and the forward's gradients
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    const Tensor& grad_output = grads[0];
    const Call c{saved[0],    saved[1],       saved[2],          saved[3],    saved[4],
                 a.reduction, a.ignore_index, a.label_smoothing, a.chunk_rows};
    // Who differentiates the gradients needs them as functions of their inputs.
    const bool again = c.is_none() || at::GradMode::is_enabled() ||
                       any_tangent(grad_output, c.input, c.weight, c.bias);
    if (again) {
      const auto [dx, dw, db] =
          call::linear_cross_entropy_backward(grad_output, c, {needs[0], needs[1], needs[2]});
      return {dx, dw, db};
    }
    const ScalarType type = c.input.scalar_type();
    Tensor factor = grad_output.to(accum_type(type));
    if (divides_late(c)) factor = factor / saved[5].masked_fill(saved[5].eq(0), 1);
    variable_list result(3);
    for (size_t i = 0; i < 3; ++i) {
      if (needs[i]) result[i] = scaled(saved[6 + i], factor, type);
    }
    return result;
  }
};

Results linear_cross_entropy_forward_autograd(const Tensor& input, const Tensor& weight,
                                              const OptionalTensor& bias, const Tensor& target,
                                              const OptionalTensor& class_weight, int64_t reduction,
                                              SymInt ignore_index, double label_smoothing,
                                              int64_t chunk_rows, ScalarType dtype,
                                              Mask3 output_mask) {
  const Call c = call_of(input, weight, bias, target, class_weight, reduction, ignore_index,
                         label_smoothing, chunk_rows);
  auto node = make_node<LinearCrossEntropyBackward>(
      {reduction, ignore_index, label_smoothing, chunk_rows}, c.input, c.weight, c.bias);
  if (node && !c.is_none()) {
    auto wants = [](const Tensor& tensor) { return tensor.defined() && tensor.requires_grad(); };
    output_mask = {output_mask[0] || wants(c.input), output_mask[1] || wants(c.weight),
                   output_mask[2] || wants(c.bias)};
  }
  Results results =
      below_autograd([&] { return call::linear_cross_entropy_forward(c, dtype, output_mask); });
  const auto& [loss, total_weight, dx, dw, db] = results;
  if (node) {
    for (const Tensor* tensor :
         {&c.input, &c.weight, &c.bias, &c.target, &c.class_weight, &total_weight, &dx, &dw, &db}) {
      node->save(*tensor);
    }
    set_history(loss, node);
  }
  if (any_tangent(c.input, c.weight, c.bias)) {
    const Tensor apart = std::get<0>(
        call::cross_entropy_forward(c, call::linear(c, c.input), c.target, c.reduction, dtype));
    set_tangent(loss, tangent(apart));
  }
  return results;
}

// To be differentiated: the gradients by the ops apart, logits and all.
Gradients differentiable_backward(const Tensor& grad_output, const Call& c, Mask3 mask) {
  const Tensor logits = call::linear(c, c.input);
  const auto [loss, row_stats, total_weight] = call::cross_entropy_forward(
      c, logits.detach(), c.target, c.reduction, grad_output.scalar_type());
  const Tensor dz = call::cross_entropy_backward(c, grad_output, logits, c.target, row_stats,
                                                 total_weight, c.reduction);
  return call::linear_backward(dz, c.input, c.weight, mask);
}

Gradients linear_cross_entropy_backward_autograd(const Tensor& grad_output, const Tensor& input,
                                                 const Tensor& weight, const OptionalTensor& bias,
                                                 const Tensor& target,
                                                 const OptionalTensor& class_weight,
                                                 int64_t reduction, SymInt ignore_index,
                                                 double label_smoothing, int64_t chunk_rows,
                                                 Mask3 output_mask) {
  const Call c = call_of(input, weight, bias, target, class_weight, reduction,
                         std::move(ignore_index), label_smoothing, chunk_rows);
  if (is_differentiated(grad_output) || is_differentiated(c.input) || is_differentiated(c.weight) ||
      is_differentiated(c.bias)) {
    return differentiable_backward(grad_output, c, output_mask);
  }
  return below_autograd(
      [&] { return call::linear_cross_entropy_backward(grad_output, c, output_mask); });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def(
      "linear_cross_entropy_forward(Tensor input, Tensor weight, Tensor? bias, Tensor target, "
      "Tensor? class_weight, int reduction, SymInt ignore_index, float label_smoothing, "
      "int chunk_rows, ScalarType dtype, bool[3] output_mask) -> (Tensor loss, "
      "Tensor total_weight, Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
      tags);
  m.def(
      "linear_cross_entropy_backward(Tensor grad_output, Tensor input, Tensor weight, "
      "Tensor? bias, Tensor target, Tensor? class_weight, int reduction, SymInt ignore_index, "
      "float label_smoothing, int chunk_rows, bool[3] output_mask) -> "
      "(Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
      tags);
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) {
  m.impl("linear_cross_entropy_forward", linear_cross_entropy_forward_kernel);
  m.impl("linear_cross_entropy_backward", linear_cross_entropy_backward_kernel);
}

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) {
  m.impl("linear_cross_entropy_forward", linear_cross_entropy_forward_kernel);
  m.impl("linear_cross_entropy_backward", linear_cross_entropy_backward_kernel);
}
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) {
  m.impl("linear_cross_entropy_forward", linear_cross_entropy_forward_meta);
  m.impl("linear_cross_entropy_backward", linear_cross_entropy_backward_meta);
}

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) {
  m.impl("linear_cross_entropy_forward", linear_cross_entropy_forward_autograd);
  m.impl("linear_cross_entropy_backward", linear_cross_entropy_backward_autograd);
}

}  // namespace warpwright
