// linear_quantized and its gradient on every dispatch key. Both are linear in their first argument
// and transposes of each other, so their derivatives are calls of the two.
#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include "ops/linear/torch/common.h"
#include "ops/linear_quantized/few_rows.h"

namespace warpwright {
namespace {

namespace call {

Tensor linear_quantized(const Tensor& input, const Tensor& codes, const Tensor& scales,
                        const OptionalTensor& zeros, const OptionalTensor& bias, bool fragments,
                        bool ahead) {
  static const auto op =
      find_op<Tensor(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                     const OptionalTensor&, bool, bool)>("warpwright::linear_quantized");
  return op.call(input, codes, scales, zeros, bias, fragments, ahead);
}

Tensor linear_quantized_backward(const Tensor& grad_output, const Tensor& codes,
                                 const Tensor& scales, const OptionalTensor& zeros,
                                 bool fragments) {
  static const auto op =
      find_op<Tensor(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, bool)>(
          "warpwright::linear_quantized_backward");
  return op.call(grad_output, codes, scales, zeros, fragments);
}

}  // namespace call

// ---- output shape and checks ----

int bits_of(const Tensor& codes) { return codes.scalar_type() == at::kChar ? 8 : 4; }

c10::SymInt features_of(const Tensor& codes) { return codes.sym_size(1) * (8 / bits_of(codes)); }

void check_scales(const Tensor& codes, const Tensor& scales, const char* op) {
  const auto outputs = codes.sym_size(0);
  TORCH_CHECK(is_floating(scales.scalar_type()), op,
              ": scales: expected a real floating-point tensor, got ", scales.scalar_type());
  if (bits_of(codes) == 8) {
    TORCH_CHECK(scales.dim() == 1 && scales.sym_size(0) == outputs, op,
                ": scales: expected shape (", outputs, ") of int8 codes, got ", scales.sym_sizes());
    return;
  }
  TORCH_CHECK(scales.dim() == 2 && scales.sym_size(0) == outputs, op, ": scales: expected shape (",
              outputs, ", groups) of uint8 codes, got ", scales.sym_sizes());
  const auto features = features_of(codes), groups = scales.sym_size(1);
  TORCH_CHECK(features == 0 || (groups > 0 && features % (groups * 2) == 0), op,
              ": scales: expected a number of groups that divides ", features,
              " features into groups of even size, got ", groups);
}

void check_quantized(const Tensor& codes, const Tensor& scales, const OptionalTensor& zeros,
                     bool fragments, const char* op) {
  TORCH_CHECK(codes.scalar_type() == at::kChar || codes.scalar_type() == at::kByte, op,
              ": codes: expected Char (int8) or Byte (pairs of int4), got ", codes.scalar_type());
  TORCH_CHECK(codes.dim() == 2, op,
              ": codes: expected (out_features, in_features), or half as "
              "many columns of pairs, got shape ",
              codes.sym_sizes());
  check_scales(codes, scales, op);
  check_same_device(scales, codes, "linear_quantized: scales");
  if (fragments) {
    TORCH_CHECK(codes.sym_size(0) % kFragmentFeatures == 0 &&
                    features_of(codes) % fragment_k(bits_of(codes)) == 0 && codes.is_contiguous(),
                op, ": codes: fragments are contiguous multiples of (16, ",
                fragment_k(bits_of(codes)), ") codes, got (", codes.sym_size(0), ", ",
                features_of(codes), ") with strides ", codes.sym_strides());
  }
  if (!zeros.has_value() || !zeros->defined()) return;
  TORCH_CHECK(bits_of(codes) == 4, op, ": zeros: int8 codes have no zero points");
  TORCH_CHECK(zeros->scalar_type() == at::kByte, op, ": zeros: expected Byte, got ",
              zeros->scalar_type());
  TORCH_CHECK(zeros->sym_sizes() == scales.sym_sizes(), op, ": zeros: expected shape ",
              scales.sym_sizes(), ", got ", zeros->sym_sizes());
  check_same_device(*zeros, codes, "linear_quantized: zeros");
}

void check_activations(const Tensor& x, const Tensor& codes, const c10::SymInt& columns,
                       const char* name) {
  TORCH_CHECK_NOT_IMPLEMENTED(is_floating(x.scalar_type()), name,
                              ": expected a real floating-point tensor, got ", x.scalar_type());
  TORCH_CHECK(x.dim() >= 1 && x.sym_size(-1) == columns, name, ": expected shape (..., ", columns,
              "), got ", x.sym_sizes());
  check_same_device(x, codes, name);
}

void check_linear_quantized(const Tensor& input, const Tensor& codes, const Tensor& scales,
                            const OptionalTensor& zeros, const OptionalTensor& bias,
                            bool fragments) {
  check_quantized(codes, scales, zeros, fragments, "linear_quantized");
  check_activations(input, codes, features_of(codes), "linear_quantized: input");
  if (bias.has_value() && bias->defined()) {
    check_argument(*bias, "linear_quantized: bias", {codes.sym_size(0)}, input.scalar_type(),
                   input);
  }
}

void check_linear_quantized_backward(const Tensor& grad_output, const Tensor& codes,
                                     const Tensor& scales, const OptionalTensor& zeros,
                                     bool fragments) {
  check_quantized(codes, scales, zeros, fragments, "linear_quantized_backward");
  check_activations(grad_output, codes, codes.sym_size(0),
                    "linear_quantized_backward: grad_output");
}

// ---- the weight in memory ----

// Keeps what the parameters point to.
struct Weight {
  Tensor codes, scales, zeros;
  bool fragments;

  Weight(const Tensor& codes_, const Tensor& scales_, const OptionalTensor& zeros_, bool fragments_,
         at::ScalarType scale_type)
      : codes(dense(in_memory(codes_, "linear_quantized: codes"), fragments_)),
        scales(in_memory(scales_, "linear_quantized: scales").to(scale_type)),
        zeros(in_memory(value_or_undefined(zeros_), "linear_quantized: zeros")),
        fragments(fragments_) {}

  static Tensor dense(const Tensor& codes, bool fragments) {
    const Tensor result = codes.contiguous();
    const auto address = reinterpret_cast<uintptr_t>(result.const_data_ptr());
    return fragments && address % 16 != 0 ? result.clone() : result;
  }

  static Tensor in_memory(const Tensor& tensor, const char* name) {
    check_has_storage(tensor, name);
    return tensor;
  }

  QuantizedWeight params() const {
    QuantizedWeight w{};
    w.bits = bits_of(codes);
    w.outputs = codes.size(0);
    w.features = codes.size(1) * (8 / w.bits);
    const bool grouped = w.bits == 4 && scales.size(1) > 0;
    w.group = grouped ? w.features / scales.size(1) : w.features;
    w.codes = codes.const_data_ptr();
    w.fragments = fragments;
    w.scales = scales.const_data_ptr();
    w.scale_dtype = dtype_of(scales);
    w.scale_strides[0] = scales.stride(0);
    w.scale_strides[1] = grouped ? scales.stride(1) : 0;
    if (zeros.defined()) {
      w.zeros = static_cast<const uint8_t*>(zeros.const_data_ptr());
      w.zero_strides[0] = zeros.stride(0);
      w.zero_strides[1] = zeros.stride(1);
    }
    return w;
  }
};

// A matrix of the rows of `x`.
Tensor rows_of(const Tensor& x) {
  const int64_t columns = x.size(-1);
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) rows *= x.size(i);
  return x.reshape({rows, columns});
}

// ---- CPU ----

// 16-bit types compute in float32.
at::ScalarType cpu_type(const Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// Calls f(begin, rows of the weight from there) for blocks of rows that fit the L2 cache.
template <class F>
void for_weight_blocks(const Weight& weight, at::ScalarType type, F&& f) {
  constexpr int64_t kBlockElements = 1 << 18;
  const QuantizedWeight w = weight.params();
  const int64_t rows = std::clamp<int64_t>(kBlockElements / std::max<int64_t>(w.features, 1), 16,
                                           std::max<int64_t>(w.outputs, 16));
  Tensor block =
      at::empty({std::min(rows, w.outputs), w.features}, weight.codes.options().dtype(type));
  for (int64_t begin = 0; begin < w.outputs; begin += rows) {
    const int64_t count = std::min(rows, w.outputs - begin);
    dequantize_cpu(w, type == at::kDouble ? DType::kFloat64 : DType::kFloat32, begin, begin + count,
                   block.mutable_data_ptr());
    f(begin, block.narrow(0, 0, count));
  }
}

Tensor linear_quantized_cpu_kernel(const Tensor& input, const Tensor& codes, const Tensor& scales,
                                   const OptionalTensor& zeros, const OptionalTensor& bias,
                                   bool fragments, bool) {
  check_linear_quantized(input, codes, scales, zeros, bias, fragments);
  check_has_storage(input, "linear_quantized: input");
  check_has_storage(value_or_undefined(bias), "linear_quantized: bias");
  const auto type = cpu_type(input);
  const Weight weight(codes, scales, zeros, fragments, type);
  Tensor output = empty_of(with_last_size(input, codes.sym_size(0)), input);
  const Tensor x = rows_of(input).to(type);
  Tensor sums = at::empty({x.size(0), codes.size(0)}, x.options());
  for_weight_blocks(weight, type, [&](int64_t begin, const Tensor& block) {
    Tensor columns = sums.narrow(1, begin, block.size(0));
    at::mm_out(columns, x, block.t());
  });
  if (bias.has_value() && bias->defined()) sums.add_(*bias);
  output.view({sums.size(0), sums.size(1)}).copy_(sums);
  return output;
}

Tensor linear_quantized_backward_cpu_kernel(const Tensor& grad_output, const Tensor& codes,
                                            const Tensor& scales, const OptionalTensor& zeros,
                                            bool fragments) {
  check_linear_quantized_backward(grad_output, codes, scales, zeros, fragments);
  check_has_storage(grad_output, "linear_quantized_backward: grad_output");
  const auto type = cpu_type(grad_output);
  const Weight weight(codes, scales, zeros, fragments, type);
  Tensor grad_input = empty_of(with_last_size(grad_output, features_of(codes)), grad_output);
  const Tensor dy = rows_of(grad_output).to(type).contiguous();
  const QuantizedWeight w = weight.params();
  Tensor sums;
  if (dy.size(0) <= kFewGradientRows) {
    sums = at::empty({dy.size(0), w.features}, dy.options());
    linear_quantized_few_rows_gradient_cpu(w, dtype_of(dy), dy.size(0), dy.const_data_ptr(),
                                           sums.mutable_data_ptr());
  } else {
    sums = at::zeros({dy.size(0), w.features}, dy.options());
    for_weight_blocks(weight, type, [&](int64_t begin, const Tensor& block) {
      sums.addmm_(dy.narrow(1, begin, block.size(0)), block);
    });
  }
  grad_input.view({sums.size(0), sums.size(1)}).copy_(sums);
  return grad_input;
}

// ---- CUDA ----

#ifdef WARPWRIGHT_WITH_CUDA
// The kernels read scales in x's type or in float32.
at::ScalarType cuda_scale_type(const Tensor& x, const Tensor& scales) {
  return scales.scalar_type() == x.scalar_type() ? x.scalar_type() : at::kFloat;
}

Tensor weight_in(at::ScalarType type, const Weight& weight, cudaStream_t stream) {
  const QuantizedWeight w = weight.params();
  Tensor result = at::empty({w.outputs, w.features}, weight.codes.options().dtype(type));
  if (result.numel() > 0) {
    launch_dequantize(w, dtype_of(result), result.mutable_data_ptr(), stream);
  }
  return result;
}

Tensor dense_rows_of(const Tensor& x) {
  const Tensor rows = rows_of(x);
  return rows.size(1) > 1 && rows.stride(1) != 1 ? rows.contiguous() : rows;
}

// Of the rows of x, or of dy.
LinearQuantizedParams product_params(const Weight& weight, const Tensor& rows) {
  LinearQuantizedParams p{};
  p.weight = weight.params();
  p.dtype = dtype_of(rows);
  p.rows = rows.size(0);
  p.input = rows.const_data_ptr();
  p.input_pitch = rows.stride(0);
  p.sm90 = sm90_path_available();
  return p;
}

void run(LinearQuantizedParams& p, const LinearQuantizedPlan& plan, Tensor& output,
         cudaStream_t stream) {
  p.output = output.mutable_data_ptr();
  const Workspace workspace(plan.workspace_bytes, output);
  launch_linear_quantized(p, plan, workspace.data(), stream);
}

Tensor linear_quantized_cuda_kernel(const Tensor& input, const Tensor& codes, const Tensor& scales,
                                    const OptionalTensor& zeros, const OptionalTensor& bias,
                                    bool fragments, bool ahead) {
  check_linear_quantized(input, codes, scales, zeros, bias, fragments);
  check_has_storage(input, "linear_quantized: input");
  check_has_storage(value_or_undefined(bias), "linear_quantized: bias");
  const CudaCall cuda(input);
  const Weight weight(codes, scales, zeros, fragments, cuda_scale_type(input, scales));
  const bool has_bias = bias.has_value() && bias->defined();
  const Tensor dense_bias = has_bias ? bias->contiguous() : Tensor();
  const Tensor x = dense_rows_of(input);
  LinearQuantizedParams p = product_params(weight, x);
  p.bias = has_bias ? dense_bias.const_data_ptr() : nullptr;
  p.ahead = ahead;
  const LinearQuantizedPlan plan = choose_linear_quantized(p, current_device_info());
  if (!plan.fused) {
    return linear_ops::linear(input, weight_in(input.scalar_type(), weight, cuda.stream), bias);
  }
  Tensor output = empty_of(with_last_size(input, codes.sym_size(0)), input);
  if (output.numel() == 0) return output;
  run(p, plan, output, cuda.stream);
  return output;
}

Tensor linear_quantized_backward_cuda_kernel(const Tensor& grad_output, const Tensor& codes,
                                             const Tensor& scales, const OptionalTensor& zeros,
                                             bool fragments) {
  check_linear_quantized_backward(grad_output, codes, scales, zeros, fragments);
  check_has_storage(grad_output, "linear_quantized_backward: grad_output");
  const CudaCall cuda(grad_output);
  const Weight weight(codes, scales, zeros, fragments, cuda_scale_type(grad_output, scales));
  const Tensor dy = dense_rows_of(grad_output);
  LinearQuantizedParams p = product_params(weight, dy);
  const LinearQuantizedPlan plan = choose_linear_quantized_backward(p, current_device_info());
  if (!plan.fused) {
    return std::get<0>(linear_ops::linear_backward(
        grad_output, {}, weight_in(grad_output.scalar_type(), weight, cuda.stream),
        {true, false, false}));
  }
  Tensor grad_input = empty_of(with_last_size(grad_output, features_of(codes)), grad_output);
  if (grad_input.numel() == 0) return grad_input;
  run(p, plan, grad_input, cuda.stream);
  return grad_input;
}
#endif

// ---- Meta ----

Tensor linear_quantized_meta(const Tensor& input, const Tensor& codes, const Tensor& scales,
                             const OptionalTensor& zeros, const OptionalTensor& bias,
                             bool fragments, bool) {
  check_linear_quantized(input, codes, scales, zeros, bias, fragments);
  return empty_of(with_last_size(input, codes.sym_size(0)), input);
}

Tensor linear_quantized_backward_meta(const Tensor& grad_output, const Tensor& codes,
                                      const Tensor& scales, const OptionalTensor& zeros,
                                      bool fragments) {
  check_linear_quantized_backward(grad_output, codes, scales, zeros, fragments);
  return empty_of(with_last_size(grad_output, features_of(codes)), grad_output);
}

// ---- Autograd ----

struct LinearQuantizedBackward {  // saved: codes, scales, zeros
  static constexpr const char* kName = "WarpwrightLinearQuantizedBackward";
  struct Attributes {
    bool fragments;
  };
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad& needs) {
    variable_list result(2);
    if (needs[0]) {
      result[0] = call::linear_quantized_backward(grads[0], saved[0], saved[1],
                                                  optional_if_defined(saved[2]), a.fragments);
    }
    if (needs[1]) {
      result[1] = std::get<2>(linear_ops::linear_backward(grads[0], {}, {}, {false, false, true}));
    }
    return result;
  }
};

struct LinearQuantizedBackwardBackward {  // saved: codes, scales, zeros
  static constexpr const char* kName = "WarpwrightLinearQuantizedBackwardBackward";
  using Attributes = LinearQuantizedBackward::Attributes;
  static variable_list backward(const Attributes& a, const variable_list& saved,
                                const variable_list& grads, const NeedsGrad&) {
    return {call::linear_quantized(grads[0], saved[0], saved[1], optional_if_defined(saved[2]), {},
                                   a.fragments, /*ahead=*/false)};
  }
};

template <class Node>
void save_weight(const Node& node, const Tensor& codes, const Tensor& scales, const Tensor& zeros) {
  node->save(codes);
  node->save(scales);
  node->save(zeros);
}

Tensor linear_quantized_autograd(const Tensor& input, const Tensor& codes, const Tensor& scales,
                                 const OptionalTensor& optional_zeros,
                                 const OptionalTensor& optional_bias, bool fragments, bool ahead) {
  check_constant(scales, "linear_quantized", "scales");
  const Tensor bias = value_or_undefined(optional_bias);
  auto node = make_node<LinearQuantizedBackward>({fragments}, input, bias);
  Tensor output = below_autograd([&] {
    return call::linear_quantized(input, codes, scales, optional_zeros, optional_bias, fragments,
                                  ahead);
  });
  if (node) {
    save_weight(node, codes, scales, value_or_undefined(optional_zeros));
    set_history(output, node);
  }
  if (any_tangent(input, bias)) {
    Tensor direction;
    if (has_tangent(input)) {
      direction = call::linear_quantized(tangent(input), codes, scales, optional_zeros, {},
                                         fragments, /*ahead=*/false);
    }
    if (has_tangent(bias)) {
      direction = sum_of(direction, tangent(bias).expand_symint(output.sym_sizes()));
    }
    set_tangent(output, tangent_with_zero_terms(direction, input));
  }
  return output;
}

Tensor linear_quantized_backward_autograd(const Tensor& grad_output, const Tensor& codes,
                                          const Tensor& scales,
                                          const OptionalTensor& optional_zeros, bool fragments) {
  check_constant(scales, "linear_quantized_backward", "scales");
  auto node = make_node<LinearQuantizedBackwardBackward>({fragments}, grad_output);
  Tensor grad_input = below_autograd([&] {
    return call::linear_quantized_backward(grad_output, codes, scales, optional_zeros, fragments);
  });
  if (node) {
    save_weight(node, codes, scales, value_or_undefined(optional_zeros));
    set_history(grad_input, node);
  }
  if (has_tangent(grad_output)) {
    set_tangent(grad_input, tangent_with_zero_terms(
                                call::linear_quantized_backward(tangent(grad_output), codes, scales,
                                                                optional_zeros, fragments),
                                grad_output));
  }
  return grad_input;
}

// ---- Autocast: x and bias to the low-precision type, as native linear ----

template <c10::DeviceType kDevice, c10::DispatchKey kKey>
Tensor linear_quantized_autocast(const Tensor& input, const Tensor& codes, const Tensor& scales,
                                 const OptionalTensor& zeros, const OptionalTensor& bias,
                                 bool fragments, bool ahead) {
  const c10::impl::ExcludeDispatchKeyGuard guard(kKey);
  const auto type = at::autocast::get_lower_precision_fp_from_device_type(kDevice);
  return call::linear_quantized(at::autocast::cached_cast(type, input, kDevice), codes, scales,
                                zeros, at::autocast::cached_cast(type, bias, kDevice), fragments,
                                ahead);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def(
      "linear_quantized(Tensor input, Tensor codes, Tensor scales, Tensor? zeros=None, "
      "Tensor? bias=None, bool fragments=False, bool ahead=False) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "linear_quantized_backward(Tensor grad_output, Tensor codes, Tensor scales, "
      "Tensor? zeros=None, bool fragments=False) -> Tensor",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) {
  m.impl("linear_quantized", linear_quantized_cpu_kernel);
  m.impl("linear_quantized_backward", linear_quantized_backward_cpu_kernel);
}

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) {
  m.impl("linear_quantized", linear_quantized_cuda_kernel);
  m.impl("linear_quantized_backward", linear_quantized_backward_cuda_kernel);
}
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) {
  m.impl("linear_quantized", linear_quantized_meta);
  m.impl("linear_quantized_backward", linear_quantized_backward_meta);
}

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) {
  m.impl("linear_quantized", linear_quantized_autograd);
  m.impl("linear_quantized_backward", linear_quantized_backward_autograd);
}

TORCH_LIBRARY_IMPL(warpwright, AutocastCPU, m) {
  m.impl("linear_quantized", linear_quantized_autocast<at::kCPU, c10::DispatchKey::AutocastCPU>);
}
TORCH_LIBRARY_IMPL(warpwright, AutocastCUDA, m) {
  m.impl("linear_quantized", linear_quantized_autocast<at::kCUDA, c10::DispatchKey::AutocastCUDA>);
}

}  // namespace warpwright
