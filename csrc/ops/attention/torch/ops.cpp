// attention and attention_backward on (B, H, S, D) operands, and attention_dropout_factors, the
// dropout that a call drew, by rows, for the second derivative: from tensors to the kernels.
// Autograd is in attention/torch/autograd.cpp, the user's op in attention/torch/call.cpp.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>

#include <array>
#include <cmath>

#include "ops/attention/attention.h"
#include "ops/attention/torch/common.h"
#include "torch/check_argument.h"
#include "torch/philox.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include "host/launch.h"
#include "host/sm90.h"
#include "torch/cuda.h"
#endif

namespace warpwright {

// ---- output shape ----

namespace {

at::ScalarType accum_type(const Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// Dense, in the memory order of `like` if its rows (the last dimension) are innermost. Where
// strides of `like` are equal or 0, empty_like may put another dimension innermost.
Tensor empty_rows_like(const Tensor& like) {
  if (like.sym_stride(3) == 1) {
    const Tensor result = at::empty_like(like);
    if (result.sym_stride(3) == 1) return result;
  }
  return at::empty_like(like, at::MemoryFormat::Contiguous);
}

// Has the memory order of query if the shapes agree, like native's fused kernels.
Tensor empty_out(const Tensor& query, const Tensor& value) {
  if (query.sym_size(3) == value.sym_size(3)) return empty_rows_like(query);
  return at::empty_symint(
      {query.sym_size(0), query.sym_size(1), query.sym_size(2), value.sym_size(3)},
      query.options());
}

// Query, key and value are thirds of one matrix's rows, (B, S, 3, H, D) in memory or (S, B, 3, H,
// D). So are these tensors, (B, H, S, D) each.
std::array<Tensor, 3> empty_thirds_like(const Tensor& query) {
  const int64_t B = query.size(0), H = query.size(1), S = query.size(2), D = query.size(3);
  const bool batch_first = query.stride(0) >= query.stride(2);
  const Tensor rows =
      at::empty({batch_first ? B : S, batch_first ? S : B, 3, H, D}, query.options());
  std::array<Tensor, 3> thirds;
  for (int i = 0; i < 3; ++i) {
    const Tensor third = rows.select(2, i);
    thirds[i] = batch_first ? third.permute({0, 2, 1, 3}) : third.permute({1, 2, 0, 3});
  }
  return thirds;
}

Tensors3 empty_results(const Tensor& query, const Tensor& value, double dropout_p) {
  return {empty_out(query, value),
          at::empty_symint({query.sym_size(0), query.sym_size(1), query.sym_size(2)},
                           query.options().dtype(lse_type(query))),
          at::empty({dropout_p > 0 ? 2 : 0}, query.options().dtype(at::kLong))};
}

// ---- checks; those that several files share are in checks.cpp ----

// A saved result may be any tensor here, so its properties are checked, not assumed from query. out
// and lse may belong to a softmax over more keys than `key` has, as ring attention passes them. A
// row's probabilities then sum to less than 1.
void check_backward(const Tensor& query, const Tensor& value, const Tensor& grad_out,
                    const Tensor& out, const Tensor& lse, const Tensor& philox_state,
                    double dropout_p, const Tensor& grad_lse) {
  const c10::SymInt sizes[] = {query.sym_size(0), query.sym_size(1), query.sym_size(2),
                               value.sym_size(3)};
  const c10::SymInt numbers[] = {dropout_p > 0 ? 2 : 0};
  const auto type = query.scalar_type();
  check_argument(out, "attention_backward: out", sizes, type, query);
  check_argument(grad_out, "attention_backward: grad_out", sizes, type, query);
  check_argument(lse, "attention_backward: lse", c10::SymIntArrayRef(sizes, 3), lse_type(query),
                 query);
  if (grad_lse.defined())
    check_argument(grad_lse, "attention_backward: grad_lse", c10::SymIntArrayRef(sizes, 3),
                   lse_type(query), query);
  check_argument(philox_state, "attention_backward: philox_state", numbers, at::kLong, query);
  check_contiguous(philox_state, "attention_backward: philox_state");
}

void check_dropout_factors(const Tensor& philox_state, at::ScalarType dtype, double dropout_p,
                           int64_t B, int64_t H, int64_t row_begin, int64_t rows, int64_t S_k) {
  const char* name = "attention_dropout_factors: philox_state";
  const c10::SymInt two[] = {2};
  check_argument(philox_state, name, two, at::kLong, philox_state);
  check_contiguous(philox_state, name);
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kDouble,
              "attention_dropout_factors: dtype: expected Float or Double, got ", dtype);
  TORCH_CHECK(dropout_p >= 0 && dropout_p <= 1,
              "attention_dropout_factors: dropout_p: expected 0 to 1, got ", dropout_p);
  constexpr int64_t kMaxRow = int64_t{1} << 48;  // sums of rows stay in 64 bits
  TORCH_CHECK(B >= 0 && H >= 0 && rows >= 0 && S_k >= 0 && row_begin >= 0 && row_begin <= kMaxRow,
              "attention_dropout_factors: B, H, rows, S_k, row_begin: expected numbers of at least "
              "0, row_begin at most ",
              kMaxRow, ", got ", B, ", ", H, ", ", rows, ", ", S_k, ", ", row_begin);
}

// ---- where the gradients go ----

// Memory for the gradients of query, key and value; undefined where none is wanted. Its function
// runs after the checks.
struct SeparateGradients {
  std::array<bool, 4> output_mask;

  std::array<Tensor, 3> operator()(const Tensor& query, const Tensor& key,
                                   const Tensor& value) const {
    const Tensor* inputs[] = {&query, &key, &value};
    std::array<Tensor, 3> grads;
    for (int i = 0; i < 3; ++i) {
      if (output_mask[i]) grads[i] = empty_rows_like(*inputs[i]);
    }
    return grads;
  }
};
struct GradientsInThirds {
  std::array<bool, 4> output_mask = {true, true, true, false};

  std::array<Tensor, 3> operator()(const Tensor& query, const Tensor&, const Tensor&) const {
    return empty_thirds_like(query);
  }
};

// ---- CPU and CUDA ----

// The kernels need rows of stride 1 that do not overlap. Native copies other operands too.
Tensor with_dense_rows(const Tensor& tensor) {
  const bool dense_row = tensor.size(3) <= 1 || tensor.stride(3) == 1;
  const bool disjoint = tensor.size(2) <= 1 || tensor.stride(2) >= tensor.size(3);
  return dense_row && disjoint ? tensor : tensor.contiguous();
}

AttentionOperand operand(const Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {const_cast<void*>(tensor.const_data_ptr()), tensor.stride(0), tensor.stride(1),
          tensor.stride(2)};
}

AttentionParams make_params(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask,
                            const Tensor& out, const Tensor& lse, const Tensor& philox_state,
                            const AttentionAttributes& a) {
  AttentionParams p{};
  p.dtype = dtype_of(q);
  p.B = q.size(0), p.H = q.size(1), p.H_kv = k.size(1);
  p.S_q = q.size(2), p.S_k = k.size(2), p.D = q.size(3), p.D_v = v.size(3);
  // Without features the scores are 0, not 0 * infinity.
  p.scale = a.scale.value_or(p.D == 0 ? 1.0 : 1.0 / std::sqrt(static_cast<double>(p.D)));
  p.is_causal = a.is_causal;
  set_window(p, a.window_left.value_or(kUnlimited), a.window_right.value_or(kUnlimited));
  p.softcap = a.softcap;
  p.q = operand(q), p.k = operand(k), p.v = operand(v), p.out = operand(out);
  p.lse = const_cast<void*>(lse.const_data_ptr());
  if (mask.defined()) {
    p.mask_type = mask.scalar_type() == at::kBool         ? MaskType::kBool
                  : mask.scalar_type() == q.scalar_type() ? MaskType::kElement
                                                          : MaskType::kFloat32;
    p.mask = mask.const_data_ptr();
    for (int i = 0; i < 4; ++i) {
      p.mask_full[i] = mask.size(i) != 1;
      p.mask_stride[i] = p.mask_full[i] ? mask.stride(i) : 0;
    }
  }
  p.dropout_p = a.dropout_p;
  if (a.dropout_p > 0) p.philox_state = philox_state.const_data_ptr<int64_t>();
  return p;
}

template <class Draw, class Run>
Tensors3 attention_with(const Tensor& query, const Tensor& key, const Tensor& value,
                        const OptionalTensor& attn_mask, const AttentionAttributes& a, Draw&& draw,
                        Run&& run) {
  const Tensor mask = value_or_undefined(attn_mask);
  check_attention(query, key, value, mask, a.dropout_p);
  check_softcap("attention", a.softcap);
  check_has_storage(query, "attention: query");
  check_has_storage(key, "attention: key");
  check_has_storage(value, "attention: value");
  check_has_storage(mask, "attention: attn_mask");
  Tensors3 results = empty_results(query, value, a.dropout_p);
  auto& [out, lse, philox_state] = results;
  if (a.dropout_p > 0) draw(philox_state);
  if (lse.numel() == 0) return results;
  const Tensor q = with_dense_rows(query), k = with_dense_rows(key), v = with_dense_rows(value);
  run(make_params(q, k, v, mask, out, lse, philox_state, a));
  return results;
}

// For kernels that add to the mask's gradient, in the accumulator's type.
Tensor zero_mask_gradient(const AttentionBackwardParams&, const Tensor& query, const Tensor& mask) {
  return at::zeros(mask.sizes(), mask.options().dtype(accum_type(query)));
}

template <class Gradients, class MaskGradient, class Run>
Tensors4 attention_backward_with(const Tensor& grad_out, const Tensor& query, const Tensor& key,
                                 const Tensor& value, const OptionalTensor& attn_mask,
                                 const Tensor& out, const Tensor& lse, const Tensor& philox_state,
                                 const AttentionAttributes& a, const Gradients& gradients,
                                 const OptionalTensor& grad_of_lse, MaskGradient&& mask_gradient,
                                 Run&& run) {
  const Tensor mask = value_or_undefined(attn_mask), grad_lse = value_or_undefined(grad_of_lse);
  check_attention(query, key, value, mask, a.dropout_p);
  check_softcap("attention_backward", a.softcap);
  check_backward(query, value, grad_out, out, lse, philox_state, a.dropout_p, grad_lse);
  check_has_storage(grad_out, "attention_backward: grad_out");
  check_has_storage(query, "attention_backward: query");
  check_has_storage(key, "attention_backward: key");
  check_has_storage(value, "attention_backward: value");
  check_has_storage(mask, "attention_backward: attn_mask");
  check_has_storage(out, "attention_backward: out");
  check_has_storage(lse, "attention_backward: lse");
  check_has_storage(grad_lse, "attention_backward: grad_lse");
  check_has_storage(philox_state, "attention_backward: philox_state");
  const bool any_score = out.numel() != 0 && key.size(2) != 0;
  auto [dq, dk, dv] = gradients(query, key, value);
  if (!any_score) {
    for (const Tensor* grad : {&dq, &dk, &dv}) {
      if (grad->defined()) grad->zero_();
    }
  }
  Tensor dmask;
  const bool want_mask =
      gradients.output_mask[3] && mask.defined() && is_floating(mask.scalar_type());
  if (want_mask && !any_score) dmask = at::zeros_like(mask, at::MemoryFormat::Contiguous);
  if (any_score && (dq.defined() || dk.defined() || dv.defined() || want_mask)) {
    const Tensor q = with_dense_rows(query), k = with_dense_rows(key), v = with_dense_rows(value);
    const Tensor dout = with_dense_rows(grad_out), o = with_dense_rows(out);
    const Tensor rows = lse.contiguous(),
                 dlse = grad_lse.defined() ? grad_lse.contiguous() : Tensor();
    AttentionBackwardParams p{};
    p.fwd = make_params(q, k, v, mask, o, rows, philox_state, a);
    p.dout = operand(dout);
    p.dq = operand(dq), p.dk = operand(dk), p.dv = operand(dv);
    if (want_mask) {
      dmask = mask_gradient(p, query, mask);
      p.dmask = dmask.mutable_data_ptr();
      for (int i = 0; i < 4; ++i) p.dmask_stride[i] = p.fwd.mask_full[i] ? dmask.stride(i) : 0;
    }
    run(p, dlse.defined() ? dlse.const_data_ptr() : nullptr);
  }
  if (want_mask) dmask = dmask.to(mask.scalar_type());
  return {dq, dk, dv, dmask};
}

template <class Run>
Tensor dropout_factors_with(const Tensor& philox_state, at::ScalarType dtype, double dropout_p,
                            int64_t B, int64_t H, int64_t row_begin, int64_t rows, int64_t S_k,
                            Run&& run) {
  check_dropout_factors(philox_state, dtype, dropout_p, B, H, row_begin, rows, S_k);
  check_has_storage(philox_state, "attention_dropout_factors: philox_state");
  const Tensor factors = at::empty({B, H, rows, S_k}, philox_state.options().dtype(dtype));
  if (factors.numel() == 0) return factors;
  run(AttentionDropoutParams{dtype_of(factors), B, H, rows, row_begin, S_k, dropout_p,
                             philox_state.const_data_ptr<int64_t>(), factors.mutable_data_ptr()});
  return factors;
}

Tensors3 attention_cpu_kernel(const Tensor& query, const Tensor& key, const Tensor& value,
                              const OptionalTensor& attn_mask, double dropout_p, bool is_causal,
                              std::optional<double> scale, OptionalInt window_left,
                              OptionalInt window_right, double softcap) {
  return attention_with(query, key, value, attn_mask,
                        {dropout_p, is_causal, scale, window_left, window_right, softcap},
                        draw_cpu_state, attention_fwd_cpu);
}

Tensors4 attention_backward_cpu_kernel(const Tensor& grad_out, const Tensor& query,
                                       const Tensor& key, const Tensor& value,
                                       const OptionalTensor& attn_mask, const Tensor& out,
                                       const Tensor& lse, const Tensor& philox_state,
                                       double dropout_p, bool is_causal,
                                       std::optional<double> scale, std::array<bool, 4> output_mask,
                                       OptionalInt window_left, OptionalInt window_right,
                                       double softcap, const OptionalTensor& grad_lse) {
  return attention_backward_with(grad_out, query, key, value, attn_mask, out, lse, philox_state,
                                 {dropout_p, is_causal, scale, window_left, window_right, softcap},
                                 SeparateGradients{output_mask}, grad_lse, zero_mask_gradient,
                                 attention_bwd_cpu);
}

Tensor dropout_factors_cpu_kernel(const Tensor& philox_state, at::ScalarType dtype,
                                  double dropout_p, int64_t B, int64_t H, int64_t row_begin,
                                  int64_t rows, int64_t S_k) {
  return dropout_factors_with(philox_state, dtype, dropout_p, B, H, row_begin, rows, S_k,
                              attention_dropout_cpu);
}

#ifdef WARPWRIGHT_WITH_CUDA
// Undefined if the kernels need no memory.
Tensor workspace_of(const AttentionPlan& plan, const Tensor& like) {
  if (plan.workspace_bytes() == 0) return {};
  return at::empty({plan.workspace_bytes()}, like.options().dtype(at::kByte));
}
void* data_of(const Tensor& workspace) {
  return workspace.defined() ? workspace.mutable_data_ptr() : nullptr;
}

Tensors3 attention_cuda_kernel(const Tensor& query, const Tensor& key, const Tensor& value,
                               const OptionalTensor& attn_mask, double dropout_p, bool is_causal,
                               std::optional<double> scale, OptionalInt window_left,
                               OptionalInt window_right, double softcap) {
  const CudaCall call(query);
  auto draw = [&](const Tensor& philox_state) {
    launch_philox_state(next_cuda_source(), philox_state.mutable_data_ptr<int64_t>(), call.stream);
  };
  return attention_with(query, key, value, attn_mask,
                        {dropout_p, is_causal, scale, window_left, window_right, softcap}, draw,
                        [&](const AttentionParams& p) {
                          const AttentionPlan plan =
                              choose_attention(p, current_device_info(), sm90_path_available());
                          const Tensor workspace = workspace_of(plan, query);
                          launch_attention(p, plan, data_of(workspace), call.stream);
                        });
}

template <class Gradients>
Tensors4 attention_backward_on_cuda(const Tensor& grad_out, const Tensor& query, const Tensor& key,
                                    const Tensor& value, const OptionalTensor& attn_mask,
                                    const Tensor& out, const Tensor& lse,
                                    const Tensor& philox_state, const AttentionAttributes& a,
                                    const Gradients& gradients, const OptionalTensor& grad_lse) {
  const CudaCall call(query);
  auto mask_gradient = [](const AttentionBackwardParams& p, const Tensor& q, const Tensor& mask) {
    return rounds_mask_gradient(p, current_device_info(), sm90_path_available())
               ? at::empty(mask.sizes(), mask.options())
               : zero_mask_gradient(p, q, mask);
  };
  return attention_backward_with(
      grad_out, query, key, value, attn_mask, out, lse, philox_state, a, gradients, grad_lse,
      mask_gradient, [&](const AttentionBackwardParams& p, const void* dlse) {
        const AttentionBackwardPlan plan =
            choose_attention_backward(p, current_device_info(), sm90_path_available());
        const Tensor workspace = workspace_of(plan, query);
        launch_attention_backward(p, dlse, plan, data_of(workspace), call.stream);
      });
}

Tensors4 attention_backward_cuda_kernel(
    const Tensor& grad_out, const Tensor& query, const Tensor& key, const Tensor& value,
    const OptionalTensor& attn_mask, const Tensor& out, const Tensor& lse,
    const Tensor& philox_state, double dropout_p, bool is_causal, std::optional<double> scale,
    std::array<bool, 4> output_mask, OptionalInt window_left, OptionalInt window_right,
    double softcap, const OptionalTensor& grad_lse) {
  return attention_backward_on_cuda(
      grad_out, query, key, value, attn_mask, out, lse, philox_state,
      {dropout_p, is_causal, scale, window_left, window_right, softcap},
      SeparateGradients{output_mask}, grad_lse);
}

Tensor dropout_factors_cuda_kernel(const Tensor& philox_state, at::ScalarType dtype,
                                   double dropout_p, int64_t B, int64_t H, int64_t row_begin,
                                   int64_t rows, int64_t S_k) {
  const CudaCall call(philox_state);
  return dropout_factors_with(
      philox_state, dtype, dropout_p, B, H, row_begin, rows, S_k,
      [&](const AttentionDropoutParams& p) { launch_attention_dropout(p, call.stream); });
}
#endif

// ---- Meta ----

Tensors3 attention_meta(const Tensor& query, const Tensor& key, const Tensor& value,
                        const OptionalTensor& attn_mask, double dropout_p, bool,
                        std::optional<double>, OptionalInt, OptionalInt, double softcap) {
  check_attention(query, key, value, value_or_undefined(attn_mask), dropout_p);
  check_softcap("attention", softcap);
  return empty_results(query, value, dropout_p);
}

Tensors4 attention_backward_meta(const Tensor& grad_out, const Tensor& query, const Tensor& key,
                                 const Tensor& value, const OptionalTensor& attn_mask,
                                 const Tensor& out, const Tensor& lse, const Tensor& philox_state,
                                 double dropout_p, bool, std::optional<double>,
                                 std::array<bool, 4> output_mask, OptionalInt, OptionalInt,
                                 double softcap, const OptionalTensor& grad_lse) {
  const Tensor mask = value_or_undefined(attn_mask);
  check_attention(query, key, value, mask, dropout_p);
  check_softcap("attention_backward", softcap);
  check_backward(query, value, grad_out, out, lse, philox_state, dropout_p,
                 value_or_undefined(grad_lse));
  auto grad_of = [](bool wanted, const Tensor& input) {
    return wanted ? empty_rows_like(input) : Tensor();
  };
  const bool want_mask = output_mask[3] && mask.defined() && is_floating(mask.scalar_type());
  return {grad_of(output_mask[0], query), grad_of(output_mask[1], key),
          grad_of(output_mask[2], value),
          want_mask ? at::empty_symint(mask.sym_sizes(), mask.options()) : Tensor()};
}

Tensor dropout_factors_meta(const Tensor& philox_state, at::ScalarType dtype, double dropout_p,
                            int64_t B, int64_t H, int64_t row_begin, int64_t rows, int64_t S_k) {
  check_dropout_factors(philox_state, dtype, dropout_p, B, H, row_begin, rows, S_k);
  return at::empty({B, H, rows, S_k}, philox_state.options().dtype(dtype));
}

}  // namespace

Tensors4 attention_backward_in_thirds(const Tensor& grad_out, const Tensor& query,
                                      const Tensor& key, const Tensor& value,
                                      const OptionalTensor& attn_mask, const Tensor& out,
                                      const Tensor& lse, const Tensor& philox_state,
                                      const AttentionAttributes& a,
                                      const OptionalTensor& grad_lse) {
  // Profilers see it as the op that it stands for.
  RECORD_FUNCTION("warpwright::attention_backward",
                  std::vector<c10::IValue>({grad_out, query, key, value}));
  const GradientsInThirds gradients;
#ifdef WARPWRIGHT_WITH_CUDA
  if (query.is_cuda()) {
    return attention_backward_on_cuda(grad_out, query, key, value, attn_mask, out, lse,
                                      philox_state, a, gradients, grad_lse);
  }
#endif
  return attention_backward_with(grad_out, query, key, value, attn_mask, out, lse, philox_state, a,
                                 gradients, grad_lse, zero_mask_gradient, attention_bwd_cpu);
}

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def(
      "attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, float dropout_p, "
      "bool is_causal, float? scale, int? window_left=None, int? window_right=None, "
      "float softcap=0.0) -> (Tensor out, Tensor lse, Tensor philox_state)",
      {at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded});
  m.def(
      "attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, "
      "Tensor? attn_mask, Tensor out, Tensor lse, Tensor philox_state, float dropout_p, "
      "bool is_causal, float? scale, bool[4] output_mask, int? window_left=None, "
      "int? window_right=None, float softcap=0.0, Tensor? grad_lse=None) -> "
      "(Tensor, Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "attention_dropout_factors(Tensor philox_state, ScalarType dtype, float dropout_p, int B, "
      "int H, int row_begin, int rows, int S_k) -> Tensor",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) {
  m.impl("attention", attention_cpu_kernel);
  m.impl("attention_backward", attention_backward_cpu_kernel);
  m.impl("attention_dropout_factors", dropout_factors_cpu_kernel);
}

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) {
  m.impl("attention", attention_cuda_kernel);
  m.impl("attention_backward", attention_backward_cuda_kernel);
  m.impl("attention_dropout_factors", dropout_factors_cuda_kernel);
}
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) {
  m.impl("attention", attention_meta);
  m.impl("attention_backward", attention_backward_meta);
  m.impl("attention_dropout_factors", dropout_factors_meta);
}

}  // namespace warpwright
