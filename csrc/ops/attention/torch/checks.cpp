// The checks of attention's arguments that the files in torch/ share.
#include <cmath>

#include "ops/attention/torch/common.h"
#include "torch/check_argument.h"

namespace warpwright {

void check_attention_operands(const Tensor& query, const Tensor& key, const Tensor& value,
                              const Tensor& attn_mask, double dropout_p) {
  TORCH_CHECK(
      query.scalar_type() == key.scalar_type() && query.scalar_type() == value.scalar_type(),
      "Expected query, key, and value to have the same dtype, but got query.dtype: ", query.dtype(),
      " key.dtype: ", key.dtype(), " and value.dtype: ", value.dtype(), " instead.");
  TORCH_CHECK(query.device() == key.device() && query.device() == value.device(),
              "Expected query, key, and value to have the same device type, but got query.device: ",
              query.device(), " key.device: ", key.device(), " and value.device: ", value.device(),
              " instead.");
  TORCH_CHECK(query.dim() >= 2 && key.dim() >= 2 && value.dim() >= 2,
              "Expected query, key, and value to all be  at least 2 dimensional, but got "
              "query.dim: ",
              query.dim(), " key.dim: ", key.dim(), " and value.dim: ", value.dim(), " instead.");
  TORCH_CHECK_NOT_IMPLEMENTED(
      !query.is_complex(),
      "scaled_dot_product_attention: query: not implemented for complex dtypes, got ",
      query.dtype());
  TORCH_CHECK(is_floating(query.scalar_type()),
              "scaled_dot_product_attention: query: expected scalar type Float, Double, BFloat16 "
              "or Half but found ",
              query.scalar_type());
  TORCH_CHECK(dropout_p >= 0 && dropout_p <= 1,
              "dropout probability has to be between 0 and 1, but got ", dropout_p);
  TORCH_CHECK(key.sym_size(-1) == query.sym_size(-1),
              "scaled_dot_product_attention: key: Expected size for first two dimensions of key to "
              "be: [",
              key.sym_size(-2), ", ", query.sym_size(-1), "] (query's last) but got: [",
              key.sym_size(-2), ", ", key.sym_size(-1), "].");
  TORCH_CHECK(value.sym_size(-2) == key.sym_size(-2),
              "scaled_dot_product_attention: value: Expected size for first two dimensions of "
              "value to be: [",
              key.sym_size(-2), ", ", value.sym_size(-1), "] (key's length) but got: [",
              value.sym_size(-2), ", ", value.sym_size(-1), "].");
  if (!attn_mask.defined()) return;
  TORCH_CHECK(attn_mask.scalar_type() == at::kBool || attn_mask.scalar_type() == at::kFloat ||
                  attn_mask.scalar_type() == query.scalar_type(),
              "Expected attn_mask dtype to be bool or float or to match query dtype, but got "
              "attn_mask.dtype: ",
              attn_mask.dtype(), " and  query.dtype: ", query.dtype(), " instead.");
  TORCH_CHECK(attn_mask.device() == query.device(),
              "scaled_dot_product_attention: attn_mask: expected device ", query.device(),
              " as query, got ", attn_mask.device());
}

void check_softcap(const char* name, double softcap) {
  TORCH_CHECK(std::isfinite(softcap) && softcap >= 0, name,
              ": softcap: expected a positive finite number, or 0 for none, got ", softcap);
}

void check_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                     const Tensor& attn_mask, double dropout_p) {
  check_attention_operands(query, key, value, attn_mask, dropout_p);
  TORCH_CHECK(query.dim() == 4 && key.dim() == 4 && value.dim() == 4,
              "attention: expected query, key and value of 4 dimensions (B, H, S, D), got ",
              query.dim(), ", ", key.dim(), " and ", value.dim());
  TORCH_CHECK(key.sym_size(0) == query.sym_size(0) && value.sym_size(0) == query.sym_size(0) &&
                  key.sym_size(1) == value.sym_size(1),
              "attention: expected one batch size, and as many heads in value as in key, got "
              "query ",
              query.sym_sizes(), ", key ", key.sym_sizes(), ", value ", value.sym_sizes());
  TORCH_CHECK(key.sym_size(1) == query.sym_size(1) ||
                  (key.sym_size(1) != 0 && query.sym_size(1) % key.sym_size(1) == 0),
              "attention: Number of heads in key and value must divide the number of heads in "
              "query, got ",
              key.sym_size(1), " and ", query.sym_size(1));
  if (!attn_mask.defined()) return;
  const c10::SymInt extent[4] = {query.sym_size(0), query.sym_size(1), query.sym_size(2),
                                 key.sym_size(2)};
  bool matches = attn_mask.dim() == 4;
  for (int i = 0; i < 4 && matches; ++i)
    matches = attn_mask.sym_size(i) == 1 || attn_mask.sym_size(i) == extent[i];
  TORCH_CHECK(matches,
              "attention: attn_mask: expected 4 dimensions that broadcast to (B, H, S_q, S_k) = (",
              extent[0], ", ", extent[1], ", ", extent[2], ", ", extent[3], "), got ",
              attn_mask.sym_sizes());
}

}  // namespace warpwright
