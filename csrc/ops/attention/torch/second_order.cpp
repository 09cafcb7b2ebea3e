// attention_second_order: the linear map behind double backward and forward-mode AD, in ATen ops
// over blocks of query rows, so that memory is O(B * H * S_k) a row block and never S_q x S_k.
// With tangents tq, tk, tv, tm of query, key, value and mask, and Z the dropout factors:
//   G = scale * (tq k^T + q tk^T) + tm       the tangent of the scores
//   gamma = rowsum(P * G), A = P * Z
//   X = (A * G) v + A tv                     d out = X - gamma * out
//   dA = dout v^T, dP = Z * dA, delta = rowsum(dout * out), dS = P * (dP - delta)
//   T = dP * (G - gamma) - delta * G + Z * (dout tv^T)
//   tau = rowsum(P * T) = rowsum(dout * X) - 2 * gamma * delta,  U = P * (T - tau)
//   d dq = scale * (U k + dS tk), d dk = scale * (U^T q + dS^T tq), d dmask = U
//   d dv = (A * (G - gamma))^T dout
// Read with tq.. as tangents, these are the tangents of attention_backward's results (dout held);
// read with tq.. as cotangents of dq.., they are the gradients of grad_out, query, key, value and
// mask: the map is its own transpose. Everything is recomputed from differentiable values, so the
// third derivative is autograd's.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "ops/attention/torch/common.h"
#include "torch/check_argument.h"

namespace warpwright {
namespace {

// A fully hidden row is 0, in its derivatives too.
Tensor safe_softmax(const Tensor& scores) {
  const Tensor hidden =
      (scores == -std::numeric_limits<double>::infinity()).all(/*dim=*/-1, /*keepdim=*/true);
  return at::softmax(scores.masked_fill(hidden, 0), -1).masked_fill(hidden, 0);
}

// Rows of queries a block may have, so that its scores stay near 4 M elements.
int64_t block_rows(int64_t scores_per_row, int64_t S_q) {
  constexpr int64_t kScores = int64_t{1} << 22;
  return std::min(S_q, std::max<int64_t>(16, kScores / std::max<int64_t>(1, scores_per_row)));
}

Tensors5 attention_second_order(const OptionalTensor& grad_out, const Tensor& query,
                                const Tensor& key, const Tensor& value,
                                const OptionalTensor& attn_mask, const Tensor& out,
                                const Tensor& philox_state, double dropout_p, bool is_causal,
                                std::optional<double> scale_or_default,
                                const OptionalTensor& t_query, const OptionalTensor& t_key,
                                const OptionalTensor& t_value, const OptionalTensor& t_mask) {
  const Tensor mask = value_or_undefined(attn_mask);
  check_attention(query, key, value, mask, dropout_p);
  const char* name = "attention_second_order: an operand or a tangent";
  for (const Tensor* t : {&query, &key, &value, &mask, &out, &philox_state}) {
    check_plain_storage(*t, name);
  }
  for (const OptionalTensor* t : {&grad_out, &t_query, &t_key, &t_value, &t_mask}) {
    check_plain_storage(value_or_undefined(*t), name);
  }
  const auto accum = query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  auto extent = [](const Tensor& t, int64_t dim) {
    return t.sym_size(dim).guard_int(__FILE__, __LINE__);
  };
  const int64_t B = extent(query, 0), H = extent(query, 1), S_q = extent(query, 2),
                D = extent(query, 3), H_kv = extent(key, 1), S_k = extent(key, 2);
  const double scale = scale_or_default.value_or(D == 0 ? 1.0 : 1.0 / std::sqrt(double(D)));

  auto wide = [&](const OptionalTensor& t) { return t.has_value() ? t->to(accum) : Tensor(); };
  auto all_heads = [&](const Tensor& t) {
    if (!t.defined() || H == H_kv) return t;
    const int64_t d = extent(t, 3);
    return t.unsqueeze(2).expand({B, H_kv, H / H_kv, S_k, d}).reshape({B, H, S_k, d});
  };
  auto kv_heads = [&](const Tensor& t) {
    if (!t.defined() || H == H_kv) return t;
    return t.reshape({B, H_kv, H / H_kv, S_k, extent(t, 3)}).sum(2);
  };
  const Tensor q_all = wide(query), tq_all = wide(t_query), out_all = wide(out),
               dout_all = wide(grad_out), tm_all = wide(t_mask);
  const Tensor k = all_heads(wide(key)), tk = all_heads(wide(t_key));
  const Tensor v = all_heads(wide(value)), tv = all_heads(wide(t_value));
  const bool want_mask = mask.defined() && is_floating(mask.scalar_type());

  std::vector<Tensor> d_out, d_query, d_mask;
  Tensor d_key, d_value, d_mask_sum;
  const int64_t step = std::max<int64_t>(1, block_rows(B * H * S_k, S_q));
  for (int64_t begin = 0; begin < S_q || begin == 0; begin += step) {
    const int64_t rows = std::min(step, S_q - begin);
    auto block = [&](const Tensor& t) {
      return t.defined() && extent(t, 2) != 1 ? t.narrow(2, begin, rows) : t;
    };
    auto rows_of = [&](const Tensor& t) { return t.defined() ? t.narrow(2, begin, rows) : t; };
    const Tensor q = rows_of(q_all), tq = rows_of(tq_all), o = rows_of(out_all),
                 dout = rows_of(dout_all);

    Tensor scores = at::matmul(q, k.mT()) * scale;
    if (mask.defined()) {
      const Tensor m = block(mask);
      scores = mask.scalar_type() == at::kBool
                   ? scores.masked_fill(m.logical_not(), -std::numeric_limits<double>::infinity())
                   : scores + m.to(accum);
    }
    if (is_causal) {
      const auto options = query.options().dtype(at::kLong);
      const Tensor hidden =
          at::arange(S_k, options) > at::arange(begin, begin + rows, options).unsqueeze(1);
      scores = scores.masked_fill(hidden, -std::numeric_limits<double>::infinity());
    }
    const Tensor P = safe_softmax(scores);
    const Tensor Z = dropout_p > 0 ? call::attention_dropout_factors(philox_state, accum, dropout_p,
                                                                     B, H, begin, rows, S_k)
                                   : Tensor();
    auto dropped = [&](const Tensor& t) { return Z.defined() ? t * Z : t; };
    const Tensor A = dropped(P);

    Tensor G;
    if (tq.defined()) G = at::matmul(tq, k.mT());
    if (tk.defined()) G = sum_of(G, at::matmul(q, tk.mT()));
    if (G.defined()) G = G * scale;
    if (tm_all.defined()) G = sum_of(G, block(tm_all));
    if (!G.defined()) G = at::zeros_like(P);
    const Tensor gamma = (P * G).sum(-1, /*keepdim=*/true);
    Tensor X = at::matmul(A * G, v);
    if (tv.defined()) X = X + at::matmul(A, tv);
    d_out.push_back(X - gamma * o);
    if (!dout.defined()) continue;

    const Tensor dP = dropped(at::matmul(dout, v.mT()));
    const Tensor delta = (dout * o).sum(-1, /*keepdim=*/true);
    const Tensor dS = P * (dP - delta);
    Tensor T = dP * (G - gamma) - delta * G;
    if (tv.defined()) T = T + dropped(at::matmul(dout, tv.mT()));
    const Tensor tau = (dout * X).sum(-1, /*keepdim=*/true) - 2 * gamma * delta;
    const Tensor U = P * (T - tau);
    Tensor dq = at::matmul(U, k), dk = at::matmul(U.mT(), q);
    if (tk.defined()) dq = dq + at::matmul(dS, tk);
    if (tq.defined()) dk = dk + at::matmul(dS.mT(), tq);
    d_query.push_back(dq * scale);
    d_key = sum_of(d_key, dk * scale);
    d_value = sum_of(d_value, at::matmul((A * (G - gamma)).mT(), dout));
    if (want_mask) {
      const bool row_broadcast = extent(mask, 2) == 1;
      auto sizes = mask.sym_sizes().vec();
      if (!row_broadcast) sizes[2] = rows;
      const Tensor reduced = U.sum_to_size_symint(sizes);
      if (row_broadcast)
        d_mask_sum = sum_of(d_mask_sum, reduced);
      else
        d_mask.push_back(reduced);
    }
  }

  Tensors5 results;
  std::get<0>(results) = at::cat(d_out, 2).to(out.scalar_type());
  if (!dout_all.defined()) return results;
  std::get<1>(results) = at::cat(d_query, 2).to(query.scalar_type());
  std::get<2>(results) = kv_heads(d_key).to(key.scalar_type());
  std::get<3>(results) = kv_heads(d_value).to(value.scalar_type());
  if (want_mask) {
    std::get<4>(results) =
        (d_mask_sum.defined() ? d_mask_sum : at::cat(d_mask, 2)).to(mask.scalar_type());
  }
  return results;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def(
      "attention_second_order(Tensor? grad_out, Tensor query, Tensor key, Tensor value, "
      "Tensor? attn_mask, Tensor out, Tensor philox_state, float dropout_p, bool is_causal, "
      "float? scale, Tensor? t_query, Tensor? t_key, Tensor? t_value, Tensor? t_mask) -> "
      "(Tensor, Tensor, Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  m.impl("attention_second_order", torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd,
                                                   TORCH_FN(attention_second_order)));
}

}  // namespace warpwright
