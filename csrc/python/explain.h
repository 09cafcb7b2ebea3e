// explain(): the plan that each op's choose_…() makes for given operands, as text.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "common/dtype.h"

namespace warpwright {

// (kernel's role, description) pairs in the order of the launches.
using Lines = std::vector<std::pair<std::string, std::string>>;

struct TensorLayout {
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int64_t address;  // of the first element; 0 if there is no memory yet: freshly allocated
};

inline DType dtype_from(const std::string& name) {
  for (int i = 0; i <= static_cast<int>(DType::kInt64); ++i) {
    if (name == dtype_name(static_cast<DType>(i))) return static_cast<DType>(i);
  }
  throw std::invalid_argument("explain: dtype: expected one with a kernel, got " + name);
}

inline int64_t numel(const TensorLayout& x) {
  int64_t n = 1;
  for (const int64_t size : x.sizes) n *= size;
  return n;
}

// Adds explain_<op>() to the module. Each returns one line per kernel of a call and its backward.
void define_explain(pybind11::module_& m);
// Its parts: attention, elementwise ops, embedding, layer_scale_add, the matrix product's ops,
// reductions and scans, squeeze-and-excitation, transposed and FFT convolution.
void define_explain_attention(pybind11::module_& m);
void define_explain_conv_transpose2d(pybind11::module_& m);
void define_explain_elementwise(pybind11::module_& m);
void define_explain_embedding(pybind11::module_& m);
void define_explain_layer_scale_add(pybind11::module_& m);
void define_explain_linear(pybind11::module_& m);
void define_explain_linear_8bit(pybind11::module_& m);
void define_explain_reduction(pybind11::module_& m);
void define_explain_squeeze_excitation(pybind11::module_& m);
void define_explain_fft_conv(pybind11::module_& m);

}  // namespace warpwright
