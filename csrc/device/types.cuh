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
  switch (dtype) {
    case DType::kFloat32:
      return f.template operator()<float>();
    case DType::kFloat64:
      return f.template operator()<double>();
    case DType::kBFloat16:
      return f.template operator()<bf16>();
    case DType::kFloat16:
      return f.template operator()<half>();
    default:
      throw std::logic_error("warpwright: no floating-point kernel for an integer type");
  }
}

template <class F>
void for_any_dtype(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kUInt8:
      return f.template operator()<uint8_t>();
    case DType::kInt8:
      return f.template operator()<int8_t>();
    case DType::kInt16:
      return f.template operator()<int16_t>();
    case DType::kInt32:
      return f.template operator()<int32_t>();
    case DType::kInt64:
      return f.template operator()<int64_t>();
    default:
      return for_dtype(dtype, static_cast<F&&>(f));
  }
}

}  // namespace warpwright
