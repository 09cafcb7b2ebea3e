// explain() of the matrix product's ops, linear and linear_cross_entropy, and the bytes that a
// product moves. Pure host functions, as in explain.cpp.
#ifdef WARPWRIGHT_WITH_CUDA
#undef WARPWRIGHT_WITH_CUDA
#endif
#include <algorithm>
#include <array>
#include <map>
#include <optional>

#include "ops/linear/linear.h"
#include "ops/linear/mlp.h"
#include "ops/linear_cross_entropy/linear_cross_entropy.h"
#include "ops/linear_quantized/linear_quantized.h"
#include "python/explain.h"

namespace py = pybind11;

namespace warpwright {
namespace {

// ---- linear ----

// Leading dimensions folded, one direction contiguous.
struct Matrix {
  int64_t rows, cols, stride_row, stride_col, address;
  Matrix transposed() const { return {cols, rows, stride_col, stride_row, address}; }
};

Matrix as_matrix(const TensorLayout& x) {
  const size_t dims = x.sizes.size();
  Matrix m{1, x.sizes[dims - 1], 0, 1, x.address};
  for (size_t d = 0; d + 1 < dims; ++d) m.rows *= x.sizes[d];
  const MatrixStrides folded =
      dims == 2 ? MatrixStrides{x.strides[0], x.strides[1]} : MatrixStrides{m.cols, 1};
  const auto strides = matrix_strides(m.rows, m.cols, folded);
  if (!strides) return {m.rows, m.cols, m.cols, 1, 0};  // copied
  m.stride_row = strides->row;
  m.stride_col = strides->col;
  return m;
}

// The kernels that the products may use.
struct Allowed {
  bool tf32;
  bool tf32x3;  // what `tf32` does not round may be split into two TF32 numbers
  bool sm90;    // the library has the sm_90a kernels and they are wanted
};

GemmParams gemm_params(DType dtype, const Allowed& allowed, const Matrix& a, const Matrix& b) {
  auto operand = [&](const Matrix& m) {
    return make_operand(reinterpret_cast<const void*>(m.address), dtype, m.stride_row,
                        m.stride_col);
  };
  GemmParams p{};
  p.m = a.rows;
  p.n = b.rows;
  p.k = a.cols;
  p.a = operand(a);
  p.b = operand(b);
  p.tf32 = allowed.tf32;
  p.tf32x3 = allowed.tf32x3;
  p.sm90 = allowed.sm90;
  return p;
}

std::string describe_product(const GemmParams& p, const DeviceInfo& device) {
  return describe(p, choose_linear(p, device));
}

Lines explain_linear(const std::string& dtype, bool tf32, const TensorLayout& input,
                     const TensorLayout& weight, const DeviceInfo& device, bool sm90, bool tf32x3,
                     bool bias) {
  const DType type = dtype_from(dtype);
  const Allowed allowed{tf32, tf32x3, sm90 && device.sm_arch == 90};
  const Matrix x = as_matrix(input);
  const Matrix w = as_matrix(weight);
  const Matrix dy{x.rows, w.rows, w.rows, 1, 0};
  ColumnSumParams sum{};
  sum.dtype = type;
  sum.rows = dy.rows;
  sum.cols = dy.cols;
  sum.stride_row = dy.stride_row;
  sum.stride_col = 1;
  sum.sum = &sum;  // any address marks the gradient as wanted
  LinearGradients gradients{gemm_params(type, allowed, dy, w.transposed()),
                            gemm_params(type, allowed, dy.transposed(), x.transposed()),
                            {}};
  if (bias) gradients.bias = sum;
  const LinearGradientsPlan plan = choose_linear_gradients(gradients, device);
  const std::string forward = describe_product(gemm_params(type, allowed, x, w), device);
  if (plan.head) {
    const std::string all = "a classifier's head, FMA, one kernel for all gradients";
    Lines lines{{"forward", forward}, {"grad_input", all}, {"grad_weight", all}};
    if (bias) lines.push_back({"grad_bias", all});
    return lines;
  }
  const bool copies_dy = plan.dy_copy_bytes != 0;
  const LinearGradients products =
      copies_dy ? with_copied_dy(gradients, copy_of_dy(gradients, nullptr)) : gradients;
  auto line = [&](const GemmParams& p, const std::optional<LinearPlan>& chosen) {
    if (!chosen) return describe_product(p, device);
    return describe(p, *chosen) + (copies_dy ? ", of one copy of dy in aligned rows" : "");
  };
  Lines lines{{"forward", forward},
              {"grad_input", line(*products.input, plan.input)},
              {"grad_weight", line(*products.weight, plan.weight)}};
  if (bias) {
    lines.push_back({"grad_bias", plan.bias
                                      ? describe(*plan.bias)
                                      : "in grad_weight's product, dy^T times 8 columns of ones"});
  }
  return lines;
}

// The gradient of the hidden layer, and whether one kernel computes it. weight: the second.
std::pair<std::string, bool> explain_mlp(const std::string& dtype, const TensorLayout& hidden,
                                         const TensorLayout& weight, const DeviceInfo& device,
                                         bool sm90) {
  const Matrix h = as_matrix(hidden), w = as_matrix(weight);
  const Matrix dy{h.rows, w.rows, w.rows, 1, 0};
  const Allowed allowed{false, false, sm90 && device.sm_arch == 90};
  const HiddenGradientParams p{gemm_params(dtype_from(dtype), allowed, dy, w.transposed()),
                               nullptr};
  const HiddenGradientPlan plan = choose_hidden_gradient(p, device);
  return {describe(p, plan), plan.fused};
}

using Bytes = std::map<std::string, double>;

Bytes bytes_of(const Sm90Traffic& traffic) {
  return {{"l2", traffic.l2_bytes},
          {"dram_read", traffic.dram_read},
          {"dram_written", traffic.dram_written}};
}

// Bytes of D (m, n) = A (m, k) B^T (n, k) in elements of `size` bytes. sharing: CTAs that load one
// A together. raster_rows: rows of A that one group of tiles shares.
Bytes gemm_traffic(const std::array<int64_t, 3>& mnk, int64_t size,
                   const std::array<int64_t, 2>& tile, const DeviceInfo& device, int64_t splits,
                   int64_t sharing, int64_t raster_rows) {
  const Sm90Cut cut{.blk_m = tile[0],
                    .blk_n = tile[1],
                    .splits = splits,
                    .raster_rows = raster_rows,
                    .sharing = sharing};
  return bytes_of(sm90_traffic(mnk[0], mnk[1], mnk[2], size, cut, device));
}

// Bytes of linear's products on sm_90a tiles, by role.
std::map<std::string, Bytes> linear_traffic(const std::string& dtype, const TensorLayout& input,
                                            const TensorLayout& weight, const DeviceInfo& device) {
  const DType type = dtype_from(dtype);
  const Allowed allowed{true, false, device.sm_arch == 90};
  const Matrix x = as_matrix(input);
  const Matrix w = as_matrix(weight);
  const Matrix dy{x.rows, w.rows, w.rows, 1, 0};
  const std::pair<const char*, GemmParams> products[] = {
      {"forward", gemm_params(type, allowed, x, w)},
      {"grad_input", gemm_params(type, allowed, dy, w.transposed())},
      {"grad_weight", gemm_params(type, allowed, dy.transposed(), x.transposed())}};
  std::map<std::string, Bytes> roles;
  for (const auto& [role, p] : products) {
    const LinearPlan plan = choose_linear(p, device);
    if (plan.head || plan.gemm.variant != GemmVariant::kSm90) continue;
    roles[role] =
        bytes_of(planned_traffic(with_copies(p, plan.copies, nullptr), plan.gemm, device));
  }
  return roles;
}

// ---- linear_cross_entropy ----

Lines explain_linear_cross_entropy(const std::string& dtype, bool tf32, const TensorLayout& input,
                                   const TensorLayout& weight, int64_t chunk_rows,
                                   const DeviceInfo& device, bool sm90, bool tf32x3) {
  const DType type = dtype_from(dtype);
  const Matrix w = as_matrix(weight);
  const ChunkPlan plan =
      choose_chunks(type, numel(input) / std::max<int64_t>(1, w.cols), w.cols, w.rows, chunk_rows,
                    sm90 && device.sm_arch == 90 && w.cols % 8 == 0);
  const int64_t pitch = logits_pitch(w.rows);
  const Matrix x{plan.rows, w.cols, w.cols, 1, 0}, dz{plan.rows, w.rows, pitch, 1, 0};
  const Allowed allowed{tf32, tf32x3, sm90 && device.sm_arch == 90};
  auto line = [&](const Matrix& a, const Matrix& b) {
    return describe_product(gemm_params(type, allowed, a, b), device);
  };
  GemmParams sum = gemm_params(type, allowed, dz.transposed(), x.transposed());
  sum.accumulate = plan.count > 1;  // from the second chunk on
  sum.accum_d = sum.accumulate && plan.wide_sum;
  return {{"chunks", describe(plan)},
          {"logits", line(x, w)},
          {"grad_input", line(dz, w.transposed())},
          {"grad_weight", describe_product(sum, device)}};
}

}  // namespace

// ---- linear_quantized ----

// The plan of the forward or of the gradient, whose `input` is then dy, and whether a fused kernel
// takes it.
std::pair<std::string, bool> explain_linear_quantized(
    const std::string& dtype, const TensorLayout& input, bool is_int8, bool fragments,
    const TensorLayout& codes, const std::string& scale_dtype, const TensorLayout& scales,
    const std::optional<TensorLayout>& zeros, const DeviceInfo& device, bool sm90, bool gradient) {
  const Matrix x = as_matrix(input);
  const bool grouped = !is_int8 && scales.sizes.at(1) > 0;
  LinearQuantizedParams p{};
  p.weight.bits = is_int8 ? 8 : 4;
  p.weight.outputs = codes.sizes.at(0);
  p.weight.features = codes.sizes.at(1) * (is_int8 ? 1 : 2);
  p.weight.group = grouped ? p.weight.features / scales.sizes.at(1) : p.weight.features;
  p.weight.fragments = fragments;
  p.weight.scale_dtype = dtype_from(scale_dtype);
  p.weight.scales = reinterpret_cast<const void*>(scales.address);
  p.weight.scale_strides[0] = scales.strides.at(0);
  p.weight.scale_strides[1] = grouped ? scales.strides.at(1) : 0;
  if (zeros) {
    constexpr int64_t kSomewhere = 4096;  // not null: there are zero points
    p.weight.zeros = reinterpret_cast<const uint8_t*>(std::max(zeros->address, kSomewhere));
    p.weight.zero_strides[0] = zeros->strides.at(0);
    p.weight.zero_strides[1] = zeros->strides.at(1);
  }
  p.sm90 = sm90 && device.sm_arch == 90;
  p.dtype = dtype_from(dtype);
  p.rows = x.rows;
  p.input = reinterpret_cast<const void*>(x.address);
  p.input_pitch = x.stride_col == 1 ? x.stride_row : x.cols;
  const LinearQuantizedPlan plan =
      gradient ? choose_linear_quantized_backward(p, device) : choose_linear_quantized(p, device);
  return {describe(plan), plan.fused};
}

void define_explain_linear(py::module_& m) {
  m.def("explain_linear", &explain_linear, py::arg("dtype"), py::arg("tf32"), py::arg("input"),
        py::arg("weight"), py::arg("device"), py::arg("sm90"), py::arg("tf32x3") = false,
        py::arg("bias") = true);
  m.def("explain_linear_cross_entropy", &explain_linear_cross_entropy, py::arg("dtype"),
        py::arg("tf32"), py::arg("input"), py::arg("weight"), py::arg("chunk_rows"),
        py::arg("device"), py::arg("sm90"), py::arg("tf32x3") = false);
  m.def("gemm_traffic", &gemm_traffic, py::arg("mnk"), py::arg("size"), py::arg("tile"),
        py::arg("device"), py::arg("splits") = 1, py::arg("sharing") = 1,
        py::arg("raster_rows") = int64_t{kRasterRows});
  m.def("explain_linear_quantized", &explain_linear_quantized);
  m.def("explain_mlp", &explain_mlp);
  m.def("linear_traffic", &linear_traffic);
}

}  // namespace warpwright
