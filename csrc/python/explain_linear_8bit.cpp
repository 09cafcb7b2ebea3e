// explain() of quantize_rows, linear_int8 and linear_fp8. Pure host functions, as in explain.cpp.
#ifdef WARPWRIGHT_WITH_CUDA
#undef WARPWRIGHT_WITH_CUDA
#endif
#include "ops/linear_8bit/linear_8bit.h"
#include "python/explain.h"

namespace py = pybind11;

namespace warpwright {
namespace {

Codes codes_from(const std::string& dtype) {
  return dtype == "int8" ? Codes::kInt8 : dtype == "float8_e4m3fn" ? Codes::kE4m3 : Codes::kE5m2;
}

int64_t rows_of(const TensorLayout& x) {
  int64_t rows = 1;
  for (size_t d = 0; d + 1 < x.sizes.size(); ++d) rows *= x.sizes[d];
  return rows;
}

// As if the input were dense, and the codes began where allocations begin.
Lines explain_quantize_rows(const std::string& dtype, const std::string& codes,
                            const TensorLayout& input, bool per_tensor, const DeviceInfo& device) {
  QuantizeRowsParams p{};
  p.dtype = dtype_from(dtype);
  p.codes = codes_from(codes);
  p.rows = rows_of(input);
  p.cols = p.pitch = input.sizes.back();
  p.input = reinterpret_cast<const void*>(input.address);
  p.per_tensor = per_tensor;
  if (p.rows == 0 || p.cols == 0) return {{"codes", "nothing to do"}};
  return {{"codes", describe(choose_quantize_rows(p, device))}};
}

// As if the result began where allocations begin.
Lines explain_product_8bit(const std::string& codes, const std::string& result,
                           const TensorLayout& input, const TensorLayout& weight, bool exact,
                           const DeviceInfo& device, bool sm90) {
  Product8BitParams p{};
  p.type = dtype_from(result);
  p.m = rows_of(input);
  p.n = weight.sizes.at(0);
  p.k = weight.sizes.at(1);
  p.a_codes = p.b_codes = codes_from(codes);
  p.exact = exact;
  p.sm90 = sm90 && device.sm_arch == 90;
  if (const char* why_not = why_not_product_8bit(p)) {
    return {{"forward", "codes as bfloat16, then linear's product with float32 sums (" +
                            std::string(why_not) + ")"}};
  }
  std::string text = describe(p, choose_product_8bit(p, device));
  if (p.k % 16 != 0) text += "; copies of both operands, whose rows start at multiples of 16 bytes";
  return {{"forward", text}};
}

}  // namespace

void define_explain_linear_8bit(py::module_& m) {
  m.def("explain_quantize_rows", &explain_quantize_rows);
  m.def("explain_product_8bit", &explain_product_8bit);
}

}  // namespace warpwright
