// Shared by the CPU kernels: ATen's thread pool and the dtype switch over c10 types.
#pragma once

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <stdexcept>

#include "common/dtype.h"

namespace warpwright {

// The fewest elements per thread that repay waking it (as at::internal::GRAIN_SIZE).
constexpr int64_t kCpuGrain = 32768;

// 16-bit types compute in float.
template <class T>
using CpuCompute =
    std::conditional_t<std::is_same_v<T, c10::BFloat16> || std::is_same_v<T, c10::Half>, float, T>;

template <class F>
void for_cpu_dtype(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat32:
      return f.template operator()<float>();
    case DType::kFloat64:
      return f.template operator()<double>();
    case DType::kBFloat16:
      return f.template operator()<c10::BFloat16>();
    case DType::kFloat16:
      return f.template operator()<c10::Half>();
    default:
      throw std::logic_error("warpwright: no floating-point kernel for an integer type");
  }
}

template <class F>
void for_any_cpu_dtype(DType dtype, F&& f) {
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
      return for_cpu_dtype(dtype, static_cast<F&&>(f));
  }
}

}  // namespace warpwright
