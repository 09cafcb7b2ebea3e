// Device element types, their accumulator type, and conversion.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "common/dtype.h"
#include "common/switch.h"

namespace warpwright {

using bf16 = __nv_bfloat16;
using half = __half;

// fp64 accumulates in fp64, everything else in fp32.
template <class T>
struct AccumOf {
  using type = float;
};
template <>
struct AccumOf<double> {
  using type = double;
};
template <class T>
using Accum = typename AccumOf<T>::type;

template <class To, class From>
__host__ __device__ __forceinline__ To convert(From x) {
  if constexpr (std::is_same_v<To, From>) {
    return x;
  } else if constexpr (std::is_same_v<From, bf16>) {
    return static_cast<To>(__bfloat162float(x));
  } else if constexpr (std::is_same_v<From, half>) {
    return static_cast<To>(__half2float(x));
  } else if constexpr (std::is_same_v<To, bf16>) {
    // fp64 rounds once: a direct conversion, not double -> float -> bf16.
    if constexpr (std::is_same_v<From, double>)
      return __double2bfloat16(x);
    else
      return __float2bfloat16_rn(static_cast<float>(x));
  } else if constexpr (std::is_same_v<To, half>) {
    if constexpr (std::is_same_v<From, double>)
      return __double2half(x);
    else
      return __float2half_rn(static_cast<float>(x));
  } else {
    return static_cast<To>(x);
  }
}

template <class F>
void for_dtype(DType dtype, F&& f) {
  for_floating<bf16, half>(dtype, static_cast<F&&>(f));
}

template <class F>
void for_any_dtype(DType dtype, F&& f) {
  for_any<bf16, half>(dtype, static_cast<F&&>(f));
}

}  // namespace warpwright
