// The ops that linear_cross_entropy (call.cpp) is composed of, on every dispatch key.
//   linear_cross_entropy_forward   the loss, and with it the gradients that the backward will need
//   linear_cross_entropy_backward  the gradients from their inputs alone: for reduction 'none',
//   whose
//                                  row factors the forward does not know, and for higher
//                                  derivatives
// A chunk's products are linear's, its loss and gradient are cross_entropy's. autograd.cpp has
// Autograd.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "ops/linear/torch/common.h"
#include "ops/linear_cross_entropy/linear_cross_entropy.h"
#include "ops/linear_cross_entropy/torch/common.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include "torch/cuda.h"
#endif

namespace warpwright {

using namespace linear_cross_entropy;

namespace {

// ---- output shapes ----

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

void check_call(const Call& c, Mask3 mask) {
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
  TORCH_CHECK(!mask[2] || c.bias.defined(),
              "linear_cross_entropy: output_mask: expected a bias, whose gradient is wanted");
  TORCH_CHECK_VALUE(c.chunk_rows >= 0,
                    "linear_cross_entropy: chunk_rows: expected at least 1, got ", c.chunk_rows);
  // cross_entropy's own checks take logits: here one element, expanded to their shape.
  const Tensor logits =
      at::empty({1, 1}, c.input.options()).expand_symint({c.input.sym_size(0), classes});
  check_cross_entropy(logits, c.target, c.class_weight, c.loss);
}

void check_row_gradients(const Call& c, const Tensor& grad_output, const Tensor& grad_lse) {
  const SymInt rows[] = {c.input.sym_size(0)};
  check_argument(grad_output, "linear_cross_entropy_backward: grad_output",
                 c.is_none() ? c10::SymIntArrayRef(rows) : c10::SymIntArrayRef(),
                 grad_output.scalar_type(), c.input);
  if (!grad_lse.defined()) return;
  check_argument(grad_lse, "linear_cross_entropy_backward: grad_lse", rows, grad_lse.scalar_type(),
                 c.input);
}

void check_storage(const Call& c) {
  check_has_storage(c.input, "linear_cross_entropy: input");
  check_has_storage(c.weight, "linear_cross_entropy: weight");
  check_has_storage(c.bias, "linear_cross_entropy: bias");
  check_has_storage(c.target, "linear_cross_entropy: target");
  check_has_storage(c.class_weight, "linear_cross_entropy: class_weight");
}

// ---- chunks ----

// What a mean divides by, before any row has been looked at.
Tensor count_rows(const Call& c, ScalarType accum) {
  const auto options = c.input.options().dtype(accum);
  if (!c.is_mean()) return at::zeros({}, options);
  if (c.target.dim() == 2) return at::full({}, c.target.size(0), options);
  const Tensor labels = c.target.to(at::kLong);
  const Tensor valid = labels.ne(c.loss.ignore_index.expect_int());
  if (!c.class_weight.defined() || c.weight.size(0) == 0) return valid.sum(accum);
  // A label out of range must not index. The loss kernel reports it.
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

// Rows [first, first + count) of a tensor over all of them; one number for all, or none, stays.
Tensor of_chunk(const Tensor& rows, int64_t first, int64_t count) {
  return rows.defined() && rows.dim() > 0 ? rows.narrow(0, first, count) : rows;
}

// What there is of each row: its loss, and lse and argmax where they are wanted.
struct RowResults {
  Tensor loss, lse, argmax;

  static RowResults empty(const Call& c, bool wants_lse = false, bool wants_argmax = false) {
    const auto options = c.input.options().dtype(accum_type(c.input.scalar_type()));
    const SymInt rows[] = {c.input.sym_size(0)};
    auto make = [&](const at::TensorOptions& of) { return at::empty_symint(rows, of); };
    return {make(options), wants_lse ? make(options) : Tensor(),
            wants_argmax ? make(options.dtype(at::kLong)) : Tensor()};
  }
  RowResults chunk(int64_t first, int64_t count) const {
    return {of_chunk(loss, first, count), of_chunk(lse, first, count),
            of_chunk(argmax, first, count)};
  }
};

// What the gradients by a row's loss and by its lse (undefined: 0) are multiplied by, each one
// number or one a row.
struct Factors {
  Tensor loss, lse;

  Factors chunk(int64_t first, int64_t count) const {
    return {of_chunk(loss, first, count), of_chunk(lse, first, count)};
  }
};

// Loss of a chunk's rows, and the gradient in the logits' place if wanted.
void chunk_loss_(const Call& c, const Tensor& logits, const Tensor& target, const Factors& factors,
                 bool gradient, const RowResults& rows) {
  if (rows.argmax.defined()) rows.argmax.copy_(logits.argmax(1));
  Tensor by_lse;
  if (gradient && factors.lse.defined()) {
    by_lse = lse_gradient(Capped(c, logits, target), factors.lse);
  }
  if (!is_probabilities(logits, target)) {
    const ChunkOptions options{.ignore_index = c.loss.ignore_index.expect_int(),
                               .label_smoothing = c.loss.label_smoothing,
                               .z_loss = c.loss.z_loss,
                               .softcap = c.softcap,
                               .gradient = gradient};
    cross_entropy_chunk_(logits, target, c.class_weight, options, factors.loss, rows.loss,
                         rows.lse);
  } else {
    constexpr auto kNone = at::Reduction::None;
    const Capped z(c, logits, target);
    const auto [loss, row_stats, total_weight] = loss_of(c, z, kNone, rows.loss.scalar_type());
    rows.loss.copy_(loss);
    if (rows.lse.defined()) rows.lse.copy_(lse_of(z, row_stats));
    if (gradient) {
      logits.copy_(z.gradient(
          loss_gradient(c, factors.loss.expand_as(rows.loss), z, row_stats, total_weight, kNone)));
    }
  }
  if (by_lse.defined()) logits.add_(by_lse);
}

// What there is of the rows, and the gradients of weight and bias in `sum_type`, of input in its
// own type. Every chunk's logits give way to their gradient, and both to the next chunk's.
Gradients run_chunks(const Call& c, const Factors& factors, Mask3 mask, ScalarType sum_type,
                     const RowResults& results) {
  const int64_t rows = c.input.size(0), classes = c.weight.size(0);
  const ScalarType type = c.input.scalar_type(), accum = accum_type(type);
  const ChunkPlan plan = choose_chunks(dtype_of(c.input), rows, c.input.size(1), classes,
                                       c.chunk_rows, can_add_to_narrow(c.input));
  const auto options = c.input.options();
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
      const Tensor x = of_chunk(c.input, first, count);
      const Tensor logits = buffer.narrow(0, 0, count).narrow(1, 0, classes);
      products.logits(x, logits);
      chunk_loss_(c, logits, of_chunk(c.target, first, count), factors.chunk(first, count),
                  wants_gradient, results.chunk(first, count));
      if (mask[0]) products.input_gradient(logits, of_chunk(dx, first, count));
      if (mask[1]) products.weight_gradient(logits, x, dw, /*accumulate=*/first > 0);
      if (mask[2]) db.add_(logits.sum(0, /*keepdim=*/false, accum));
    }
  });
  buffer.reset();  // before a sum in float32 gets its rounded copy
  if (mask[1]) dw = dw.to(sum_type);
  if (mask[2]) db = db.to(sum_type);
  return {dx, dw, db};
}

Results forward(const Call& c, ScalarType dtype, Mask3 mask, bool wants_lse, bool wants_argmax) {
  check_call(c, mask);
  check_is_dtype(dtype, "linear_cross_entropy_forward: dtype");
  check_storage(c);
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
  const auto rows = RowResults::empty(c, wants_lse, wants_argmax);
  const auto [dx, dw, db] = run_chunks(c, {scale, Tensor()}, mask, stored_type(type), rows);
  Tensor loss = rows.loss;
  if (!c.is_none()) loss = loss.sum();
  if (c.is_mean()) loss = loss / total_weight;
  return {loss.to(dtype), total_weight, dx, dw, db, rows.lse, rows.argmax};
}

Gradients backward(const Tensor& grad_output, const Tensor& grad_lse, const Call& c, Mask3 mask) {
  check_call(c, mask);
  check_row_gradients(c, grad_output, grad_lse);
  check_storage(c);
  check_has_storage(grad_output, "linear_cross_entropy_backward: grad_output");
  check_has_storage(grad_lse, "linear_cross_entropy_backward: grad_lse");
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const ScalarType type = c.input.scalar_type();
  Tensor scale = grad_output.to(accum_type(type));
  if (c.is_mean()) scale = scale / count_rows(c, scale.scalar_type());
  Tensor lse_scale = grad_lse;
  if (lse_scale.defined()) lse_scale = lse_scale.to(scale.scalar_type());
  return run_chunks(c, {scale.contiguous(), lse_scale}, mask, type, RowResults::empty(c));
}

// ---- CPU, CUDA, Meta ----

Results linear_cross_entropy_forward_kernel(const Tensor& input, const Tensor& weight,
                                            const OptionalTensor& bias, const Tensor& target,
                                            const OptionalTensor& class_weight, int64_t reduction,
                                            int64_t ignore_index, double label_smoothing,
                                            int64_t chunk_rows, ScalarType dtype, Mask3 output_mask,
                                            double z_loss, double softcap, bool return_lse,
                                            bool return_argmax) {
  const Call c(input, weight, bias, target, class_weight,
               {{reduction, ignore_index, label_smoothing, z_loss}, softcap, chunk_rows});
  return forward(c, dtype, output_mask, return_lse, return_argmax);
}

Gradients linear_cross_entropy_backward_kernel(
    const Tensor& grad_output, const Tensor& input, const Tensor& weight,
    const OptionalTensor& bias, const Tensor& target, const OptionalTensor& class_weight,
    int64_t reduction, int64_t ignore_index, double label_smoothing, int64_t chunk_rows,
    Mask3 output_mask, double z_loss, double softcap, const OptionalTensor& grad_lse) {
  const Call c(input, weight, bias, target, class_weight,
               {{reduction, ignore_index, label_smoothing, z_loss}, softcap, chunk_rows});
  return backward(grad_output, value_or_undefined(grad_lse), c, output_mask);
}

Results linear_cross_entropy_forward_meta(const Tensor& input, const Tensor& weight,
                                          const OptionalTensor& bias, const Tensor& target,
                                          const OptionalTensor& class_weight, int64_t reduction,
                                          SymInt ignore_index, double label_smoothing,
                                          int64_t chunk_rows, ScalarType dtype, Mask3 output_mask,
                                          double z_loss, double softcap, bool return_lse,
                                          bool return_argmax) {
  const Call c(
      input, weight, bias, target, class_weight,
      {{reduction, std::move(ignore_index), label_smoothing, z_loss}, softcap, chunk_rows});
  check_call(c, output_mask);
  check_is_dtype(dtype, "linear_cross_entropy_forward: dtype");
  const ScalarType type = input.scalar_type();
  const auto [dx, dw, db] = empty_gradients(c, output_mask, stored_type(type));
  const auto rows = RowResults::empty(c, return_lse, return_argmax);
  const auto options = input.options();
  return {c.is_none() ? at::empty_like(rows.loss, options.dtype(dtype))
                      : at::empty({}, options.dtype(dtype)),
          at::empty({}, options.dtype(accum_type(type))),
          dx,
          dw,
          db,
          rows.lse,
          rows.argmax};
}

Gradients linear_cross_entropy_backward_meta(const Tensor& grad_output, const Tensor& input,
                                             const Tensor& weight, const OptionalTensor& bias,
                                             const Tensor& target,
                                             const OptionalTensor& class_weight, int64_t reduction,
                                             SymInt ignore_index, double label_smoothing,
                                             int64_t chunk_rows, Mask3 output_mask, double z_loss,
                                             double softcap, const OptionalTensor& grad_lse) {
  const Call c(
      input, weight, bias, target, class_weight,
      {{reduction, std::move(ignore_index), label_smoothing, z_loss}, softcap, chunk_rows});
  check_call(c, output_mask);
  check_row_gradients(c, grad_output, value_or_undefined(grad_lse));
  return empty_gradients(c, output_mask, input.scalar_type());
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def(
      "linear_cross_entropy_forward(Tensor input, Tensor weight, Tensor? bias, Tensor target, "
      "Tensor? class_weight, int reduction, SymInt ignore_index, float label_smoothing, "
      "int chunk_rows, ScalarType dtype, bool[3] output_mask, float z_loss=0.0, "
      "float softcap=0.0, bool return_lse=False, bool return_argmax=False) -> (Tensor loss, "
      "Tensor total_weight, Tensor grad_input, Tensor grad_weight, Tensor grad_bias, Tensor lse, "
      "Tensor argmax)",
      tags);
  m.def(
      "linear_cross_entropy_backward(Tensor grad_output, Tensor input, Tensor weight, "
      "Tensor? bias, Tensor target, Tensor? class_weight, int reduction, SymInt ignore_index, "
      "float label_smoothing, int chunk_rows, bool[3] output_mask, float z_loss=0.0, "
      "float softcap=0.0, Tensor? grad_lse=None) -> "
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

}  // namespace warpwright
