// The pairs of element types that the kernels are compiled for.
#pragma once

#include <stdexcept>

#include "device/types.cuh"
#include "ops/layer_norm/layer_norm.h"

namespace warpwright {

// Calls f<T, O>() for `dtype` and a type next to it: the same one, or 16 bits next to float32.
template <class F>
void for_norm_types(DType dtype, DType other, F&& f) {
  for_dtype(dtype, [&]<class T>() {
    if (other == dtype) return f.template operator()<T, T>();
    if constexpr (std::is_same_v<T, float>) {
      if (other == DType::kBFloat16) return f.template operator()<T, bf16>();
      if (other == DType::kFloat16) return f.template operator()<T, half>();
    }
    throw std::logic_error("layer_norm: no kernel for this pair of types");
  });
}

// add.cuh defines these, and instances/ has a file per pair: x has type T, and each of y and the
// branch has type T or N.
template <class T, class N>
void launch_add_typed(const LayerNormParams& p, const LayerNormPlan& plan, cudaStream_t stream);
template <class T, class N>
void launch_add_backward_typed(const LayerNormBackwardParams& p, const LayerNormBackwardPlan& plan,
                               void* workspace, cudaStream_t stream);

// Calls f<T, N>() for a pair that instances/ has. The two types next to `dtype` are `dtype` itself
// or one 16-bit type.
template <class F>
void for_added_pair(DType dtype, DType first, DType second, F&& f) {
  const DType narrow = first != dtype ? first : second;
  if (first != dtype && second != dtype && first != second) {
    throw std::logic_error("add_layer_norm: no kernel for two different 16-bit types");
  }
  for_norm_types(dtype, narrow, [&]<class T, class N>() {
    if constexpr (!std::is_same_v<T, double>) return f.template operator()<T, N>();
    throw std::logic_error("add_layer_norm: no kernel for float64");
  });
}

}  // namespace warpwright
