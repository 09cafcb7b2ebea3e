// attention_varlen and attention_varlen_backward, on packed sequences: from tensors to the kernels.
// Autograd is in attention/torch/varlen_autograd.cpp.
#include <ATen/ops/empty.h>

#include <array>
#include <cmath>
#include <string>

#include "ops/attention/varlen.h"

#include "ops/attention/torch/varlen.h"
#include "torch/check_argument.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include "host/error_word.h"
#include "host/launch.h"
#include "host/sm90.h"
#include "torch/cuda.h"
#endif

namespace warpwright {
namespace {

constexpr const char* kOp = "attention_varlen";

// ---- output shape and checks ----

void check_varlen(const VarlenTensors& x, const VarlenAttributes& a) {
  const auto named = [](const char* argument) {
    return std::string("attention_varlen: ") + argument;
  };
  TORCH_CHECK_NOT_IMPLEMENTED(is_floating(x.query.scalar_type()), kOp,
                              ": query: expected Float, Double, BFloat16 or Half, got ",
                              x.query.scalar_type());
  for (const auto& [tensor, name] :
       {std::pair(&x.query, "query"), {&x.key, "key"}, {&x.value, "value"}}) {
    TORCH_CHECK(tensor->dim() == 3, kOp, ": ", name,
                ": expected (tokens, heads, head size), got shape ", tensor->sym_sizes());
    TORCH_CHECK(tensor->scalar_type() == x.query.scalar_type(), kOp, ": ", name, ": expected ",
                x.query.scalar_type(), " as query, got ", tensor->scalar_type());
    check_same_device(*tensor, x.query, named(name).c_str());
  }
  TORCH_CHECK(x.key.sym_size(2) == x.query.sym_size(2), kOp, ": key: expected head size ",
              x.query.sym_size(2), " as query, got ", x.key.sym_size(2));
  TORCH_CHECK(x.value.sym_size(0) == x.key.sym_size(0) && x.value.sym_size(1) == x.key.sym_size(1),
              kOp, ": value: expected ", x.key.sym_size(0), " tokens and ", x.key.sym_size(1),
              " heads as key, got shape ", x.value.sym_sizes());
  const c10::SymInt heads = x.query.sym_size(1), kv_heads = x.key.sym_size(1);
  TORCH_CHECK(heads == kv_heads || (kv_heads != 0 && heads % kv_heads == 0), kOp,
              ": query: expected a multiple of key's ", kv_heads, " heads, got ", heads);
  for (const auto& [tensor, name] :
       {std::pair(&x.cu_q, "cu_seqlens_q"), {&x.cu_k, "cu_seqlens_k"}}) {
    TORCH_CHECK(tensor->dim() == 1 && tensor->sym_size(0) >= 1, kOp, ": ", name,
                ": expected the ends of sequences, (sequences + 1,), got shape ",
                tensor->sym_sizes());
    TORCH_CHECK(tensor->scalar_type() == at::kInt, kOp, ": ", name, ": expected Int, got ",
                tensor->scalar_type());
    check_same_device(*tensor, x.query, named(name).c_str());
  }
  TORCH_CHECK(x.cu_q.sym_size(0) == x.cu_k.sym_size(0), kOp, ": cu_seqlens_k: expected ",
              x.cu_q.sym_size(0), " numbers as cu_seqlens_q, got ", x.cu_k.sym_size(0));
  constexpr int64_t kMaxTokens = (int64_t{1} << 31) - 1;
  TORCH_CHECK(x.query.sym_size(0) <= kMaxTokens && x.key.sym_size(0) <= kMaxTokens, kOp,
              ": query: expected at most 2^31 - 1 tokens, got ", x.query.sym_size(0), " and ",
              x.key.sym_size(0), " of key");
  TORCH_CHECK(a.max_q >= 0 && a.max_k >= 0, kOp,
              ": max_seqlen_q, max_seqlen_k: expected at least 0, got ", a.max_q, " and ", a.max_k);
  check_softcap(kOp, a.softcap);
}

void check_varlen_backward(const VarlenTensors& x, const Tensor& grad_out, const Tensor& out,
                           const Tensor& lse, const Tensor& grad_lse) {
  const auto type = x.query.scalar_type();
  const c10::SymInt sizes[] = {x.query.sym_size(0), x.query.sym_size(1), x.value.sym_size(2)};
  const c10::SymInt rows[] = {x.query.sym_size(1), x.query.sym_size(0)};
  check_argument(out, "attention_varlen_backward: out", sizes, type, x.query);
  check_argument(grad_out, "attention_varlen_backward: grad_out", sizes, type, x.query);
  check_argument(lse, "attention_varlen_backward: lse", rows, lse_type(x.query), x.query);
  if (grad_lse.defined())
    check_argument(grad_lse, "attention_varlen_backward: grad_lse", rows, lse_type(x.query),
                   x.query);
}

void check_storage(std::initializer_list<const Tensor*> tensors) {
  for (const Tensor* t : tensors) check_has_storage(*t, "attention_varlen: an argument");
}

std::tuple<Tensor, Tensor> empty_varlen(const VarlenTensors& x) {
  return {at::empty_symint({x.query.sym_size(0), x.query.sym_size(1), x.value.sym_size(2)},
                           x.query.options()),
          at::empty_symint({x.query.sym_size(1), x.query.sym_size(0)},
                           x.query.options().dtype(lse_type(x.query)))};
}
Tensor empty_gradient(bool wanted, const Tensor& input) {
  return wanted ? at::empty_symint(input.sym_sizes(), input.options()) : Tensor();
}

// ---- CPU and CUDA ----

// Rows of stride 1 that do not overlap.
Tensor with_dense_heads(const Tensor& t) {
  const bool dense = t.size(2) <= 1 || t.stride(2) == 1;
  const bool disjoint =
      (t.size(0) <= 1 || t.stride(0) >= t.size(2)) && (t.size(1) <= 1 || t.stride(1) >= t.size(2));
  return dense && disjoint ? t : t.contiguous();
}
AttentionOperand packed_operand(const Tensor& t) {
  if (!t.defined()) return {};
  return {const_cast<void*>(t.const_data_ptr()), 0, t.stride(1), t.stride(0)};
}

AttentionParams packed_params(const VarlenTensors& x, const VarlenAttributes& a, const Tensor& out,
                              const Tensor& lse) {
  AttentionParams p{};
  p.dtype = dtype_of(x.query);
  p.B = 1, p.H = x.query.size(1), p.H_kv = x.key.size(1);
  p.S_q = x.query.size(0), p.S_k = x.key.size(0), p.D = x.query.size(2), p.D_v = x.value.size(2);
  p.scale = a.scale.value_or(p.D == 0 ? 1.0 : 1.0 / std::sqrt(static_cast<double>(p.D)));
  p.is_causal = a.is_causal;
  set_packed_window(p, a.window_left.value_or(kUnlimited), a.window_right.value_or(kUnlimited));
  p.softcap = a.softcap;
  p.q = packed_operand(x.query), p.k = packed_operand(x.key), p.v = packed_operand(x.value);
  p.out = packed_operand(out);
  p.lse = const_cast<void*>(lse.const_data_ptr());
  return p;
}
// Holds the contiguous ends.
struct EndsOfSequences {
  Tensor q, k;
  explicit EndsOfSequences(const VarlenTensors& x)
      : q(x.cu_q.contiguous()), k(x.cu_k.contiguous()) {}
  PackedSequences get(const VarlenAttributes& a) const {
    return {q.const_data_ptr<int32_t>(), k.const_data_ptr<int32_t>(), q.size(0) - 1, a.max_q,
            a.max_k};
  }
};

template <class Run>
std::tuple<Tensor, Tensor> varlen_with(const VarlenTensors& x, const VarlenAttributes& a,
                                       Run&& run) {
  check_varlen(x, a);
  check_storage({&x.query, &x.key, &x.value, &x.cu_q, &x.cu_k});
  auto results = empty_varlen(x);
  auto& [out, lse] = results;
  if (lse.numel() == 0) return results;
  const EndsOfSequences ends(x);
  const VarlenTensors dense{with_dense_heads(x.query), with_dense_heads(x.key),
                            with_dense_heads(x.value), ends.q, ends.k};
  run(VarlenParams{packed_params(dense, a, out, lse), ends.get(a)});
  return results;
}

template <class Run>
Tensors3 varlen_backward_with(const Tensor& grad_out, const VarlenTensors& x, const Tensor& out,
                              const Tensor& lse, const Tensor& grad_lse, const VarlenAttributes& a,
                              std::array<bool, 3> output_mask, Run&& run) {
  check_varlen(x, a);
  check_varlen_backward(x, grad_out, out, lse, grad_lse);
  check_storage({&x.query, &x.key, &x.value, &x.cu_q, &x.cu_k, &grad_out, &out, &lse, &grad_lse});
  Tensors3 grads{empty_gradient(output_mask[0], x.query), empty_gradient(output_mask[1], x.key),
                 empty_gradient(output_mask[2], x.value)};
  auto& [dq, dk, dv] = grads;
  if (!dq.defined() && !dk.defined() && !dv.defined()) return grads;
  if (lse.numel() == 0 || x.key.size(0) == 0) {
    for (Tensor* grad : {&dq, &dk, &dv})
      if (grad->defined()) grad->zero_();
    return grads;
  }
  const EndsOfSequences ends(x);
  const VarlenTensors dense{with_dense_heads(x.query), with_dense_heads(x.key),
                            with_dense_heads(x.value), ends.q, ends.k};
  const Tensor dout = with_dense_heads(grad_out), o = with_dense_heads(out),
               rows = lse.contiguous(),
               dlse = grad_lse.defined() ? grad_lse.contiguous() : Tensor();
  VarlenBackwardParams b{};
  b.bwd.fwd = packed_params(dense, a, o, rows);
  b.bwd.dout = packed_operand(dout);
  b.bwd.dq = packed_operand(dq), b.bwd.dk = packed_operand(dk), b.bwd.dv = packed_operand(dv);
  b.sequences = ends.get(a);
  b.dlse = dlse.defined() ? dlse.const_data_ptr() : nullptr;
  run(b);
  return grads;
}

std::tuple<Tensor, Tensor> varlen_cpu_kernel(const Tensor& query, const Tensor& key,
                                             const Tensor& value, const Tensor& cu_seqlens_q,
                                             const Tensor& cu_seqlens_k, int64_t max_seqlen_q,
                                             int64_t max_seqlen_k, bool is_causal,
                                             std::optional<double> scale, OptionalInt window_left,
                                             OptionalInt window_right, double softcap) {
  return varlen_with(
      {query, key, value, cu_seqlens_q, cu_seqlens_k},
      {max_seqlen_q, max_seqlen_k, is_causal, scale, window_left, window_right, softcap},
      varlen_fwd_cpu);
}
Tensors3 varlen_backward_cpu_kernel(const Tensor& grad_out, const Tensor& query, const Tensor& key,
                                    const Tensor& value, const Tensor& cu_seqlens_q,
                                    const Tensor& cu_seqlens_k, const Tensor& out,
                                    const Tensor& lse, int64_t max_seqlen_q, int64_t max_seqlen_k,
                                    bool is_causal, std::optional<double> scale,
                                    OptionalInt window_left, OptionalInt window_right,
                                    double softcap, std::array<bool, 3> output_mask,
                                    const OptionalTensor& grad_lse) {
  return varlen_backward_with(
      grad_out, {query, key, value, cu_seqlens_q, cu_seqlens_k}, out, lse,
      value_or_undefined(grad_lse),
      {max_seqlen_q, max_seqlen_k, is_causal, scale, window_left, window_right, softcap},
      output_mask, varlen_bwd_cpu);
}

#ifdef WARPWRIGHT_WITH_CUDA
VarlenErrors varlen_errors() {
  return {error_record(ErrorSource::kVarlenQueries), error_record(ErrorSource::kVarlenKeys)};
}
void check_varlen_strict(cudaStream_t stream) {
  const auto error = check_strict(stream);
  TORCH_CHECK_INDEX(!error.has_value(), error.value_or(""));
}
Tensor varlen_memory(const VarlenPlan& plan, const Tensor& like) {
  return at::empty({plan.workspace_bytes()}, like.options().dtype(at::kByte));
}

std::tuple<Tensor, Tensor> varlen_cuda_kernel(const Tensor& query, const Tensor& key,
                                              const Tensor& value, const Tensor& cu_seqlens_q,
                                              const Tensor& cu_seqlens_k, int64_t max_seqlen_q,
                                              int64_t max_seqlen_k, bool is_causal,
                                              std::optional<double> scale, OptionalInt window_left,
                                              OptionalInt window_right, double softcap) {
  const CudaCall call(query);
  auto run = [&](const VarlenParams& p) {
    const VarlenPlan plan =
        choose_varlen(p.fwd, p.sequences, nullptr, current_device_info(), sm90_path_available());
    const Tensor memory = varlen_memory(plan, query);
    launch_varlen(p, plan, memory.mutable_data_ptr(), varlen_errors(), call.stream);
    check_varlen_strict(call.stream);
  };
  return varlen_with(
      {query, key, value, cu_seqlens_q, cu_seqlens_k},
      {max_seqlen_q, max_seqlen_k, is_causal, scale, window_left, window_right, softcap}, run);
}
Tensors3 varlen_backward_cuda_kernel(const Tensor& grad_out, const Tensor& query, const Tensor& key,
                                     const Tensor& value, const Tensor& cu_seqlens_q,
                                     const Tensor& cu_seqlens_k, const Tensor& out,
                                     const Tensor& lse, int64_t max_seqlen_q, int64_t max_seqlen_k,
                                     bool is_causal, std::optional<double> scale,
                                     OptionalInt window_left, OptionalInt window_right,
                                     double softcap, std::array<bool, 3> output_mask,
                                     const OptionalTensor& grad_lse) {
  const CudaCall call(query);
  auto run = [&](const VarlenBackwardParams& p) {
    const VarlenPlan plan =
        choose_varlen(p.bwd.fwd, p.sequences, &p.bwd, current_device_info(), sm90_path_available());
    const Tensor memory = varlen_memory(plan, query);
    launch_varlen_backward(p, plan, memory.mutable_data_ptr(), varlen_errors(), call.stream);
    check_varlen_strict(call.stream);
  };
  return varlen_backward_with(
      grad_out, {query, key, value, cu_seqlens_q, cu_seqlens_k}, out, lse,
      value_or_undefined(grad_lse),
      {max_seqlen_q, max_seqlen_k, is_causal, scale, window_left, window_right, softcap},
      output_mask, run);
}
#endif

// ---- Meta ----

std::tuple<Tensor, Tensor> varlen_meta(const Tensor& query, const Tensor& key, const Tensor& value,
                                       const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                                       c10::SymInt, c10::SymInt, bool, std::optional<double>,
                                       OptionalInt, OptionalInt, double softcap) {
  const VarlenTensors x{query, key, value, cu_seqlens_q, cu_seqlens_k};
  check_varlen(x, {.softcap = softcap});
  return empty_varlen(x);
}
Tensors3 varlen_backward_meta(const Tensor& grad_out, const Tensor& query, const Tensor& key,
                              const Tensor& value, const Tensor& cu_seqlens_q,
                              const Tensor& cu_seqlens_k, const Tensor& out, const Tensor& lse,
                              c10::SymInt, c10::SymInt, bool, std::optional<double>, OptionalInt,
                              OptionalInt, double softcap, std::array<bool, 3> output_mask,
                              const OptionalTensor& grad_lse) {
  const VarlenTensors x{query, key, value, cu_seqlens_q, cu_seqlens_k};
  check_varlen(x, {.softcap = softcap});
  check_varlen_backward(x, grad_out, out, lse, value_or_undefined(grad_lse));
  return {empty_gradient(output_mask[0], query), empty_gradient(output_mask[1], key),
          empty_gradient(output_mask[2], value)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def(
      "attention_varlen(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, "
      "Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, bool is_causal=False, "
      "float? scale=None, int? window_left=None, int? window_right=None, float softcap=0.0) -> "
      "(Tensor out, Tensor lse)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "attention_varlen_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, "
      "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor out, Tensor lse, SymInt max_seqlen_q, "
      "SymInt max_seqlen_k, bool is_causal, float? scale, int? window_left, int? window_right, "
      "float softcap, bool[3] output_mask, Tensor? grad_lse=None) -> (Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) {
  m.impl("attention_varlen", varlen_cpu_kernel);
  m.impl("attention_varlen_backward", varlen_backward_cpu_kernel);
}

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) {
  m.impl("attention_varlen", varlen_cuda_kernel);
  m.impl("attention_varlen_backward", varlen_backward_cuda_kernel);
}
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) {
  m.impl("attention_varlen", varlen_meta);
  m.impl("attention_varlen_backward", varlen_backward_meta);
}

}  // namespace warpwright
