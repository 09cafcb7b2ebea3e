// explain() of attention_varlen.
#ifdef WARPWRIGHT_WITH_CUDA
#undef WARPWRIGHT_WITH_CUDA
#endif
#include "ops/attention/varlen.h"
#include "python/explain.h"

namespace py = pybind11;

namespace warpwright {
namespace {

Lines explain_attention_varlen(const std::string& dtype, const TensorLayout& query,
                               const TensorLayout& key, const TensorLayout& value,
                               int64_t sequences, std::pair<int64_t, int64_t> max_lengths,
                               double scale, bool is_causal, std::pair<int64_t, int64_t> window,
                               double softcap, const DeviceInfo& device, bool sm90) {
  AttentionBackwardParams b{};
  AttentionParams& p = b.fwd;
  p.dtype = dtype_from(dtype);
  p.B = 1, p.H = query.sizes.at(1), p.H_kv = std::max(key.sizes.at(1), int64_t{1});
  p.S_q = query.sizes.at(0), p.S_k = key.sizes.at(0);
  p.D = query.sizes.at(2), p.D_v = value.sizes.at(2);
  p.scale = scale, p.is_causal = is_causal, p.softcap = softcap;
  auto limit = [](int64_t side) { return side < 0 ? kUnlimited : side; };
  set_packed_window(p, limit(window.first), limit(window.second));
  auto operand = [](const TensorLayout& x) -> AttentionOperand {
    const bool as_it_lies = x.strides.at(2) == 1;  // else the op copies it
    return {reinterpret_cast<void*>(x.address), 0, as_it_lies ? x.strides.at(1) : x.sizes.at(2),
            as_it_lies ? x.strides.at(0) : x.sizes.at(1) * x.sizes.at(2)};
  };
  // Results that the op allocates are dense, and all gradients are wanted.
  auto dense = [](int64_t heads, int64_t width) -> AttentionOperand {
    constexpr uintptr_t kAligned = 256;
    return {reinterpret_cast<void*>(kAligned), 0, width, heads * width};
  };
  p.q = operand(query), p.k = operand(key), p.v = operand(value);
  p.out = b.dout = dense(p.H, p.D_v);
  b.dq = dense(p.H, p.D), b.dk = dense(p.H_kv, p.D), b.dv = dense(p.H_kv, p.D_v);
  const PackedSequences packed{nullptr, nullptr, sequences, max_lengths.first, max_lengths.second};
  const bool available = sm90 && device.sm_arch == 90;
  const VarlenPlan forward = choose_varlen(p, packed, nullptr, device, available);
  const VarlenPlan backward = choose_varlen(p, packed, &b, device, available);
  return {{"tiles", "one kernel lists them from cu_seqlens, sequences with the most work first"},
          {"forward", describe(forward)},
          {"backward", describe(backward)}};
}

}  // namespace

void define_explain_varlen(py::module_& m) {
  m.def("explain_attention_varlen", &explain_attention_varlen);
}

}  // namespace warpwright
