// scaled_linear on every dispatch key: the product of codes, with scales and a bias.
#include <ATen/TensorOperators.h>
#include <ATen/ops/_int_mm.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include <array>

#include "host/sm90.h"
#include "ops/linear_8bit/torch/common.h"
#include "torch/autograd.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include "torch/cuda.h"
#endif

namespace warpwright {

namespace codes_ops {

Tensor scaled_linear(const Tensor& input, const OptionalTensor& input_scale, const Tensor& weight,
                     const OptionalTensor& weight_scale, const OptionalTensor& bias,
                     at::ScalarType out_dtype, bool use_fast_accum) {
  static const auto op =
      find_op<Tensor(const Tensor&, const OptionalTensor&, const Tensor&, const OptionalTensor&,
                     const OptionalTensor&, at::ScalarType, bool)>("warpwright::scaled_linear");
  return op.call(input, input_scale, weight, weight_scale, bias, out_dtype, use_fast_accum);
}

}  // namespace codes_ops

// ---- output shape and checks ----

void check_scale(const OptionalTensor& scale, const char* name, const c10::SymInt& count,
                 const Tensor& like) {
  if (!is_given(scale)) return;
  TORCH_CHECK(scale->scalar_type() == at::kFloat, name, ": expected float32, got ",
              scale->scalar_type());
  check_same_device(*scale, like, name);
  TORCH_CHECK(scale->sym_numel() == 1 || scale->sym_numel() == count, name, ": expected 1 or ",
              count, " numbers, got shape ", scale->sym_sizes());
}

namespace {

struct Operands {
  const Tensor& input;
  const OptionalTensor& input_scale;
  const Tensor& weight;
  const OptionalTensor& weight_scale;
  const OptionalTensor& bias;
  at::ScalarType out_dtype;
  bool use_fast_accum;

  bool has_int8() const { return input.scalar_type() == at::kChar; }
  bool is_scaled() const {
    return is_given(input_scale) || is_given(weight_scale) || is_given(bias);
  }
};

void check_codes(const Operands& o) {
  for (const Tensor* codes : {&o.input, &o.weight}) {
    TORCH_CHECK(find_codes(codes->scalar_type()).has_value(),
                "scaled_linear: ", codes == &o.input ? "input" : "weight",
                ": expected int8, float8_e4m3fn or float8_e5m2, got ", codes->scalar_type());
  }
  TORCH_CHECK(o.has_int8() == (o.weight.scalar_type() == at::kChar),
              "scaled_linear: weight: expected codes of the kind of input (", o.input.scalar_type(),
              "), got ", o.weight.scalar_type());
  TORCH_CHECK(o.input.dim() >= 1, "scaled_linear: input: expected at least 1D, got 0D");
  TORCH_CHECK(o.weight.dim() == 2, "scaled_linear: weight: expected a matrix, got ", o.weight.dim(),
              "D");
  check_same_device(o.weight, o.input, "scaled_linear: weight");
  TORCH_CHECK(o.input.sym_size(-1) == o.weight.sym_size(1), "scaled_linear: input: expected ",
              o.weight.sym_size(1), " features, got ", o.input.sym_size(-1));
}

void check_scaled(const Operands& o) {
  check_codes(o);
  const bool sums = o.out_dtype == at::kInt;
  TORCH_CHECK(is_quantizable(o.out_dtype) || (sums && o.has_int8()),
              "scaled_linear: out_dtype: expected float32, bfloat16 or float16 (of int8 also "
              "int32), got ",
              o.out_dtype);
  TORCH_CHECK(!sums || !o.is_scaled(),
              "scaled_linear: out_dtype: int32 are the sums themselves, without scales and bias");
  check_scale(o.input_scale, "scaled_linear: input_scale", rows_of(o.input), o.input);
  check_scale(o.weight_scale, "scaled_linear: weight_scale", o.weight.sym_size(0), o.input);
  if (!is_given(o.bias)) return;
  const auto type = o.bias->scalar_type();
  TORCH_CHECK(type == o.out_dtype || type == at::kFloat, "scaled_linear: bias: expected ",
              o.out_dtype, " or float32, got ", type);
  check_argument(*o.bias, "scaled_linear: bias", {o.weight.sym_size(0)}, type, o.input);
}

Tensor empty_output(const Operands& o) {
  return at::empty_symint(with_last(o.input, o.weight.sym_size(0)),
                          o.input.options().dtype(o.out_dtype));
}

void check_storages(const Operands& o) {
  check_has_storage(o.input, "scaled_linear: input");
  check_has_storage(o.weight, "scaled_linear: weight");
  if (is_given(o.input_scale)) check_has_storage(*o.input_scale, "scaled_linear: input_scale");
  if (is_given(o.weight_scale)) check_has_storage(*o.weight_scale, "scaled_linear: weight_scale");
  if (is_given(o.bias)) check_has_storage(*o.bias, "scaled_linear: bias");
}

Tensor matrix_of(const Tensor& tensor) {
  return tensor.dim() == 2 ? tensor : tensor.reshape_symint({rows_of(tensor), tensor.sym_size(-1)});
}

// ---- the product of dequantised operands ----

// `sums`: (rows, outputs). One rounding, at the end.
Tensor scaled_sums(const Operands& o, const Tensor& sums) {
  Tensor result = sums;
  auto multiply = [&](const OptionalTensor& scale, at::IntArrayRef each) {
    if (!is_given(scale)) return;
    result = result.mul(scale->numel() == 1 ? scale->reshape({}) : scale->reshape(each));
  };
  if (o.out_dtype != at::kInt) result = result.to(at::kFloat);
  multiply(o.input_scale, {-1, 1});
  multiply(o.weight_scale, {1, -1});
  if (is_given(o.bias)) result = result.add(*o.bias);
  return result.to(o.out_dtype).view_symint(with_last(o.input, o.weight.sym_size(0)));
}

// Sums of int8 are exact. ATen has no product of 8-bit floats for every shape; as float32 they are
// exact, too, and so are their products.
Tensor scaled_linear_cpu_kernel(const Tensor& input, const OptionalTensor& input_scale,
                                const Tensor& weight, const OptionalTensor& weight_scale,
                                const OptionalTensor& bias, at::ScalarType out_dtype,
                                bool use_fast_accum) {
  const Operands o{input, input_scale, weight, weight_scale, bias, out_dtype, use_fast_accum};
  check_scaled(o);
  check_storages(o);
  const Tensor rows = matrix_of(input);
  if (o.has_int8()) {
    return scaled_sums(o, at::_int_mm(rows.contiguous(), weight.contiguous().t()));
  }
  return scaled_sums(o, at::mm(rows.to(at::kFloat), weight.to(at::kFloat).t()));
}

#ifdef WARPWRIGHT_WITH_CUDA

// Codes of int8 and of 8-bit floats are exact in bfloat16. linear's gradient kernel has float32
// sums.
Tensor dequantized_product(const Operands& o) {
  const Tensor rows = matrix_of(o.input);
  if (o.out_dtype == at::kInt) {  // exact
    return scaled_sums(o, at::mm(rows.to(at::kDouble), o.weight.to(at::kDouble).t()));
  }
  static const auto product = find_op<std::tuple<Tensor, Tensor, Tensor>(
      const Tensor&, const OptionalTensor&, const OptionalTensor&, std::array<bool, 3>,
      std::array<bool, 3>)>("warpwright::linear_backward");
  constexpr std::array<bool, 3> kInput = {true, false, false};
  return scaled_sums(o, std::get<0>(product.call(rows.to(at::kBFloat16), {},
                                                 o.weight.to(at::kBFloat16).t(), kInput, kInput)));
}

// A matrix of codes that TMA can address: rows at multiples of 16 bytes. A copy gets zeros at the
// end of each row, which add nothing to a product.
Tensor addressable(const Tensor& matrix) {
  const Tensor bytes = matrix.view(at::kByte);
  const int64_t k = bytes.size(1);
  if (bytes.stride(1) == 1 && (bytes.size(0) == 1 || bytes.stride(0) >= k) &&
      rows_are_aligned(bytes.const_data_ptr(), bytes.stride(0), 16) && k % 16 == 0) {
    return bytes;
  }
  return at::constant_pad_nd(bytes, {0, (16 - k % 16) % 16}).contiguous();
}

Tensor scaled_linear_cuda_kernel(const Tensor& input, const OptionalTensor& input_scale,
                                 const Tensor& weight, const OptionalTensor& weight_scale,
                                 const OptionalTensor& bias, at::ScalarType out_dtype,
                                 bool use_fast_accum) {
  const Operands o{input, input_scale, weight, weight_scale, bias, out_dtype, use_fast_accum};
  check_scaled(o);
  const CudaCall call(input);
  check_storages(o);
  Product8BitParams p{.m = rows_of(input).expect_int(),
                      .n = weight.size(0),
                      .k = weight.size(1),
                      .a_codes = *find_codes(input.scalar_type()),
                      .b_codes = *find_codes(weight.scalar_type()),
                      .exact = !use_fast_accum,
                      .type = *find_dtype(out_dtype),
                      .sm90 = sm90_path_available()};
  if (why_not_product_8bit(p) != nullptr) return dequantized_product(o);
  Tensor output = empty_output(o);
  if (output.numel() == 0) return output;
  const Tensor a = addressable(matrix_of(input)), b = addressable(weight);
  p.k = a.size(1);
  p.a = a.const_data_ptr();
  p.b = b.const_data_ptr();
  p.a_pitch = a.stride(0);
  p.b_pitch = b.stride(0);
  Tensor scales[2], dense_bias;
  auto numbers = [](const OptionalTensor& scale, Tensor& owner, bool& several) -> const float* {
    if (!is_given(scale)) return nullptr;
    owner = scale->contiguous();
    several = owner.numel() > 1;
    return owner.const_data_ptr<float>();
  };
  p.row_scale = numbers(input_scale, scales[0], p.scales_rows);
  p.col_scale = numbers(weight_scale, scales[1], p.scales_cols);
  if (is_given(bias)) {
    dense_bias = bias->contiguous();
    p.bias = dense_bias.const_data_ptr();
    p.bias_type = dtype_of(dense_bias);
  }
  p.d = output.mutable_data_ptr();
  launch_product_8bit(p, choose_product_8bit(p, current_device_info()), call.stream);
  return output;
}
#endif

// ---- Meta ----

Tensor scaled_linear_meta(const Tensor& input, const OptionalTensor& input_scale,
                          const Tensor& weight, const OptionalTensor& weight_scale,
                          const OptionalTensor& bias, at::ScalarType out_dtype,
                          bool use_fast_accum) {
  const Operands o{input, input_scale, weight, weight_scale, bias, out_dtype, use_fast_accum};
  check_scaled(o);
  return empty_output(o);
}

// ---- Autograd: for codes that are given. linear_int8 and linear_fp8 have derivatives. ----

Tensor scaled_linear_autograd(const Tensor& input, const OptionalTensor& input_scale,
                              const Tensor& weight, const OptionalTensor& weight_scale,
                              const OptionalTensor& bias, at::ScalarType out_dtype,
                              bool use_fast_accum) {
  const std::array<std::pair<Tensor, const char*>, 5> arguments = {
      {{input, "input"},
       {value_or_undefined(input_scale), "input_scale"},
       {weight, "weight"},
       {value_or_undefined(weight_scale), "weight_scale"},
       {value_or_undefined(bias), "bias"}}};
  for (const auto& [tensor, name] : arguments) check_constant(tensor, "scaled_linear", name);
  return below_autograd([&] {
    return codes_ops::scaled_linear(input, input_scale, weight, weight_scale, bias, out_dtype,
                                    use_fast_accum);
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(warpwright, m) {
  m.def(
      "scaled_linear(Tensor input, Tensor? input_scale, Tensor weight, Tensor? weight_scale, "
      "Tensor? bias, ScalarType out_dtype, bool use_fast_accum=False) -> Tensor",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(warpwright, CPU, m) { m.impl("scaled_linear", scaled_linear_cpu_kernel); }

#ifdef WARPWRIGHT_WITH_CUDA
TORCH_LIBRARY_IMPL(warpwright, CUDA, m) { m.impl("scaled_linear", scaled_linear_cuda_kernel); }
#endif

TORCH_LIBRARY_IMPL(warpwright, Meta, m) { m.impl("scaled_linear", scaled_linear_meta); }

TORCH_LIBRARY_IMPL(warpwright, Autograd, m) { m.impl("scaled_linear", scaled_linear_autograd); }

}  // namespace warpwright
