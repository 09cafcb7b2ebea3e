// attention_second_order: the linear map of double backward and forward-mode AD, in ATen ops over
// blocks of query rows. Memory is O(B * H * S_k) per row of a block, never S_q x S_k.
// With tangents tq, tk, tv, tm of query, key, value and mask, and Z the dropout factors:
//   X = scale * q k^T, S = cap(X) + mask; without softcap cap(x) = x
//   GX = scale * (tq k^T + q tk^T), G = cap'(X) * GX + tm       the tangents of X and S
//   gamma = rowsum(P * G), A = P * Z
//   X = (A * G) v + A tv                     d out = X - gamma * out, d lse = gamma
//   dA = dout v^T, dP = Z * dA, delta = rowsum(dout * out) - dlse, dS = P * (dP - delta)
//   T = dP * (G - gamma) - delta * G + Z * (dout tv^T)
//   tau = rowsum(P * T) = rowsum(dout * X) - gamma * (2 * delta + dlse),  U = P * (T - tau)
//   W = U * cap'(X) + dS * cap''(X) * GX, dX = dS * cap'(X)
//   d dq = scale * (W k + dX tk), d dk = scale * (W^T q + dX^T tq), d dmask = U
//   d dv = (A * (G - gamma))^T dout
// If tq.. are tangents, the results are the tangents of attention_backward's results (dout, dlse
// held).
// If tq.. are cotangents of dq.., the results are the gradients of grad_out, query, key, value,
// mask and grad_lse: the map is its own transpose. Everything is recomputed from differentiable
// values, so autograd can differentiate it a third time.
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/tanh.h>
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

// The most rows of queries per block that keep its scores near 4 M elements.
int64_t block_rows(int64_t scores_per_row, int64_t S_q) {
  constexpr int64_t kScores = int64_t{1} << 22;
  return std::min(S_q, std::max<int64_t>(16, kScores / std::max<int64_t>(1, scores_per_row)));
}

int64_t extent(const Tensor& t, int64_t dim) {
  return t.sym_size(dim).guard_int(__FILE__, __LINE__);
}

// Rows begin .. begin + rows - 1 of the queries' dimension.
struct Block {
  int64_t begin, rows;

  Tensor of(const Tensor& t) const { return t.defined() ? t.narrow(2, begin, rows) : t; }
  // Of a mask, which may broadcast over the rows.
  Tensor of_mask(const Tensor& t) const { return t.defined() && extent(t, 2) == 1 ? t : of(t); }
};

// Results of the blocks, in order.
struct BlockSums {
  std::vector<Tensor> out, query, mask, lse;  // one entry per block
  Tensor key, value, broadcast_mask;          // sums over the blocks
};

// The operands, in the type of the sums and with all heads.
struct SecondOrder {
  Tensor q, k, v, mask, out, dout, dlse, tq, tk, tv, tm, philox_state;
  double scale, dropout_p, softcap;
  bool is_causal, want_mask;
  OptionalInt window_left, window_right;

  // tanh(X / softcap), or undefined without softcap.
  Tensor capped(const Tensor& products) const {
    return softcap > 0 ? at::tanh(products * (1 / softcap)) : Tensor();
  }

  // True outside the window and the causal rule; undefined without both.
  Tensor outside(const Block& block) const {
    if (!is_causal && !window_left && !window_right) return {};
    const auto options = q.options().dtype(at::kLong);
    const Tensor rows = at::arange(block.begin, block.begin + block.rows, options).unsqueeze(1);
    const Tensor ahead = at::arange(extent(k, 2), options) - rows;
    Tensor hidden;
    auto hide = [&](const Tensor& more) {
      hidden = hidden.defined() ? hidden.logical_or(more) : more;
    };
    if (is_causal) hide(ahead > 0);
    if (window_right) hide(ahead > *window_right);
    if (window_left) hide(ahead.neg() > *window_left);
    return hidden;
  }

  // P, from X and its capped tanh.
  Tensor probabilities(const Block& block, const Tensor& products, const Tensor& tanh) const {
    constexpr double kHidden = -std::numeric_limits<double>::infinity();
    Tensor scores = tanh.defined() ? tanh * softcap : products;
    if (mask.defined()) {
      const Tensor m = block.of_mask(mask);
      scores = mask.scalar_type() == at::kBool ? scores.masked_fill(m.logical_not(), kHidden)
                                               : scores + m.to(q.scalar_type());
    }
    const Tensor hidden = outside(block);
    if (hidden.defined()) scores = scores.masked_fill(hidden, kHidden);
    return safe_softmax(scores);
  }

  // GX, or undefined if neither query nor key has a tangent.
  Tensor tangent_of_products(const Block& block) const {
    Tensor G;
    if (tq.defined()) G = at::matmul(block.of(tq), k.mT());
    if (tk.defined()) G = sum_of(G, at::matmul(block.of(q), tk.mT()));
    return G.defined() ? G * scale : G;
  }

  // Z, or undefined without dropout.
  Tensor dropout_factors(const Block& block) const {
    if (dropout_p == 0) return {};
    return call::attention_dropout_factors(philox_state, q.scalar_type(), dropout_p, extent(q, 0),
                                           extent(q, 1), block.begin, block.rows, extent(k, 2));
  }

  void add_mask(const Tensor& U, const Block& block, BlockSums& to) const {
    const bool row_broadcast = extent(mask, 2) == 1;
    auto sizes = mask.sym_sizes().vec();
    if (!row_broadcast) sizes[2] = block.rows;
    const Tensor reduced = U.sum_to_size_symint(sizes);
    if (row_broadcast) {
      to.broadcast_mask = sum_of(to.broadcast_mask, reduced);
    } else {
      to.mask.push_back(reduced);
    }
  }

  void add_block(const Block& block, BlockSums& to) const {
    const Tensor products = at::matmul(block.of(q), k.mT()) * scale, tanh = capped(products);
    const Tensor slope = tanh.defined() ? 1 - tanh * tanh : Tensor();
    auto uncapped = [&](const Tensor& t) { return slope.defined() && t.defined() ? t * slope : t; };
    const Tensor P = probabilities(block, products, tanh), Z = dropout_factors(block);
    auto dropped = [&](const Tensor& t) { return Z.defined() ? t * Z : t; };
    const Tensor GX = tangent_of_products(block);
    Tensor G = uncapped(GX);
    if (tm.defined()) G = sum_of(G, block.of_mask(tm));
    if (!G.defined()) G = at::zeros_like(P);
    const Tensor A = dropped(P), o = block.of(out);
    const Tensor gamma = (P * G).sum(-1, /*keepdim=*/true);
    Tensor X = at::matmul(A * G, v);
    if (tv.defined()) X = X + at::matmul(A, tv);
    to.out.push_back(X - gamma * o);
    to.lse.push_back(gamma.squeeze(-1));
    if (!dout.defined()) return;

    const Tensor d_o = block.of(dout);
    const Tensor dP = dropped(at::matmul(d_o, v.mT()));
    Tensor delta = (d_o * o).sum(-1, /*keepdim=*/true), twice = 2 * delta;
    if (dlse.defined()) {
      const Tensor d_lse = block.of(dlse).unsqueeze(-1);
      delta = delta - d_lse;
      twice = twice - d_lse;  // 2 delta + dlse
    }
    const Tensor dS = P * (dP - delta);
    Tensor T = dP * (G - gamma) - delta * G;
    if (tv.defined()) T = T + dropped(at::matmul(d_o, tv.mT()));
    const Tensor tau = (d_o * X).sum(-1, /*keepdim=*/true) - gamma * twice;
    const Tensor U = P * (T - tau);
    const Tensor dX = uncapped(dS);
    Tensor W = uncapped(U);
    if (slope.defined() && GX.defined()) W = W - dX * tanh * GX * (2 / softcap);
    Tensor dq = at::matmul(W, k), dk = at::matmul(W.mT(), block.of(q));
    if (tk.defined()) dq = dq + at::matmul(dX, tk);
    if (tq.defined()) dk = dk + at::matmul(dX.mT(), block.of(tq));
    to.query.push_back(dq * scale);
    to.key = sum_of(to.key, dk * scale);
    to.value = sum_of(to.value, at::matmul((A * (G - gamma)).mT(), d_o));
    if (want_mask) add_mask(U, block, to);
  }
};

Tensors6 attention_second_order(const OptionalTensor& grad_out, const Tensor& query,
                                const Tensor& key, const Tensor& value,
                                const OptionalTensor& attn_mask, const Tensor& out,
                                const Tensor& philox_state, double dropout_p, bool is_causal,
                                std::optional<double> scale_or_default,
                                const OptionalTensor& t_query, const OptionalTensor& t_key,
                                const OptionalTensor& t_value, const OptionalTensor& t_mask,
                                OptionalInt window_left, OptionalInt window_right, double softcap,
                                const OptionalTensor& grad_lse) {
  const Tensor mask = value_or_undefined(attn_mask);
  check_attention(query, key, value, mask, dropout_p);
  check_softcap("attention_second_order", softcap);
  const char* name = "attention_second_order: an operand or a tangent";
  for (const Tensor* t : {&query, &key, &value, &mask, &out, &philox_state}) {
    check_plain_storage(*t, name);
  }
  for (const OptionalTensor* t : {&grad_out, &t_query, &t_key, &t_value, &t_mask, &grad_lse}) {
    check_plain_storage(value_or_undefined(*t), name);
  }
  const auto accum = query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const int64_t B = extent(query, 0), H = extent(query, 1), S_q = extent(query, 2),
                D = extent(query, 3), H_kv = extent(key, 1), S_k = extent(key, 2);
  auto converted = [&](const OptionalTensor& t) { return t.has_value() ? t->to(accum) : Tensor(); };
  auto all_heads = [&](const Tensor& t) {
    if (!t.defined() || H == H_kv) return t;
    const int64_t d = extent(t, 3);
    return t.unsqueeze(2).expand({B, H_kv, H / H_kv, S_k, d}).reshape({B, H, S_k, d});
  };
  auto kv_heads = [&](const Tensor& t) {
    if (!t.defined() || H == H_kv) return t;
    return t.reshape({B, H_kv, H / H_kv, S_k, extent(t, 3)}).sum(2);
  };
  const SecondOrder second{
      .q = converted(query),
      .k = all_heads(converted(key)),
      .v = all_heads(converted(value)),
      .mask = mask,
      .out = converted(out),
      .dout = converted(grad_out),
      .dlse = converted(grad_lse),
      .tq = converted(t_query),
      .tk = all_heads(converted(t_key)),
      .tv = all_heads(converted(t_value)),
      .tm = converted(t_mask),
      .philox_state = philox_state,
      .scale = scale_or_default.value_or(D == 0 ? 1.0 : 1.0 / std::sqrt(double(D))),
      .dropout_p = dropout_p,
      .softcap = softcap,
      .is_causal = is_causal,
      .want_mask = mask.defined() && is_floating(mask.scalar_type()),
      .window_left = window_left,
      .window_right = window_right};
  BlockSums sums;
  const int64_t step = std::max<int64_t>(1, block_rows(B * H * S_k, S_q));
  for (int64_t begin = 0; begin < S_q || begin == 0; begin += step) {
    second.add_block({begin, std::min(step, S_q - begin)}, sums);
  }

  Tensors6 results;
  std::get<0>(results) = at::cat(sums.out, 2).to(out.scalar_type());
  std::get<5>(results) = at::cat(sums.lse, 2).to(lse_type(query));
  if (!second.dout.defined()) return results;
  std::get<1>(results) = at::cat(sums.query, 2).to(query.scalar_type());
  std::get<2>(results) = kv_heads(sums.key).to(key.scalar_type());
  std::get<3>(results) = kv_heads(sums.value).to(value.scalar_type());
  if (second.want_mask) {
    const Tensor d_mask =
        sums.broadcast_mask.defined() ? sums.broadcast_mask : at::cat(sums.mask, 2);
    std::get<4>(results) = d_mask.to(mask.scalar_type());
  }
  return results;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def(
      "attention_second_order(Tensor? grad_out, Tensor query, Tensor key, Tensor value, "
      "Tensor? attn_mask, Tensor out, Tensor philox_state, float dropout_p, bool is_causal, "
      "float? scale, Tensor? t_query, Tensor? t_key, Tensor? t_value, Tensor? t_mask, "
      "int? window_left=None, int? window_right=None, float softcap=0.0, Tensor? grad_lse=None) -> "
      "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  m.impl("attention_second_order", torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd,
                                                   TORCH_FN(attention_second_order)));
}

}  // namespace warpwright
