// rotary_embedding on every dispatch key. It is linear in query and key, and its transpose is the
// same op with `inverse` set, so one op serves the forward, its gradient and all further ones. cos
// and sin have no derivative.
#include <ATen/ops/empty_like.h>

#include <tuple>

#include "ops/rotary_embedding/rotary_embedding.h"
#include "torch/autograd.h"
#include "torch/check_argument.h"
#include "torch/dispatch.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include "torch/cuda.h"
#endif

namespace warpwright {
namespace {

using TensorPair = std::tuple<Tensor, Tensor>;

namespace call {

TensorPair rotary_embedding(const Tensor& query, const Tensor& key, const Tensor& cos,
                            const Tensor& sin, bool interleaved, bool inverse) {
  static const auto op =
      find_op<TensorPair(const Tensor&, const Tensor&, const Tensor&, const Tensor&, bool, bool)>(
          "warpwright::rotary_embedding");
  return op.call(query, key, cos, sin, interleaved, inverse);
}

}  // namespace call

// ---- output shape and checks ----

void check_table(const Tensor& table, const char* name, const Tensor& query) {
  TORCH_CHECK(table.dim() == 3 &&
                  (table.sym_size(0) == 1 || table.sym_size(0) == query.sym_size(0)) &&
                  table.sym_size(1) == query.sym_size(2),
              name, ": expected shape (1 or ", query.sym_size(0), ", ", query.sym_size(2),
              ", rotated columns), got ", table.sym_sizes());
  TORCH_CHECK(table.sym_size(2) % 2 == 0 && table.sym_size(2) <= query.sym_size(3), name,
              ": expected an even number of columns, at most ", query.sym_size(3), ", got ",
              table.sym_size(2));
  const bool is_wide = query.element_size() == 2 && table.scalar_type() == at::kFloat;
  TORCH_CHECK(table.scalar_type() == query.scalar_type() || is_wide, name, ": expected ",
              query.scalar_type(), query.element_size() == 2 ? " or Float" : "", ", got ",
              table.scalar_type());
  check_same_device(table, query, name);
}

void check_rotary(const Tensor& query, const Tensor& key, const Tensor& cos, const Tensor& sin) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      is_floating(query.scalar_type()),
      "rotary_embedding: query: expected a real floating-point tensor, got ", query.scalar_type());
  TORCH_CHECK(query.dim() == 4,
              "rotary_embedding: query: expected (batch, heads, tokens, columns), got shape ",
              query.sym_sizes());
  TORCH_CHECK(key.dim() == 4 && key.sym_size(0) == query.sym_size(0) &&
                  key.sym_size(2) == query.sym_size(2) && key.sym_size(3) == query.sym_size(3),
              "rotary_embedding: key: expected shape (", query.sym_size(0), ", heads, ",
              query.sym_size(2), ", ", query.sym_size(3), "), got ", key.sym_sizes());
  TORCH_CHECK(key.scalar_type() == query.scalar_type(), "rotary_embedding: key: expected ",
              query.scalar_type(), ", got ", key.scalar_type());
  check_same_device(key, query, "rotary_embedding: key");
  check_table(cos, "rotary_embedding: cos", query);
  check_table(sin, "rotary_embedding: sin", query);
  TORCH_CHECK(sin.sym_size(2) == cos.sym_size(2), "rotary_embedding: sin: expected ",
              cos.sym_size(2), " columns, got ", sin.sym_size(2));
  TORCH_CHECK(sin.scalar_type() == cos.scalar_type(), "rotary_embedding: sin: expected ",
              cos.scalar_type(), " as cos, got ", sin.scalar_type());
}

// Dense inputs keep their strides, others become dense in the same dimension order.
TensorPair empty_outputs(const Tensor& query, const Tensor& key) {
  return {at::empty_like(query), at::empty_like(key)};
}

// ---- CPU and CUDA ----

Tensor with_adjacent_columns(const Tensor& tensor) {
  return tensor.stride(-1) == 1 || tensor.size(-1) == 1 ? tensor : tensor.contiguous();
}

RotaryStrides strides_of(const Tensor& tensor) {
  return {tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

// An output whose columns are not adjacent is filled by way of a contiguous one.
struct Heads {
  Tensor input, output, target;

  Heads(const Tensor& source, const Tensor& result)
      : input(with_adjacent_columns(source)), output(result), target(with_adjacent(result)) {}

  RotaryHeads params() const {
    return {input.size(1), input.const_data_ptr(), strides_of(input), target.mutable_data_ptr(),
            strides_of(target)};
  }
  void finish() const {
    if (!target.is_same(output)) output.copy_(target);
  }

 private:
  static Tensor with_adjacent(const Tensor& result) {
    if (result.stride(-1) == 1 || result.size(-1) == 1) return result;
    return at::empty_like(result, at::MemoryFormat::Contiguous);
  }
};

template <class Run>
TensorPair rotary_with(const Tensor& query, const Tensor& key, const Tensor& cos, const Tensor& sin,
                       bool interleaved, bool inverse, Run&& run) {
  check_rotary(query, key, cos, sin);
  check_has_storage(query, "rotary_embedding: query");
  check_has_storage(key, "rotary_embedding: key");
  check_has_storage(cos, "rotary_embedding: cos");
  check_has_storage(sin, "rotary_embedding: sin");
  TensorPair outputs = empty_outputs(query, key);
  if (query.numel() == 0 && key.numel() == 0) return outputs;
  const Heads q(query, std::get<0>(outputs)), k(key, std::get<1>(outputs));
  const Tensor c = with_adjacent_columns(cos), s = with_adjacent_columns(sin);
  auto table = [](const Tensor& t) {
    return RotaryTable{t.const_data_ptr(), t.size(0) == 1 ? 0 : t.stride(0), t.stride(1)};
  };
  run(RotaryParams{.dtype = dtype_of(query),
                   .table_dtype = dtype_of(cos),
                   .interleaved = interleaved,
                   .inverse = inverse,
                   .batch = query.size(0),
                   .tokens = query.size(2),
                   .head_size = query.size(3),
                   .rotary_size = cos.size(2),
                   .query = q.params(),
                   .key = k.params(),
                   .cos = table(c),
                   .sin = table(s)});
  q.finish();
  k.finish();
  return outputs;
}

TensorPair rotary_cpu_kernel(const Tensor& query, const Tensor& key, const Tensor& cos,
                             const Tensor& sin, bool interleaved, bool inverse) {
  return rotary_with(query, key, cos, sin, interleaved, inverse, rotary_embedding_cpu);
}

#ifdef WARPWRIGHT_WITH_CUDA
TensorPair rotary_cuda_kernel(const Tensor& query, const Tensor& key, const Tensor& cos,
                              const Tensor& sin, bool interleaved, bool inverse) {
  const CudaCall call(query);
  return rotary_with(query, key, cos, sin, interleaved, inverse, [&](const RotaryParams& p) {
    launch_rotary_embedding(p, choose_rotary_embedding(p), call.stream);
  });
}
#endif

// ---- Meta ----

TensorPair rotary_meta(const Tensor& query, const Tensor& key, const Tensor& cos, const Tensor& sin,
                       bool, bool) {
  check_rotary(query, key, cos, sin);
  return empty_outputs(query, key);
}

// ---- Autograd ----

// In place of a query or key that is not to be rotated: it costs nothing.
Tensor without_heads(const Tensor& other) {
  return other.new_empty_symint({other.sym_size(0), 0, other.sym_size(2), other.sym_size(3)});
}

struct RotaryEmbeddingBackward {  // saved: cos, sin
  static constexpr const char* kName = "WarpwrightRotaryEmbeddingBackward";
  struct Attributes {
    bool interleaved, inverse;
  };
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    const bool of_query = needs[0] && grads[0].defined();
    const bool of_key = needs[1] && grads[1].defined();
    if (!of_query && !of_key) return {Tensor(), Tensor()};
    auto [dq, dk] = call::rotary_embedding(of_query ? grads[0] : without_heads(grads[1]),
                                           of_key ? grads[1] : without_heads(grads[0]), saved[0],
                                           saved[1], a.interleaved, !a.inverse);
    return {of_query ? dq : Tensor(), of_key ? dk : Tensor()};
  }
};

TensorPair rotary_autograd(const Tensor& query, const Tensor& key, const Tensor& cos,
                           const Tensor& sin, bool interleaved, bool inverse) {
  check_constant(cos, "rotary_embedding", "cos");
  check_constant(sin, "rotary_embedding", "sin");
  auto node = make_node<RotaryEmbeddingBackward>({interleaved, inverse}, query, key);
  TensorPair outputs = below_autograd(
      [&] { return call::rotary_embedding(query, key, cos, sin, interleaved, inverse); });
  auto& [q, k] = outputs;
  if (node) {
    node->save(cos);
    node->save(sin);
    set_history({q, k}, node);
  }
  if (any_tangent(query, key)) {
    auto direction = [](const Tensor& t) { return has_tangent(t) ? tangent(t) : without_heads(t); };
    auto [q_t, k_t] =
        call::rotary_embedding(direction(query), direction(key), cos, sin, interleaved, inverse);
    if (has_tangent(query)) set_tangent(q, tangent_with_zero_terms(q_t, query));
    if (has_tangent(key)) set_tangent(k, tangent_with_zero_terms(k_t, key));
  }
  return outputs;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def(
      "rotary_embedding(Tensor query, Tensor key, Tensor cos, Tensor sin, bool interleaved=False, "
      "bool inverse=False) -> (Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) { m.impl("rotary_embedding", rotary_cpu_kernel); }

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) { m.impl("rotary_embedding", rotary_cuda_kernel); }
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) { m.impl("rotary_embedding", rotary_meta); }

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) { m.impl("rotary_embedding", rotary_autograd); }

}  // namespace warpwright
