// layer_scale_add: y = residual + scale * x * sample_scale. `scale` has a value per channel
// (LayerScale, Touvron et al., arXiv:2103.17239), `sample_scale` one per sample (stochastic depth,
// Huang et al., arXiv:1603.09382). One rounding, that of the result.
// Memory-bound. Bytes (E = x, O = y): E + 2O forward. Backward: reads dy and x once and writes
// dx = dy * sample_scale * scale; the same pass sums dscale = sum of dy * sample_scale * x over the
// rows of each channel. 2E + O. The gradient of the residual is dy itself. A copy of y in x's type,
// for a reader that would cast it, adds E to the forward; a cast of its own would move O + E.
//
// Layout: x, dx (rows, channels) of `dtype`; residual, y, dy, scale of `output_dtype`, the same or
// float32 next to 16 bits. All are dense, channels innermost. The rows of a sample are consecutive.
#pragma once

#include <cstdint>
#include <string>

#include "common/address.h"
#include "common/dtype.h"
#include "gemm/column_sum.h"

#ifdef WARPWRIGHT_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace warpwright {

struct LayerScaleShape {
  DType dtype, output_dtype;
  int64_t rows, channels;
  int64_t rows_per_sample;
};

struct LayerScaleAddParams {
  LayerScaleShape shape;
  const void* input;
  const void* residual;  // of residual_dtype: y's type, or x's
  DType residual_dtype;
  const void* scale;         // (channels)
  const void* sample_scale;  // (rows / rows_per_sample) of output_dtype, or null
  void* output;
  void* copy = nullptr;  // y in x's type, next to a float32 y; null: not wanted
};

struct LayerScaleAddBackwardParams {
  LayerScaleShape shape;
  const void* grad_output;
  const void* input;
  const void* scale;
  const void* sample_scale;  // or null
  void* grad_input;          // null: not wanted
  void* grad_scale;          // (channels), of output_dtype; null: not wanted
};

// A call as its tensors describe it, without their memory.
struct LayerScaleCall {
  DType dtype, other_dtype, output_dtype;  // x; the residual, or the gradient of y; y
  int64_t dims;
  const int64_t *sizes, *strides;  // of x
  const int64_t* other_strides;
  int64_t channel;  // the dimension of x that `scale` has values for; -1: it has a single one
  bool scales_samples;
  bool is_backward = false;

  int64_t numel() const {
    int64_t count = 1;
    for (int64_t d = 0; d < dims; ++d) count *= sizes[d];
    return count;
  }
  // Whether x has each element of its memory once. Follows the strides from the innermost one.
  bool is_dense() const {
    int64_t pitch = 1;
    for (int64_t found = 0; found < dims; ++found) {  // a dimension per round, or none is left
      for (int64_t d = 0; d < dims; ++d) {
        if (sizes[d] != 1 && strides[d] == pitch) {
          pitch *= sizes[d];
          break;
        }
      }
    }
    return pitch == numel();
  }
  bool has_same_strides() const {
    for (int64_t d = 0; d < dims; ++d) {
      if (strides[d] != other_strides[d]) return false;
    }
    return true;
  }
};

// The shape that the kernels take, or the reason why one op runs after the other.
struct LayerScaleFit {
  LayerScaleShape shape{};
  const char* why_not = nullptr;
};

inline LayerScaleFit fit_layer_scale(const LayerScaleCall& c) {
  const auto no = [](const char* reason) { return LayerScaleFit{{}, reason}; };
  if (c.channel < 0) return no("scale has one value");
  const auto channel = static_cast<size_t>(c.channel);
  // The first block of a stage adds to 16 bits, those of the convolution before it.
  const bool adds_to_narrow = !c.is_backward && c.other_dtype == c.dtype;
  if (c.other_dtype != c.output_dtype && !adds_to_narrow) {
    return no("the residual is not of the result's type");
  }
  if (c.strides[channel] != 1) return no("channels are not innermost in memory");
  if (!c.is_dense()) return no("the input has gaps in memory");
  if (!c.has_same_strides()) return no("input and residual differ in memory order");
  const bool outermost = c.channel != 0 && c.strides[0] * c.sizes[0] == c.numel();
  if (c.scales_samples && !outermost) return no("samples are not outermost in memory");
  const bool one_type = c.output_dtype == c.dtype;
  const bool wider = c.output_dtype == DType::kFloat32 && dtype_size(c.dtype) == 2;
  if (!one_type && !wider) return no("types other than one, or 16 bits next to float32");
  const int64_t channels = c.sizes[channel], rows = c.numel() / channels;
  constexpr int64_t kMaxExtent = int64_t{1} << 31;  // rows and channels are counted in 32 bits
  if (rows >= kMaxExtent || channels >= kMaxExtent) return no("an extent of 2^31 or more");
  return {{c.dtype, c.output_dtype, rows, channels, c.scales_samples ? rows / c.sizes[0] : rows}};
}

struct LayerScalePlan {
  int vec;  // elements per access of x
  const char* reason;
};

// `addresses`: bitwise or of the element pointers. An access of y may be two of 16 bytes.
inline LayerScalePlan choose_layer_scale_add(const LayerScaleShape& s, uintptr_t addresses) {
  const int wide = static_cast<int>(16 / dtype_size(s.dtype));
  if (s.channels % wide != 0) return {1, "channels are no multiple of 16 bytes: element accesses"};
  if (addresses % static_cast<uintptr_t>(wide * dtype_size(s.output_dtype)) != 0) {
    return {1, "an address is misaligned: element accesses"};
  }
  return {wide, "16-byte accesses"};
}

inline LayerScalePlan choose_layer_scale_add(const LayerScaleAddParams& p) {
  return choose_layer_scale_add(p.shape,
                                addresses_of(p.input, p.residual, p.scale, p.output, p.copy));
}

// The backward is a sum over columns that writes dx on its way.
inline ColumnSumParams column_sum_of(const LayerScaleAddBackwardParams& p) {
  return {.dtype = p.shape.dtype,
          .rows = p.shape.rows,
          .cols = p.shape.channels,
          .matrix = p.input,
          .stride_row = p.shape.channels,
          .stride_col = 1,
          .sum = p.grad_scale,
          .wide_sum = p.shape.output_dtype != p.shape.dtype};
}

inline ColumnSumPlan choose_layer_scale_add_backward(const LayerScaleAddBackwardParams& p,
                                                     const DeviceInfo& device) {
  const auto wide = static_cast<uintptr_t>(16 / dtype_size(p.shape.dtype));
  const uintptr_t outputs = addresses_of(p.grad_output, p.scale);
  // A misaligned operand of y's type keeps all accesses at one element.
  const uintptr_t misaligned =
      outputs % (wide * static_cast<uintptr_t>(dtype_size(p.shape.output_dtype))) != 0 ? 1 : 0;
  return choose_column_sum(
      column_sum_of(p), device,
      {.other_addresses = addresses_of(p.grad_input) | misaligned, .ctas_per_sm = 4});
}

inline std::string describe(const LayerScalePlan& plan) { return plan.reason; }

#ifdef WARPWRIGHT_WITH_CUDA
void launch_layer_scale_add(const LayerScaleAddParams& params, const LayerScalePlan& plan,
                            cudaStream_t stream);
// `workspace`: plan.workspace_bytes.
void launch_layer_scale_add_backward(const LayerScaleAddBackwardParams& params,
                                     const ColumnSumPlan& plan, void* workspace,
                                     cudaStream_t stream);
#endif

}  // namespace warpwright
